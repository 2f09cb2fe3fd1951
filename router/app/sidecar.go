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

// sidecar is the part of a router that only a sidecar of one engine has. It is nil in any
// other router; its methods accept a nil receiver.
type sidecar struct {
	opt      header.Options
	metrics  bool // include the engine's metrics in /metrics
	selector *header.Selector
}

// newSidecar creates the sidecar part from flags that have been validated.
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

// start creates the selector that finds the prefill workers that requests name, over the
// router's fleet.
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

// workerSelector returns the selector as the runner's interface. It returns a nil interface
// for a nil s, because an interface that contains a nil pointer is not nil.
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

// fetch fetches a page from the sidecar's engine. The status is 0 if no decode worker is ready
// or the call fails.
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

// engineMetrics writes the engine's /metrics page to w, ending with a line break. It writes
// nothing and returns false if the page cannot be fetched.
func (s *sidecar) engineMetrics(r *Router, w io.Writer) (written bool) {
	if s == nil || !s.metrics {
		return false
	}
	status, body := s.fetch(r, "/metrics")
	if status != 200 || len(body) == 0 {
		return false
	}
	_, _ = w.Write(body)
	if body[len(body)-1] != '\n' {
		_, _ = io.WriteString(w, "\n")
	}
	return true
}
