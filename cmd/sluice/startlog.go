package main

import (
	"errors"
	"fmt"
	"io"
	"os/signal"
	"syscall"

	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/obs"
)

// With log.format json every line that serve and sidecar print is JSON: the first one, with the
// address, and errors before there is a log or after it, those of the command line included.

// outliveOutputs keeps the process alive when the reader of its standard output or error has ended: a
// write to such a pipe would end it by SIGPIPE, with all requests.
func outliveOutputs() { signal.Ignore(syscall.SIGPIPE) }

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
func printFailure(stderr io.Writer, format, command, reason string) {
	if format != "json" {
		fmt.Fprintf(stderr, "%s: %s\n", command, reason)
		return
	}
	if log, _, err := obs.NewLogger(stderr, "info", format); err == nil {
		log.Error("cannot start the router", "error", reason)
	}
}

// startError returns why a router did not start with a configuration that is valid in itself: the
// faults that sluice check finds, which name a place in it, or else err.
func startError(cfg *config.Config, err error) error {
	if faults := app.CheckStart(cfg); len(faults) > 0 {
		return errors.Join(faults...)
	}
	return err
}
