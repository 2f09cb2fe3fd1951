package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"text/tabwriter"

	"sluice/router/admin"
	"sluice/router/config"
)

const reloadUsage = `Usage: sluice reload [--admin ADDR | --runtime-file FILE] [--dry-run] [--json]

Has a running router read its configuration's file and take over what can change
while it runs; prints each field that differs, and whether it is in effect now or
needs sluice restart. A file with an error changes nothing: the error has its line
and column, and the exit code is 1. The signal HUP does the same, into the log.
A router whose runtime file is not in the default place (admin.runtime_file) is
named with --runtime-file, or with --admin and its token in SLUICE_ADMIN_TOKEN.

Flags:
`

const reloadExample = `
Examples:
  sluice reload                            the router of this user that runs
  sluice reload --dry-run                  what would change
  sluice reload --admin 127.0.0.1:9902     one of several
  sluice reload && sluice restart          all of it, without a lost request
`

// runReload makes a running router reload its configuration and prints the changes.
func runReload(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice reload", flag.ContinueOnError)
	fs.SetOutput(stderr)
	addr := fs.String("admin", "", "`ADDR` of the router's admin listener [the one that runs]")
	file := fs.String("runtime-file", "", "the router's runtime `FILE` [found by --admin]")
	dry := fs.Bool("dry-run", false, "change nothing, print what would be changed")
	asJSON := fs.Bool("json", false, "print the answer as JSON")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), reloadUsage)
		fs.PrintDefaults()
		fmt.Fprint(fs.Output(), reloadExample)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	rt, err := findRouter(*addr, *file)
	if err != nil {
		signal := "HUP"
		if *dry {
			signal = "" // no signal requests a dry run
		}
		printNotFound(stderr, "reload", *addr, signal, err)
		return 1
	}
	c := admin.NewClient(rt)
	defer c.Close()
	changes, err := c.Reload(ctx, *dry)
	if err == nil {
		if *asJSON {
			err = json.NewEncoder(stdout).Encode(map[string]any{"changes": changes})
		} else {
			printChanges(stdout, changes, *dry)
		}
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice reload:", err)
		return 1
	}
	return 0
}

func printChanges(w io.Writer, changes []config.Change, dry bool) {
	if len(changes) == 0 {
		fmt.Fprintln(w, "nothing differs from what is in effect")
		return
	}
	shown := func(s string) string {
		if s == "" {
			return "none"
		}
		return s
	}
	count := map[config.Effect]int{}
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range changes {
		count[c.Effect]++
		fmt.Fprintf(tab, "%s\t%s\t%s -> %s\n", c.Effect, c.Path, shown(c.Old), shown(c.New))
	}
	tab.Flush()
	for _, c := range changes {
		if c.Reason != "" {
			fmt.Fprintf(w, "%s: %s\n", c.Path, c.Reason)
		}
		if c.Warning != "" {
			fmt.Fprintf(w, "%s: warning: %s\n", c.Path, c.Warning)
		}
	}
	verb := "applied"
	if dry {
		verb = "would be applied"
	}
	fmt.Fprintf(w, "%d %s", count[config.Applied], verb)
	if n := count[config.Restart]; n > 0 {
		fmt.Fprintf(w, ", %d not in effect before sluice restart", n)
	}
	fmt.Fprintln(w)
}
