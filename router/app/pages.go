package app

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// pages implements front.Pages: the routes that are not inference.
type pages struct {
	r             *Router
	started       time.Time
	requiredRoles []worker.Role // roles of the configured workers; /readyz waits for one of each
	startupDone   atomic.Bool   // fleet.min_workers was reached, or fleet.start_timeout has passed
	draining      atomic.Bool
}

func newPages(r *Router) *pages {
	p := &pages{r: r, started: time.Now()}
	var has [3]bool
	for _, s := range r.cfg.Specs() {
		has[s.Role] = true
	}
	if r.sidecar != nil { // requests name their prefill workers; only the sidecar's own engine is required
		has[worker.Prefill] = false
	}
	for role, yes := range has {
		if yes {
			p.requiredRoles = append(p.requiredRoles, worker.Role(role))
		}
	}
	return p
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil { // a type that JSON cannot represent: a bug
		panic(err)
	}
	return append(b, '\n')
}

// Models implements front.Pages.
func (p *pages) Models() (int, []byte) {
	if status, body := p.r.sidecar.fetch(p.r, "/v1/models"); status == 200 {
		return status, body
	}
	type model struct {
		ID          string `json:"id"`
		Object      string `json:"object"`
		Created     int64  `json:"created"`
		OwnedBy     string `json:"owned_by"`
		MaxModelLen int    `json:"max_model_len,omitempty"`
	}
	view := p.r.fleet.View()
	data := []model{}
	for _, name := range view.Models {
		m := model{ID: name, Object: "model", Created: p.started.Unix(), OwnedBy: "sluice"}
		for _, w := range view.Workers {
			if info := w.Info(); contains(info.Models, name) && info.MaxModelLen > 0 {
				// The smallest limit, which every worker of the model accepts.
				if m.MaxModelLen == 0 || info.MaxModelLen < m.MaxModelLen {
					m.MaxModelLen = info.MaxModelLen
				}
			}
		}
		data = append(data, m)
	}
	return 200, mustJSON(map[string]any{"object": "list", "data": data})
}

// Ready implements front.Pages. The 503 page lists the conditions that the router waits for.
func (p *pages) Ready(details bool) (int, []byte) {
	waiting := p.notReadyReasons(details)
	if len(waiting) > 0 {
		return 503, mustJSON(map[string]any{"ready": false, "waiting_for": waiting})
	}
	page := map[string]any{"ready": true}
	if degraded := p.degraded(details); degraded != nil {
		page["degraded"] = degraded
	}
	return 200, mustJSON(page)
}

// prefillFallback reports whether the router serves requests although no prefill worker is
// healthy: a prefill worker has become unhealthy, and decode workers may run whole requests.
// A prefill worker that has never been healthy does not count, so that /readyz waits for
// prefill workers at the start, but not if this process replaces one that was ready without any:
// a restart must be possible while they are down.
func (p *pages) prefillFallback(workers []*worker.Worker) bool {
	unhealthy, wasReady := false, false
	for _, w := range workers {
		if w.Spec.Role != worker.Prefill {
			continue
		}
		if state, _ := w.State(); state == worker.Unhealthy {
			unhealthy = true
		}
		wasReady = wasReady || slices.Contains(p.r.previous.ReadyWorkers, w.Spec.ID)
	}
	return (unhealthy || p.r.previous.WasReady && !wasReady) && p.r.runner.DecodeOnlyAllowed()
}

// degraded lists what does not work as configured although every request is answered. It
// names no model and no worker, because these pages need no key; the log and the explain
// records name them.
func (p *pages) degraded(details bool) (all []string) {
	workers := p.r.fleet.View().Workers
	ready := slices.ContainsFunc(workers, func(w *worker.Worker) bool {
		state, _ := w.State()
		return w.Spec.Role == worker.Prefill && state == worker.Ready
	})
	if !ready && p.prefillFallback(workers) {
		all = append(all, "no prefill worker is healthy; decode workers do whole requests")
	}
	for _, a := range p.r.runner.FailingHandovers() {
		line := fmt.Sprintf("a model's requests are decoded without a hand-over from a prefill worker: %s, the last %d requests; the router's log has more", a.Kind, a.Requests)
		all = append(all, line)
	}
	for _, s := range p.r.tokenizer.NativeStates() {
		switch {
		case s.Failed != "" && details:
			all = append(all, fmt.Sprintf("the engines tokenize the prompts of %s, because its tokenizer could not be loaded: %s", s.Model, s.Failed))
		case s.Failed != "":
			all = append(all, "the engines tokenize a model's prompts, because its tokenizer could not be loaded; "+detailsElsewhere)
		case s.Mismatch == nil:
		case details:
			all = append(all, fmt.Sprintf("the engines tokenize the prompts of %s, because native token ids differ from those of %s %s", s.Model, s.Mismatch.URL, s.Mismatch))
		default:
			all = append(all, "the engines tokenize a model's prompts, because native token ids differ; "+detailsElsewhere)
		}
	}
	return all
}

// notReadyReasons lists the conditions that the router waits for before it is ready. Without
// details the text names no worker, source or address.
func (p *pages) notReadyReasons(details bool) []string {
	if p.draining.Load() {
		return []string{"the end: this router is draining"}
	}
	workers := p.r.fleet.View().Workers
	missingRoles := p.requiredRoles
	for _, w := range workers {
		// A discovered worker makes its role required, except in a sidecar.
		if !slices.Contains(missingRoles, w.Spec.Role) && p.r.sidecar == nil {
			missingRoles = append(slices.Clip(missingRoles), w.Spec.Role)
		}
	}
	if len(missingRoles) == 0 {
		if sources := p.r.sourceNames(); len(sources) > 0 {
			if !details {
				return []string{"a worker: none has been found yet; " + detailsElsewhere}
			}
			return []string{"a worker: none has been found yet by " + strings.Join(sources, ", ")}
		}
		return []string{"a worker: none is configured; start with --engine URL, or --prefill URL and --decode URL"}
	}
	var waiting []string
	for _, role := range missingRoles {
		var states []string
		ready := false
		for _, w := range workers {
			if w.Spec.Role != role {
				continue
			}
			s, why := w.State()
			if s == worker.Ready {
				ready = true
				break
			}
			states = append(states, strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", w.Spec.ID, s, why), ": "))
		}
		switch {
		case ready, role == worker.Prefill && p.prefillFallback(workers):
		case !details:
			waiting = append(waiting, fmt.Sprintf("a healthy %s worker; %s", role, detailsElsewhere))
		default:
			waiting = append(waiting, fmt.Sprintf("a healthy %s worker (%s)", role, strings.Join(states, "; ")))
		}
	}
	if minWorkers := p.minWorkersReason(workers); minWorkers != "" {
		waiting = append(waiting, minWorkers)
	}
	return waiting
}

// minWorkersReason returns the condition of fleet.min_workers if the start still waits for
// it, else "". It applies once: after the start the other checks cover workers that leave.
func (p *pages) minWorkersReason(workers []*worker.Worker) string {
	required, limit := p.r.cfg.Fleet.MinWorkers, p.r.cfg.Fleet.StartTimeout
	if required == 0 || p.startupDone.Load() {
		return ""
	}
	ready := 0
	for _, w := range workers {
		if s, _ := w.State(); s == worker.Ready {
			ready++
		}
	}
	missing := limit - time.Since(p.started)
	if ready < required && missing > 0 {
		return fmt.Sprintf("%d of %d workers (fleet.min_workers; for at most %s more)", ready, required, missing.Round(time.Second))
	}
	if p.startupDone.CompareAndSwap(false, true) {
		if ready < required {
			p.r.log.Warn("started with fewer workers than fleet.min_workers", "ready", ready, "min_workers", required, "start_timeout", limit)
		} else {
			p.r.log.Info("started", "ready", ready, "min_workers", required)
		}
	}
	return ""
}

// detailsElsewhere tells a client that may not see the details where to find them.
const detailsElsewhere = "the admin listener (/admin/v1/health) and, with an API key for every model, this page say why"

// Health implements front.Pages. Without details the page contains only the status.
func (p *pages) Health(details bool) (int, []byte) {
	waiting := p.notReadyReasons(details)
	status, state := 200, "ok"
	if len(waiting) > 0 {
		status, state = 503, "not ready"
	}
	if !details {
		return status, mustJSON(map[string]any{"status": state})
	}
	type workerLine struct {
		Role   worker.Role  `json:"role"`
		State  worker.State `json:"state"`
		Reason string       `json:"reason,omitempty"`
		Models []string     `json:"models"`
		Ranks  int          `json:"ranks"`
	}
	workers := map[string]workerLine{}
	for _, w := range p.r.fleet.View().Workers {
		s, why := w.State()
		workers[w.Spec.ID] = workerLine{Role: w.Spec.Role, State: s, Reason: why, Models: w.Info().Models, Ranks: len(w.Ranks)}
	}
	return status, mustJSON(map[string]any{
		"status": state, "waiting_for": waiting, "degraded": p.degraded(true), "workers": workers,
		"kv_tier": p.r.transfers.Status(),
		"uptime":  time.Since(p.started).Round(time.Second).String(),
	})
}

// Version implements front.Pages.
func (p *pages) Version() (int, []byte) {
	return 200, mustJSON(map[string]string{"version": p.r.version, "name": "sluice"})
}

// Metrics implements front.Pages.
func (p *pages) Metrics(w io.Writer, accept string) (contentType string) {
	if p.r.sidecar.engineMetrics(p.r, w) {
		accept = "" // the engine's page is in the text format
	}
	p.r.metrics.WriteAs(w, accept, func(t string) { contentType = t })
	return contentType
}

func contains(all []string, one string) bool {
	for _, s := range all {
		if s == one {
			return true
		}
	}
	return false
}
