package main

import (
	"fmt"
	"io"

	"sluice/router/obs"
)

// With log.format json every line that serve and sidecar print is JSON: the first one, with the
// address, and errors before there is a log or after it.

// printAddress prints the first line of standard output.
func printAddress(stdout io.Writer, format, addr string) {
	if format != "json" {
		fmt.Fprintln(stdout, addr)
		return
	}
	if log, _, err := obs.NewLogger(stdout, "info", format); err == nil {
		log.Info("listening", "address", addr)
	}
}

// printFailure prints why a router did not start or ended.
func printFailure(stderr io.Writer, format, command string, err error) {
	if format != "json" {
		fmt.Fprintf(stderr, "%s: %v\n", command, err)
		return
	}
	if log, _, logErr := obs.NewLogger(stderr, "info", format); logErr == nil {
		log.Error("the router does not run", "error", err)
	}
}
