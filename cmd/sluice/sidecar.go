package main

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"sluice/dataplane/membudget"
	"sluice/dataplane/memtuner"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/obs"
)

const sidecarLong = `Runs beside one decode engine, behind another router, and does what serve does for one request:
the prefill leg, the hand-over and the relay. The request names its prefill worker in a header,
X-Prefiller-Host-Port or X-Sluice-Prefill, which must be inside --prefill-networks. Without such a
header the sidecar chooses one of --prefill; without those the engine runs the whole request.

The first line on standard output is the address on which it listens; logs go to standard error.
/readyz follows the engine's health. SIGTERM drains and ends it, SIGUSR2 replaces the process. It
reads no configuration file, so SIGHUP only logs that there is nothing to reload: change its flags
or variables and start it again. A pod spec, a systemd unit and the headers are in docs/sidecar.md.`

const sidecarExamples = `
  sluice sidecar --listen 0.0.0.0:8000 --engine http://127.0.0.1:8200 --prefill-networks 10.0.0.0/8
      vLLM NixlConnector; requests name prefill workers in the pods' network
  sluice sidecar --engine http://127.0.0.1:8200,ranks=4 --prefill-networks 10.0.0.0/8 --rank-addresses 10.0.0.7:8000,10.0.0.7:8001,10.0.0.7:8002,10.0.0.7:8003
      four data-parallel ranks behind one URL, each known to the router by an address
  sluice sidecar --engine http://127.0.0.1:8200 --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000
      the sidecar chooses the prefill worker
  sluice sidecar --pd sglang --engine http://127.0.0.1:30000 --prefill-networks 10.0.0.0/8 --prefill-options bootstrap_port=8998
      SGLang; every prefill worker has its bootstrap server on this port`

func sidecarCommand() *cobra.Command {
	fs := flag.NewFlagSet("sluice sidecar", flag.ContinueOnError)
	flags := config.RegisterSidecarFlags(fs)
	cmd := newCommand(cobra.Command{
		Use: "sidecar --engine URL [flags]", GroupID: groupRun, Short: "run beside one decode engine, behind another router",
		Long: sidecarLong, Example: sidecarExamples,
		Annotations: map[string]string{notes: workerKeyNotes(), logsWarnings: "true"},
	}, "0 ended by a signal, 1 not started or failed", func(cmd *cobra.Command, _ []string) int {
		return runSidecar(cmd.Context(), flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	completeConfig(cmd)
	return cmd
}

// runSidecar runs the sidecar until ctx ends.
func runSidecar(ctx context.Context, flags *config.SidecarFlags, stdout, stderr io.Writer) int {
	outliveOutputs()
	fail := func(err error) int {
		printFailure(stderr, flags.LogFormat(os.Environ()), "sluice sidecar", err.Error())
		return 1
	}
	given, err := app.InheritListeners()
	if err != nil {
		return fail(err)
	}
	cfg, err := flags.Resolve(os.Environ())
	if err != nil {
		given.ReportFailed(err)
		return fail(err)
	}
	log, level, err := obs.NewLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	if err != nil {
		return fail(err)
	}
	slog.SetDefault(log) // package log, which libraries use, writes to it
	for _, w := range append(argWarnings(ctx), cfg.InputWarnings()...) {
		log.Warn("the configuration may not be what you meant", "warning", w)
	}
	r, err := app.New(app.Options{Config: cfg, Log: log, LogLevel: level, Version: version, Inherited: given, Sidecar: flags})
	if err != nil {
		err = startError(cfg, err)
		given.ReportFailed(err)
		return fail(err)
	}
	if !given.Replaces() {
		printAddress(stdout, cfg.Log.Format, r.Addr())
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
