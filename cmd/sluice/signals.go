package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"sluice/dataplane/hotrestart"
)

// inheritListeners takes what systemd or another router has passed to this process.
func inheritListeners() (*hotrestart.InheritedListeners, error) {
	return hotrestart.Inherit(socketClient, socketAdmin, socketRegister, socketReports, socketRouted, socketRoutedUnix)
}

// runWithSignals runs r until ctx ends, and does what signals ask of it: USR2 puts a
// new process in its place, HUP takes over what it can of the configuration's file.
func runWithSignals(ctx context.Context, r *router) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR2, syscall.SIGHUP)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case s := <-signals:
				if s == syscall.SIGUSR2 {
					_, _ = r.Restart(ctx) // it logs why not
					continue
				}
				_, _ = r.Reload(ctx, false) // likewise
			}
		}
	}()
	return r.Run(ctx)
}
