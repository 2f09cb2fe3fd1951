package app

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"sluice/dataplane/hotrestart"
)

// InheritListeners takes over the listeners and the state that systemd or the replaced process
// has passed to this process.
func InheritListeners() (*hotrestart.InheritedListeners, error) {
	return hotrestart.Inherit(formerSockets, socketClient, socketAdmin, socketRegister, socketReports, socketEngineAPI, socketEngineAPIUnix)
}

// RunWithSignals is Run that also acts on signals: USR2 calls Restart and HUP calls Reload.
// Both log their errors.
func (r *Router) RunWithSignals(ctx context.Context) error {
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
					_, _ = r.Restart(ctx) // logs its own error
					continue
				}
				_, _ = r.Reload(ctx, false) // logs its own error
			}
		}
	}()
	return r.Run(ctx)
}
