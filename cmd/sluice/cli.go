package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"sluice/router/config"
)

// exitCode is the error of a command that failed and has printed its own message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

const (
	// notes is the annotation with the text that the help prints below the flags.
	notes = "notes"
	// logsWarnings is the annotation of commands that write the warnings of the command line to
	// their log, because their standard error may have to be JSON.
	logsWarnings = "logs-warnings"
)

// warningsKey is the context key of the warnings of the command line, a []string.
type warningsKey struct{}

// argWarnings returns the warnings of the command line of a command with logsWarnings.
func argWarnings(ctx context.Context) []string {
	w, _ := ctx.Value(warningsKey{}).([]string)
	return w
}

// newCommand completes c: run returns the exit code, and exit describes the codes 0 and 1 in the
// help.
func newCommand(c cobra.Command, exit string, run func(cmd *cobra.Command, args []string) int) *cobra.Command {
	if c.Args == nil {
		c.Args = noArgs
	}
	if c.ValidArgsFunction == nil {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
	c.Long = strings.TrimSpace(c.Long) + "\n\nExit codes: " + exit + ", 2 usage error."
	c.Example = strings.Trim(c.Example, "\n")
	c.DisableFlagsInUseLine = true
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if code := run(cmd, args); code != 0 {
			return exitCode(code)
		}
		return nil
	}
	return &c
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q; this command takes flags only", args[0])
	}
	return nil
}

// oneArg returns the check of a command that takes one argument, which what names.
func oneArg(what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("want one %s, got %d arguments", what, len(args))
		}
		return nil
	}
}

// addGoFlags adds the flags that a package has defined with the standard library. The default in
// brackets at the end of a usage text is printed as pflag prints its own.
func addGoFlags(cmd *cobra.Command, fs *flag.FlagSet) {
	cmd.Flags().AddGoFlagSet(fs)
	fs.VisitAll(func(g *flag.Flag) {
		f := cmd.Flags().Lookup(g.Name)
		if i := strings.LastIndex(f.Usage, " ["); i >= 0 && strings.HasSuffix(f.Usage, "]") {
			f.Usage = f.Usage[:i] + " (default: " + f.Usage[i+2:len(f.Usage)-1] + ")"
		}
		if f.DefValue == "0s" {
			f.DefValue = ""
		}
	})
}

// completeFlag sets the completion of a flag's value to fixed words.
func completeFlag(cmd *cobra.Command, name string, words ...string) {
	if err := cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is not defined: every test of the command line finds it
	}
}

func child(cmd *cobra.Command, name string) *cobra.Command {
	for _, c := range cmd.Commands() {
		if c.Name() == name && name != "help" {
			return c
		}
	}
	return nil
}

func suggestCommand(cmd *cobra.Command, name string) string {
	var known []string
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			known = append(known, c.Name())
		}
	}
	return config.Suggestion(name, known)
}

// flagError adds the nearest flag to the error about an unknown one.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return err
	}
	var known []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			known = append(known, "--"+f.Name)
		}
	})
	name := "--" + unknown.GetSpecifiedName()
	if unknown.GetSpecifiedShortnames() != "" {
		name = "-" + unknown.GetSpecifiedName()
	}
	return fmt.Errorf("unknown flag %s%s", name, config.Suggestion(name, known))
}

// helpColumns is the width of the help's lines about flags.
const helpColumns = 100

// printHelp prints the help of cmd.
func printHelp(w io.Writer, cmd *cobra.Command) {
	if !cmd.HasParent() {
		fmt.Fprintf(w, "%s\n\nUsage:\n  sluice COMMAND [flags]\n", cmd.Long)
		for _, g := range cmd.Groups() {
			fmt.Fprintf(w, "\n%s\n", g.Title)
			listCommands(w, cmd, g.ID)
		}
		fmt.Fprintf(w, "\nExamples:\n%s\n\n`sluice COMMAND --help` shows a command's flags and examples.\n", cmd.Example)
		return
	}
	if cmd.HasSubCommands() {
		fmt.Fprintf(w, "Usage: %s COMMAND [flags]\n\n%s\n\nCommands:\n", cmd.CommandPath(), cmd.Long)
		listCommands(w, cmd, "")
	} else {
		fmt.Fprintf(w, "Usage: %s\n\n%s\n", cmd.UseLine(), cmd.Long)
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\nExamples:\n%s\n", cmd.Example)
	}
	if !cmd.HasSubCommands() {
		fmt.Fprintf(w, "\nFlags:\n%s", cmd.Flags().FlagUsagesWrapped(helpColumns))
	}
	if n := cmd.Annotations[notes]; n != "" {
		fmt.Fprintf(w, "\n%s\n", n)
	}
}

func listCommands(w io.Writer, parent *cobra.Command, group string) {
	for _, c := range parent.Commands() {
		if c.GroupID == group && !c.Hidden {
			fmt.Fprintf(w, "  %-15s %s\n", c.Name(), c.Short)
		}
	}
}

// normalizeArgs returns the arguments of cmd as pflag reads them: the long flags with two dashes,
// and the present names of renamed flags. A long flag with one dash (-config x), as before, is
// deprecated; warn is called once for all of them, and once for each renamed flag. The old and the
// present name of a flag on one command line are an error.
func normalizeArgs(cmd *cobra.Command, args []string, warn func(string)) ([]string, error) {
	cmd.InitDefaultHelpFlag()
	flags := cmd.Flags()
	out := make([]string, 0, len(args))
	used := map[string]string{} // present name: name on the command line
	warned := false
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			return append(out, args[i:]...), nil
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(arg, "-"), "-"), "=")
		if single := !strings.HasPrefix(arg, "--"); !strings.HasPrefix(arg, "-") || name == "" ||
			single && len(name) == 1 && flags.ShorthandLookup(name) == nil {
			out = append(out, arg)
			continue
		}
		single := !strings.HasPrefix(arg, "--")
		present := presentName(cmd.Name(), name)
		short := flags.ShorthandLookup(name[:1])
		if single && short != nil && (len(name) == 1 || flags.Lookup(present) == nil) {
			out = append(out, arg)
			if len(name) == 1 && !hasValue && short.NoOptDefVal == "" && i+1 < len(args) {
				i++
				out = append(out, args[i])
			}
			continue
		}
		if !single && len(name) == 1 && short != nil && flags.Lookup(name) == nil {
			present = short.Name // the standard library's flags accept --o for -o
		}
		if single && !warned {
			warned = true
			warn(fmt.Sprintf("long flags with one dash are deprecated and accepted in this release only; write --%s instead of -%s", present, name))
		}
		if old := used[present]; old != "" && old != name {
			if old == present {
				old = name
			}
			return nil, fmt.Errorf("--%s and --%s are the same flag; want --%s alone", old, present, present)
		}
		if present != name && used[present] == "" && len(name) > 1 {
			warn(fmt.Sprintf("--%s is now named --%s; the old name is accepted in this release only", name, present))
		}
		used[present] = name
		if arg = "--" + present; hasValue {
			arg += "=" + value
		}
		out = append(out, arg)
		if f := flags.Lookup(present); f != nil && !hasValue && f.NoOptDefVal == "" && i+1 < len(args) {
			i++
			out = append(out, args[i])
		}
	}
	return out, nil
}
