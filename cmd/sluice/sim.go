package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"sluice/bench/sim"
)

const simLong = `Runs one simulated engine: real HTTP and real KV events, and output that is a function of the
model, the token ids and the seed. The first line on standard output is the address on which it
listens.

SIGUSR1 stops the engine's core while its API server continues to answer; SIGUSR2 resumes it.`

const simExamples = `
  sluice sim                                    one engine on a free port
  sluice sim --role prefill & sluice sim --role decode &
      two engines for: sluice serve --prefill URL --decode URL
  sluice sim --engine sglang --role prefill --bootstrap 127.0.0.1:8998 & sluice sim --engine sglang --role decode &
      a pair of SGLang engines with a bootstrap server
  sluice sim --pd mooncake --role prefill --bootstrap 127.0.0.1:8998    vLLM with the MooncakeConnector
  sluice sim --ranks 4 --kv-events tcp://127.0.0.1:5557 --speed 10
  sluice sim --fault kind=reset,after=5,p=0.1   one stream in ten is reset after five chunks
  sluice sim --fault kind=stall,leg=handover,id=slow-     the KV of requests named slow-… never arrives`

func simCommand() *cobra.Command {
	var o sim.Options
	var asJSON bool
	fs := flag.NewFlagSet("sluice sim", flag.ContinueOnError)
	o.Flags(fs)
	cmd := newCommand(cobra.Command{
		Use: "sim [flags]", GroupID: groupTest, Short: "run one simulated engine", Long: simLong, Example: simExamples,
	}, "0 ended by a signal, 1 not started or crashed", func(cmd *cobra.Command, _ []string) int {
		return runSim(cmd.Context(), o, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the addresses as one line of JSON instead of the first line")
	completeFlag(cmd, "role", "prefill", "decode", "aggregated")
	completeFlag(cmd, "engine", "vllm", "sglang", "trtllm")
	completeFlag(cmd, "pd", sim.PDFamilies()...)
	return cmd
}

// runSim runs one simulated engine until ctx ends.
func runSim(ctx context.Context, o sim.Options, asJSON bool, stdout, stderr io.Writer) int {
	for _, w := range o.DeprecatedNames() {
		fmt.Fprintln(stderr, "sluice sim:", w)
	}
	e, err := sim.Start(ctx, o)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	printEngine(e, &o, asJSON, stdout, stderr)
	defer freezeOnSignal(e)()
	dead := false
	select {
	case <-ctx.Done():
	case <-e.Dead(): // an injected crash without a restart: end the process as well
		dead = true
	}
	if err := e.Close(); err != nil {
		fmt.Fprintln(stderr, "sluice sim:", err)
		return 1
	}
	if dead {
		fmt.Fprintln(stderr, "sluice sim: the engine crashed")
		return 1
	}
	return 0
}

// printEngine prints the addresses of an engine.
func printEngine(e *sim.Engine, o *sim.Options, asJSON bool, stdout, stderr io.Writer) {
	address, bootstrap := strings.TrimPrefix(e.URL(), "http://"), ""
	if host, port := e.Bootstrap(); port > 0 {
		bootstrap = fmt.Sprintf("%s:%d", host, port)
	}
	if asJSON {
		_ = json.NewEncoder(stdout).Encode(struct { // an engine runs even if nobody reads its addresses
			Address   string   `json:"address"`
			Engine    string   `json:"engine"`
			Role      string   `json:"role"`
			Model     string   `json:"model"`
			Bootstrap string   `json:"bootstrap,omitempty"`
			KVEvents  []string `json:"kv_events,omitempty"` // by rank
		}{address, o.Engine, o.Role, o.Model, bootstrap, e.KVEndpoints()})
		return
	}
	fmt.Fprintln(stdout, address)
	fmt.Fprintf(stderr, "sim: %s %s engine, model %q\n", o.Engine, o.Role, o.Model)
	if bootstrap != "" {
		fmt.Fprintf(stderr, "sim: bootstrap server on %s\n", bootstrap)
	}
	for i, u := range e.KVEndpoints() {
		fmt.Fprintf(stderr, "sim: rank %d publishes KV events at %s\n", i, u)
	}
}

// freezeOnSignal freezes the engine's core on SIGUSR1 and resumes it on SIGUSR2, until stop is
// called.
func freezeOnSignal(e *sim.Engine) (stop func()) {
	signals, done := make(chan os.Signal, 4), make(chan struct{})
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for {
			select {
			case s := <-signals:
				if s == syscall.SIGUSR1 {
					e.Freeze()
				} else {
					e.Thaw()
				}
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		close(done)
	}
}
