package app

import (
	"fmt"
	"io"
	"log/slog"
	"time"

	"sluice/router/config"
	"sluice/router/discovery/header"
	"sluice/router/pd"
	"sluice/router/worker"
)

// sidecar is what a router beside one engine has of its own; nil in any other.
type sidecar struct {
	opt      header.Options
	metrics  bool // the engine's are shown
	selector *header.Selector
}

// newSidecar makes the sidecar's part of flags that are validated already.
func newSidecar(cfg *config.Config, flags *config.SidecarFlags, log *slog.Logger) (*sidecar, error) {
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
	return s, nil
}

// start makes the finder of named workers, over the router's fleet.
func (s *sidecar) start(r *Router) {
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
func (s *sidecar) fetch(r *Router, path string) (status int, body []byte) {
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
func (s *sidecar) engineMetrics(r *Router, w io.Writer) {
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
