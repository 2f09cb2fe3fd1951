// Command sluice is the data plane in front of disaggregated LLM engines. Its subcommands
// include the router (serve, sidecar), simulated engines (sim), a load generator (load), a demo
// of all three (demo), and tools to configure, inspect and restart a router.
//
// Each subcommand has a file of its own, named after it, with a run function that parses the
// flags and calls a package of router/, dataplane/ or bench/. The command contains no policy
// and moves no bytes; router/app assembles the router.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sluice/router/app"
	"strings"
	"syscall"
)

// version, commit and date are set at link time, by the Makefile and scripts/packages.sh. commit
// and date are of the commit; empty: those that Go has recorded in the binary, if any.
var (
	version      = "dev"
	commit, date string
)

// command is one subcommand. run returns the exit code of the process: 0 success, 1 failure,
// 2 usage error.
type command struct {
	name    string
	summary string
	run     func(ctx context.Context, args []string, stdout, stderr io.Writer) int
}

func withoutContext(f func(args []string, stdout, stderr io.Writer) int) func(context.Context, []string, io.Writer, io.Writer) int {
	return func(_ context.Context, args []string, stdout, stderr io.Writer) int { return f(args, stdout, stderr) }
}

var commands = []command{
	{"demo", "simulated engines, the router, traffic and a page to look at: the place to start", runDemo},
	{"serve", "run the router", runServe},
	{"sidecar", "run beside one engine, behind somebody else's router", runSidecar},
	{"sim", "run one simulated engine", runSim},
	{"load", "send load and print latencies", runLoad},
	{"key", "make an API key, and what to write into the configuration for it", withoutContext(runKey)},
	{"register", "register a worker and renew its lease", runRegister},
	{"init", "probe engines and write a commented config file", withoutContext(runInit)},
	{"check", "validate a config and say what it would do", withoutContext(runCheck)},
	{"doctor", "say which libraries, devices and limits this machine has, and what to do", withoutContext(runDoctor)},
	{"reload", "apply an edited configuration to a running router, as far as possible", runReload},
	{"restart", "replace a running router by a new process without losing requests", runRestart},
	{"record", "write a running router's events, choices and outcomes to files", runRecord},

	{"replay", "say what other weights or policies would have done with a recording", withoutContext(runReplay)},
	{"explain", "say why a request went where it went", withoutContext(runExplain)},
	{"version", "print versions", withoutContext(runVersion)},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		usage(stderr)
		return 2
	}
	name := args[0]
	switch name {
	case "-h", "--help", "-help", "help":
		if len(args) > 1 && name == "help" {
			return run(ctx, []string{args[1], "--help"}, stdout, stderr)
		}
		usage(stdout)
		return 0
	case app.AgentHost:
		return runAgentHost(stderr)
	case "--version", "-v":
		name = "version"
	}
	for _, c := range commands {
		if c.name == name {
			present, err := presentFlags(name, args[1:], stderr)
			if err != nil {
				fmt.Fprintf(stderr, "sluice %s: %v\n", name, err)
				return 2
			}
			return c.run(ctx, present, stdout, stderr)
		}
	}
	fmt.Fprintf(stderr, "sluice: unknown command %q; want one of %s. `sluice --help` lists them.\n", name, strings.Join(names(), ", "))
	return 2
}

func names() []string {
	var all []string
	for _, c := range commands {
		all = append(all, c.name)
	}
	return all
}

func usage(w io.Writer) {
	fmt.Fprint(w, `Sluice is a router and data plane for disaggregated LLM serving.

Usage:
  sluice COMMAND [flags]

Commands:
`)
	for _, c := range commands {
		fmt.Fprintf(w, "  %-9s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, `
Examples:
  sluice demo                                       see it work, nothing else needed
  sluice serve --engine http://127.0.0.1:8000       one engine, no file
  sluice serve --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000
  sluice init http://10.0.0.1:8000 > sluice.yaml    write a config from running engines
  sluice serve --config sluice.yaml

`+"`sluice COMMAND --help` shows a command's flags and examples.\n")
}
