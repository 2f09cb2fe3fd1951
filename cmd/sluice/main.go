// Command sluice is the data plane in front of disaggregated LLM engines. Its subcommands
// include the router (serve, sidecar), simulated engines (sim), a load generator (load), a demo
// of all three (demo), and tools to configure, inspect and restart a router.
//
// Each subcommand has a file of its own, named after it, with a function that returns its
// cobra.Command; cli.go has what they share. A subcommand parses its flags and calls a package of
// router/, dataplane/ or bench/. The command contains no policy and moves no bytes; router/app
// assembles the router.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"sluice/router/app"
)

// version, commit and date are set at link time, by the Makefile and scripts/packages.sh. commit
// and date are of the commit; empty: those that Go has recorded in the binary, if any.
var (
	version      = "dev"
	commit, date string
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := runWithInput(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// Groups of the command list in the help.
const (
	groupRun       = "run"
	groupConfigure = "configure"
	groupOperate   = "operate"
	groupTest      = "test"
	groupOther     = "other"
)

// extraCommands are the commands of files with a build tag.
var extraCommands []func() *cobra.Command

// newRoot returns the command with all its subcommands.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "sluice",
		Short: "router and data plane for disaggregated LLM serving",
		Long:  "Sluice is a router and data plane for disaggregated LLM serving.",
		Example: `  sluice demo                                       simulated engines, router, load and console
  sluice serve --engine http://127.0.0.1:8000       one engine, without a configuration file
  sluice serve --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000
  sluice init http://10.0.0.1:8000 > sluice.yaml    write a configuration for running engines
  sluice serve --config sluice.yaml`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.AddGroup(
		&cobra.Group{ID: groupRun, Title: "Run:"},
		&cobra.Group{ID: groupConfigure, Title: "Configure:"},
		&cobra.Group{ID: groupOperate, Title: "Operate a running router:"},
		&cobra.Group{ID: groupTest, Title: "Test:"},
		&cobra.Group{ID: groupOther, Title: "Other:"},
	)
	root.AddCommand(
		serveCommand(), sidecarCommand(), demoCommand(), registerCommand(),
		initCommand(), checkCommand(), configCommand(), keyCommand(), doctorCommand(),
		workersCommand(), requestsCommand(), topCommand(), healthCommand(), drainCommand(true), drainCommand(false),
		reloadCommand(), restartCommand(), explainCommand(), recordCommand(), supportBundleCommand(),
		simCommand(), loadCommand(), replayCommand(),
		completionCommand(), versionCommand(),
	)
	for _, extra := range extraCommands {
		root.AddCommand(extra())
	}
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { printHelp(cmd.OutOrStdout(), cmd) })
	root.SetUsageFunc(func(cmd *cobra.Command) error { printHelp(cmd.ErrOrStderr(), cmd); return nil })
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(&cobra.Command{Use: "help", Hidden: true}) // run rewrites `sluice help`
	return root
}

// run runs one command line without standard input and returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return runWithInput(ctx, args, strings.NewReader(""), stdout, stderr)
}

// runWithInput runs one command line and returns the exit code of the process: 0 success, 1
// failure, 2 usage error.
func runWithInput(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if len(args) == 0 {
		printHelp(stderr, root)
		return 2
	}
	switch args[0] {
	case app.AgentHost:
		return runAgentHost(stderr)
	case cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd:
		return execute(ctx, root, args)
	case "-h", "--help", "-help", "help":
		if args[0] != "help" || len(args) == 1 {
			printHelp(stdout, root)
			return 0
		}
		args = append(args[1:len(args):len(args)], "--help")
	case "--version", "-v", "-version":
		args = append([]string{"version"}, args[1:]...)
	}

	cmd, path := root, []string{}
	for len(args) > 0 {
		next := child(cmd, args[0])
		if next == nil {
			break
		}
		cmd, path, args = next, append(path, args[0]), args[1:]
	}
	if cmd.HasSubCommands() && !cmd.Runnable() {
		switch {
		case len(args) == 0:
			printHelp(stderr, cmd)
			return 2
		case args[0] == "-h" || args[0] == "--help" || args[0] == "-help":
			printHelp(stdout, cmd)
			return 0
		}
		fmt.Fprintf(stderr, "%s: unknown command %q%s; `%s --help` lists the commands\n", cmd.CommandPath(), args[0], suggestCommand(cmd, args[0]), cmd.CommandPath())
		return 2
	}
	if wantsJSON(cmd, args) {
		stderr = jsonMessages{stderr}
		root.SetErr(stderr)
	}
	var warnings []string
	args, err := normalizeArgs(cmd, args, func(w string) { warnings = append(warnings, w) })
	if err != nil {
		printUsageError(stderr, cmd, args, err.Error())
		return 2
	}
	if cmd.Annotations[logsWarnings] != "" {
		ctx = context.WithValue(ctx, warningsKey{}, warnings)
	} else {
		for _, w := range warnings {
			fmt.Fprintf(stderr, "%s: %s\n", cmd.CommandPath(), w)
		}
	}
	return execute(ctx, root, append(path, args...))
}

// execute parses args, runs the command and returns the exit code. It prints usage errors; a
// command prints its own errors.
func execute(ctx context.Context, root *cobra.Command, args []string) int {
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	switch code, done := err.(exitCode); {
	case err == nil:
		return 0
	case done:
		return int(code)
	}
	printUsageError(root.ErrOrStderr(), cmd, args, fmt.Sprintf("%v; `%s --help` shows the usage", err, cmd.CommandPath()))
	return 2
}
