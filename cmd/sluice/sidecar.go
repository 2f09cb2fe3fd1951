package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"sluice/dataplane/hotrestart"
	"sluice/dataplane/membudget"
	"sluice/dataplane/memtuner"
	"sluice/router/config"
	"sluice/router/discovery/header"
	"sluice/router/obs"
	"sluice/router/pd"
	"sluice/router/worker"
)

const sidecarUsage = `Usage: sluice sidecar --engine URL [flags]

Runs beside one decode engine, behind somebody else's router: the prefill leg, the
hand-over and the relay of serve. The request names its prefill worker by a header,
X-Prefiller-Host-Port or X-Sluice-Prefill, inside --prefill-networks; without one the
sidecar takes one of --prefill, and without those the engine does the whole request.

Flags:
`

const sidecarExamples = `
Examples:
  sluice sidecar --listen 0.0.0.0:8000 --engine http://127.0.0.1:8200 --prefill-networks 10.0.0.0/8
      vLLM NixlConnector; requests name prefill workers of the pods' network
  sluice sidecar --engine http://127.0.0.1:8200,ranks=4 --prefill-networks 10.0.0.0/8 --rank-addresses 10.0.0.7:8000,10.0.0.7:8001,10.0.0.7:8002,10.0.0.7:8003
      four data-parallel ranks behind one URL, each known to the router by an address
  sluice sidecar --engine http://127.0.0.1:8200 --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000
      the sidecar chooses the prefill worker itself
  sluice sidecar --pd sglang --engine http://127.0.0.1:30000 --prefill-networks 10.0.0.0/8 --prefill-keys bootstrap_port=8998
      SGLang; every prefill worker has its bootstrap server on this port

The first line on standard output is the address it listens on; logs go to standard
error. /readyz follows the engine's health. SIGTERM drains and ends it.
A pod spec, a systemd unit and the headers: docs/sidecar.md.
`

// runSidecar runs the sidecar until ctx ends.
func runSidecar(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice sidecar", flag.ContinueOnError)
	fs.SetOutput(stderr)
	flags := config.RegisterSidecarFlags(fs)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), sidecarUsage)
		fs.PrintDefaults()
		fmt.Fprintf(fs.Output(), "\nKeys of a worker (after its URL, by commas):\n%s%s", config.KeyTable(), sidecarExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	fail := func(err error) int {
		fmt.Fprintln(stderr, "sluice sidecar:", err)
		return 1
	}
	given, err := inheritListeners()
	if err != nil {
		return fail(err)
	}
	cfg, err := flags.Resolve(os.Environ())
	if err != nil {
		given.ReportFailed(err)
		fmt.Fprintln(stderr, err)
		return 1
	}
	log, level, err := obs.NewLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	if err != nil {
		return fail(err)
	}
	r, err := newSidecar(cfg, flags, given, log)
	if err != nil {
		given.ReportFailed(err)
		return fail(err)
	}
	r.level = level
	if !given.Replaces() {
		fmt.Fprintln(stdout, r.Addr())
	}
	go memtuner.Run(ctx, memtuner.Options{Percent: sidecarGC, Idle: membudget.Default.TrimIdle})
	if err := runWithSignals(ctx, r); err != nil {
		return fail(err)
	}
	return 0
}

// sidecarGC: its live heap is a few MB, so collecting twice as often costs little
// and the node keeps the memory.
const sidecarGC = 50

// sidecar is what a router beside one engine has of its own; nil in any other.
type sidecar struct {
	opt      header.Options
	metrics  bool // the engine's are shown
	selector *header.Selector
}

// newSidecar is newRouter for a sidecar.
func newSidecar(cfg *config.Config, flags *config.SidecarFlags, given *hotrestart.InheritedListeners, log *slog.Logger) (*router, error) {
	s := &sidecar{metrics: flags.EngineMetrics, opt: header.Options{MaxWorkers: flags.MaxPrefillWorkers, IdleTimeout: flags.PrefillIdle, Log: log}}
	var err error
	if s.opt.Networks, err = header.ParseNetworks(flags.Networks); err != nil {
		return nil, fmt.Errorf("--prefill-networks: %w", err)
	}
	if s.opt.Ports, err = header.ParsePorts(flags.Ports); err != nil {
		return nil, fmt.Errorf("--prefill-ports: %w", err)
	}
	if s.opt.Spec, err = flags.PrefillSpec(cfg); err != nil {
		return nil, err
	}
	if s.opt.Ranks, err = flags.RankAddresses(cfg); err != nil {
		return nil, err
	}
	return assemble(&router{cfg: cfg, log: log, sidecar: s, inherited: given})
}

// start makes the finder of named workers, over the router's fleet.
func (s *sidecar) start(r *router) {
	if s == nil {
		return
	}
	s.opt.Fleet, s.opt.OnRemoved = r.fleet, r.workerRemoved
	s.opt.OnAdded = func(w *worker.Worker) {
		for _, rank := range w.Ranks {
			r.metrics.RankAdded(rank)
		}
	}
	s.selector = header.New(s.opt)
}

// workerSelector is what the runner takes; a nil pointer in an interface would not be nil
// there.
func (s *sidecar) workerSelector() pd.WorkerSelector {
	if s == nil {
		return nil
	}
	return s.selector
}

func (s *sidecar) close() {
	if s != nil && s.selector != nil {
		s.selector.Close()
	}
}

// fetch fetches a page of the engine; status 0 where it cannot be had.
func (s *sidecar) fetch(r *router, path string) (status int, body []byte) {
	const timeout, most = time.Second, 8 << 20
	if s == nil {
		return 0, nil
	}
	for _, w := range r.fleet.View().Workers {
		if w.Spec.Role != worker.Decode {
			continue
		}
		if state, _ := w.State(); state != worker.Ready {
			continue
		}
		status, body, err := r.fleet.Endpoint(w.Ranks[0]).Get(path, timeout, most)
		if err != nil {
			return 0, nil
		}
		return status, body
	}
	return 0, nil
}

// engineMetrics writes what the engine shows at /metrics.
func (s *sidecar) engineMetrics(r *router, w io.Writer) {
	if s == nil || !s.metrics {
		return
	}
	if status, body := s.fetch(r, "/metrics"); status == 200 {
		_, _ = w.Write(body)
		if n := len(body); n > 0 && body[n-1] != '\n' {
			_, _ = io.WriteString(w, "\n")
		}
	}
}
