package main

import (
	"context"
	"flag"
	"fmt"
	"io"

	"sluice/router/admin"
)

const restartUsage = `Usage: sluice restart [--admin ADDR | --runtime-file FILE]

Replaces a running router by a new process of the same program file, flags and
environment, without a request that is lost: the new process takes its listeners,
and the old one ends when what it serves has ended. Answers when the new process
serves; when it does not become ready the old one goes on, and the reason is
printed. The signal USR2 does the same. A router whose runtime file is not in the
default place (admin.runtime_file) is named with --runtime-file, or with --admin
and its token in SLUICE_ADMIN_TOKEN.

Flags:
`

// runRestart makes a running router replace itself with a new process.
func runRestart(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice restart", flag.ContinueOnError)
	fs.SetOutput(stderr)
	addr := fs.String("admin", "", "`ADDR` of the router's admin listener [the one that runs]")
	file := fs.String("runtime-file", "", "the router's runtime `FILE` [found by --admin]")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), restartUsage)
		fs.PrintDefaults()
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	rt, err := findRouter(*addr, *file)
	if err != nil {
		printNotFound(stderr, "restart", *addr, "USR2", err)
		return 1
	}
	c := admin.NewClient(rt)
	defer c.Close()
	pid, err := c.Restart(ctx)
	if err != nil {
		fmt.Fprintln(stderr, "sluice restart:", err)
		return 1
	}
	replaced := "the router at " + rt.Address
	if rt.PID != 0 { // known only from a runtime file
		replaced = fmt.Sprintf("process %d", rt.PID)
	}
	fmt.Fprintf(stdout, "process %d has taken the place of %s\n", pid, replaced)
	return 0
}
