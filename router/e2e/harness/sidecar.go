package harness

import (
	"flag"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/worker"
)

// StartSidecar starts a sidecar with the given command line and waits until it is ready.
func StartSidecar(t *testing.T, args ...string) *Router {
	t.Helper()
	r, err := LaunchSidecar(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	testwait.UntilWithin(t, 10*time.Second, "the sidecar is ready", func() bool {
		status, _ := r.Pages.Ready(true)
		return status == 200
	})
	return r
}

// LaunchSidecar starts a sidecar and does not wait until it is ready. It listens on a free port.
// The error says why the configuration is invalid; arguments that do not parse end the test.
func LaunchSidecar(t *testing.T, args ...string) (*Router, error) {
	t.Helper()
	fs := flag.NewFlagSet("sidecar", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	flags := config.RegisterSidecarFlags(fs)
	if err := fs.Parse(append([]string{"--listen", "127.0.0.1:0", "--set", "health.interval=50ms", "--pool-wait", "200ms"}, args...)); err != nil {
		t.Fatal(err)
	}
	cfg, err := flags.Resolve(nil)
	if err != nil {
		return nil, err
	}
	logs := new(SyncBuffer)
	r, err := app.New(app.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(logs, nil)), Sidecar: flags})
	if err != nil {
		return nil, err
	}
	return runTest(t, "sidecar", r, logs), nil
}

// HostPort returns an engine's URL without the scheme, as in the x-prefiller-host-port header.
func HostPort(e interface{ URL() string }) string { return strings.TrimPrefix(e.URL(), "http://") }

// SidecarEngine starts one engine of a family, and returns it with its worker as an operator
// configures it.
func SidecarEngine(t *testing.T, fam *MatrixFamily, leg worker.Role) (*sim.Engine, config.Worker) {
	t.Helper()
	e := StartSim(t, func(o *sim.Options) {
		o.Role = leg.String()
		if fam.Engine != nil {
			fam.Engine(o)
		}
	})
	w := SimWorker(e, leg, leg.String())
	if fam.Worker != nil {
		fam.Worker(&w, e)
	}
	return e, w
}
