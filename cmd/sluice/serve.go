package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"

	"sluice/dataplane/fdlimit"
	"sluice/dataplane/membudget"
	"sluice/dataplane/memtuner"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/obs"
)

const serveExamples = `
Examples:
  sluice serve --engine http://127.0.0.1:8000
      one engine that prefills and decodes
  sluice serve --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000 --decode http://10.0.0.3:8000,ranks=4
      prefill and decode apart (vLLM NixlConnector), four data-parallel ranks behind one URL
  sluice serve --engine http://127.0.0.1:8000,model=llama,kv_events=tcp://127.0.0.1:5557
      name the model and the KV event endpoint instead of asking the engine
  sluice serve --config sluice.yaml --listen 0.0.0.0:8080
      a file, and a flag over it; environment variables (SLUICE_…) stand between the two

The first line on standard output is the address it listens on; logs go to
standard error. /readyz says what it still waits for. SIGTERM drains and ends it,
HUP takes over what it can of an edited configuration (sluice reload), USR2 puts a
new process in its place (sluice restart); see docs/operations.md.
`

// runServe runs the router until ctx ends.
func runServe(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice serve", flag.ContinueOnError)
	fs.SetOutput(stderr)
	flags := config.RegisterFlags(fs)
	fs.Usage = func() {
		w := fs.Output()
		fmt.Fprint(w, "Usage: sluice serve [flags]\n\nFlags:\n")
		fs.PrintDefaults()
		fmt.Fprintf(w, "\nKeys of a worker (after its URL, by commas):\n%s%s", config.KeyTable(), serveExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	cfg, wrong := flags.Resolve(os.Environ())
	given, err := app.InheritListeners()
	if err != nil {
		fmt.Fprintln(stderr, "sluice serve:", err)
		return 1
	}
	if wrong != nil {
		given.ReportFailed(wrong)
		fmt.Fprintln(stderr, wrong)
		return 1
	}
	log, level, err := obs.NewLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	if err != nil {
		fmt.Fprintln(stderr, "sluice serve:", err)
		return 1
	}
	for _, w := range cfg.InputWarnings() {
		log.Warn("the configuration may not say what was meant", "warning", w)
	}
	fdlimit.GrowTable()
	r, err := app.New(app.Options{Config: cfg, Log: log, LogLevel: level, Version: version, Inherited: given})
	if err != nil {
		given.ReportFailed(err)
		fmt.Fprintln(stderr, "sluice serve:", err)
		return 1
	}
	if !given.Replaces() { // the first process printed the address already
		fmt.Fprintln(stdout, r.Addr())
	}
	go memtuner.Run(ctx, memtuner.Options{Idle: membudget.Default.TrimIdle})
	if err := r.RunWithSignals(ctx); err != nil {
		fmt.Fprintln(stderr, "sluice serve:", err)
		return 1
	}
	return 0
}

// parse parses the flags of a command. If done is true, the command ends with code. Requested
// help goes to standard output.
func parse(fs *flag.FlagSet, args []string, stdout io.Writer) (code int, done bool) {
	if slices.ContainsFunc(args, func(a string) bool { return a == "-h" || a == "--help" || a == "-help" }) {
		fs.SetOutput(stdout)
	} else {
		// Do not print the whole help after an error, which would hide the message.
		fs.Usage = func() { fmt.Fprintf(fs.Output(), "`%s --help` lists the flags\n", fs.Name()) }
	}
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0, true
	case err != nil:
		return 2, true
	case fs.NArg() > 0:
		fmt.Fprintf(fs.Output(), "%s: unexpected argument %q; everything is given by flags, `%s --help` lists them\n", fs.Name(), fs.Arg(0), fs.Name())
		return 2, true
	}
	return 0, false
}
