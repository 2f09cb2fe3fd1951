package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"sluice/bench/sim"
)

const simExamples = `
Examples:
  sluice sim                                    one engine on a free port
  sluice sim --role prefill & sluice sim --role decode &
      two engines side by side, ready for: sluice serve --prefill URL --decode URL
  sluice sim --engine sglang --role prefill --bootstrap 127.0.0.1:8998 & sluice sim --engine sglang --role decode &
      a pair of SGLang engines that meet through the bootstrap server
  sluice sim --pd mooncake --role prefill --bootstrap 127.0.0.1:8998    vLLM with the MooncakeConnector
  sluice sim --ranks 4 --kv-events tcp://127.0.0.1:5557 --speed 10
  sluice sim --fault kind=reset,after=5,p=0.1   one stream in ten is reset after five chunks
  kill -USR1 PID, kill -USR2 PID                stops its engine core while its API server answers, and lets it go on
  sluice sim --fault kind=stall,leg=handover,id=slow-     the KV of requests named slow-… never comes

The first line on standard output is the address it listens on.
`

// runSim runs one simulated engine until ctx ends.
func runSim(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o sim.Options
	fs := flag.NewFlagSet("sluice sim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	o.Flags(fs)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), "Usage: sluice sim [flags]\n\nA simulated engine: real HTTP, real KV events, output that is a function of\nmodel, token ids and seed.\n\nFlags:\n")
		fs.PrintDefaults()
		fmt.Fprint(fs.Output(), simExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	e, err := sim.Start(ctx, o)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	fmt.Fprintln(stdout, strings.TrimPrefix(e.URL(), "http://"))
	fmt.Fprintf(stderr, "sim: %s %s engine, model %q\n", o.Engine, o.Role, o.Model)
	if host, port := e.Bootstrap(); port > 0 {
		fmt.Fprintf(stderr, "sim: bootstrap server on %s:%d\n", host, port)
	}
	for i, u := range e.KVEndpoints() {
		fmt.Fprintf(stderr, "sim: rank %d publishes KV events at %s\n", i, u)
	}
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
