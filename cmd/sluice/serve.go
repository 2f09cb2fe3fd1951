package main

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"sluice/dataplane/fdlimit"
	"sluice/dataplane/membudget"
	"sluice/dataplane/memtuner"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/obs"
)

const serveLong = `Runs the router. The configuration is the file given by --config, with environment variables
(SLUICE_ and the path of a field) over the file and flags over both.

The first line on standard output is the address on which the router listens, as JSON with
log.format json; logs go to standard error. /readyz reports what the router is waiting for.

SIGTERM drains and ends it, SIGHUP reloads the configuration (see sluice reload), SIGUSR2 replaces
the process (see sluice restart).`

const serveExamples = `
  sluice serve --engine http://127.0.0.1:8000
      one engine that prefills and decodes
  sluice serve --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000 --decode http://10.0.0.3:8000,ranks=4
      separate prefill and decode workers (vLLM NixlConnector), four data-parallel ranks behind one URL
  sluice serve --engine http://127.0.0.1:8000,model=llama,kv_events=tcp://127.0.0.1:5557
      sets the model and the KV event endpoint instead of reading them from the engine
  sluice serve --config sluice.yaml --listen 0.0.0.0:8080
      a configuration file, and a flag over it`

// workerKeyNotes is the part of the help about the values of --engine, --prefill and --decode.
func workerKeyNotes() string {
	return "Keys of a worker (after its URL, separated by commas):\n" + strings.TrimRight(config.KeyTable(), "\n")
}

// completeConfig sets the completion of the configuration's flags that take one of some words.
func completeConfig(cmd *cobra.Command) {
	for name, words := range map[string][]string{
		"pd": config.Families(), "log-level": {"debug", "info", "warn", "error"}, "log-format": {"text", "json"},
		"policy": {"kv", "round_robin", "random", "least_loaded", "session"}, "tokens": {"auto", "engine", "text", "ids"},
	} {
		if cmd.Flags().Lookup(name) != nil {
			completeFlag(cmd, name, words...)
		}
	}
}

func serveCommand() *cobra.Command {
	fs := flag.NewFlagSet("sluice serve", flag.ContinueOnError)
	flags := config.RegisterFlags(fs)
	cmd := newCommand(cobra.Command{
		Use: "serve [flags]", GroupID: groupRun, Short: "run the router", Long: serveLong, Example: serveExamples,
		Annotations: map[string]string{notes: workerKeyNotes(), logsWarnings: "true"},
	}, "0 ended by a signal, 1 not started or failed", func(cmd *cobra.Command, _ []string) int {
		return serve(cmd.Context(), flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	completeConfig(cmd)
	return cmd
}

// serve runs the router until ctx ends.
func serve(ctx context.Context, flags *config.Flags, stdout, stderr io.Writer) int {
	outliveOutputs()
	format := flags.LogFormat(os.Environ())
	fail := func(err error) int {
		printFailure(stderr, format, "sluice serve", err.Error())
		return 1
	}
	cfg, wrong := flags.Resolve(os.Environ())
	given, err := app.InheritListeners()
	if err != nil {
		return fail(err)
	}
	if wrong != nil {
		given.ReportFailed(wrong)
		return fail(wrong)
	}
	log, level, err := obs.NewLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	if err != nil {
		return fail(err)
	}
	slog.SetDefault(log) // package log, which libraries use, writes to it
	for _, w := range append(argWarnings(ctx), cfg.Warnings()...) {
		log.Warn("the configuration may not be what you meant", "warning", w)
	}
	fdlimit.GrowTable()
	r, err := app.New(app.Options{Config: cfg, Log: log, LogLevel: level, Version: version, Inherited: given})
	if err != nil {
		err = startError(cfg, err)
		given.ReportFailed(err)
		return fail(err)
	}
	if !given.Replaces() { // the first process printed the address already
		printAddress(stdout, format, r.Addr())
	}
	go memtuner.Run(ctx, memtuner.Options{Idle: membudget.Default.TrimIdle})
	if err := r.RunWithSignals(ctx); err != nil {
		return fail(err)
	}
	return 0
}
