package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"sluice/dataplane/membudget"
	"sluice/dataplane/memtuner"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/obs"
)

const sidecarUsage = `Usage: sluice sidecar --engine URL [flags]

Runs beside one decode engine, behind somebody else's router: the prefill leg, the
hand-over and the relay of serve. The request names its prefill worker by a header,
X-Prefiller-Host-Port or X-Sluice-Prefill, inside --prefill-networks; without one the
sidecar takes one of --prefill, and without those the engine does the whole request.

Flags:
`

const sidecarExamples = `
Examples:
  sluice sidecar --listen 0.0.0.0:8000 --engine http://127.0.0.1:8200 --prefill-networks 10.0.0.0/8
      vLLM NixlConnector; requests name prefill workers of the pods' network
  sluice sidecar --engine http://127.0.0.1:8200,ranks=4 --prefill-networks 10.0.0.0/8 --rank-addresses 10.0.0.7:8000,10.0.0.7:8001,10.0.0.7:8002,10.0.0.7:8003
      four data-parallel ranks behind one URL, each known to the router by an address
  sluice sidecar --engine http://127.0.0.1:8200 --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000
      the sidecar chooses the prefill worker itself
  sluice sidecar --pd sglang --engine http://127.0.0.1:30000 --prefill-networks 10.0.0.0/8 --prefill-options bootstrap_port=8998
      SGLang; every prefill worker has its bootstrap server on this port

The first line on standard output is the address it listens on; logs go to standard
error. /readyz follows the engine's health. SIGTERM drains and ends it.
A pod spec, a systemd unit and the headers: docs/sidecar.md.
`

// runSidecar runs the sidecar until ctx ends.
func runSidecar(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice sidecar", flag.ContinueOnError)
	fs.SetOutput(stderr)
	flags := config.RegisterSidecarFlags(fs)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), sidecarUsage)
		fs.PrintDefaults()
		fmt.Fprintf(fs.Output(), "\nKeys of a worker (after its URL, by commas):\n%s%s", config.KeyTable(), sidecarExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	fail := func(err error) int {
		fmt.Fprintln(stderr, "sluice sidecar:", err)
		return 1
	}
	given, err := app.InheritListeners()
	if err != nil {
		return fail(err)
	}
	cfg, err := flags.Resolve(os.Environ())
	if err != nil {
		given.ReportFailed(err)
		fmt.Fprintln(stderr, err)
		return 1
	}
	log, level, err := obs.NewLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	if err != nil {
		return fail(err)
	}
	for _, w := range cfg.InputWarnings() {
		log.Warn("the configuration may not say what was meant", "warning", w)
	}
	r, err := app.New(app.Options{Config: cfg, Log: log, LogLevel: level, Version: version, Inherited: given, Sidecar: flags})
	if err != nil {
		given.ReportFailed(err)
		return fail(err)
	}
	if !given.Replaces() {
		fmt.Fprintln(stdout, r.Addr())
	}
	go memtuner.Run(ctx, memtuner.Options{Percent: sidecarGC, Idle: membudget.Default.TrimIdle})
	if err := r.RunWithSignals(ctx); err != nil {
		return fail(err)
	}
	return 0
}

// sidecarGC is the GC percentage of a sidecar. Its live heap is a few MB, so collecting twice
// as often costs little CPU and leaves memory to the other processes of the node.
const sidecarGC = 50
