package pd

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/front"
	"sluice/router/worker"
)

// The headers by which a client narrows the choice of workers. Workers are named
// by the ids that the configuration gave them, never by hosts: what a client sends
// cannot make the router connect anywhere else.
const (
	headerSession = "X-Sluice-Session"
	headerWorker  = "X-Sluice-Worker"
	headerAllowed = "X-Sluice-Allowed-Workers"
	headerLabels  = "X-Sluice-Require-Labels"
	// headerSessionID is what other routers and clients call the session.
	headerSessionID = "X-Session-ID"

	maxHeaderWords = 64       // words of one such header
	maxHeaderBytes = 32 << 10 // bytes of one such header; a caller in the process can set longer ones than HTTP allows
	maxSession     = 256      // bytes
	maxListed      = 32       // ids or labels told in an error
)

// steering is what the headers of one request ask for; the zero value nothing.
type steering struct {
	session uint64
	workers []worker.ID // pinned: a leg that one of them can take, takes one of them
	ranks   []bool      // beside workers: the rank was named too
	allowed []string    // ids; empty: all
	labels  []string    // all must be there
	// stored is the rank that keeps what the request goes on from; nil: any may run it.
	// Prefill workers are not concerned.
	stored *worker.Rank
}

// isSet is whether there is any of it.
func (s *steering) isSet() bool {
	return s.stored != nil || s.session != 0 || len(s.workers) > 0 || len(s.ranks) > 0 || len(s.allowed) > 0 || len(s.labels) > 0
}

// pinPolicy says who may name workers.
type pinPolicy struct {
	any      bool
	unix     bool // callers of the routed unix socket
	networks []netip.Prefix
}

func newPinPolicy(list []string) (p pinPolicy, err error) {
	for _, w := range list {
		switch w {
		case "any":
			p.any = true
		case "unix":
			p.unix = true
		case "off":
		default:
			n, err := netip.ParsePrefix(w)
			if err != nil {
				return p, fmt.Errorf("pd: cannot read steering.pinning %q: want a network (10.0.0.0/8), unix, any, or off", w)
			}
			p.networks = append(p.networks, n.Masked())
		}
	}
	return p, nil
}

func (p *pinPolicy) allow(ip netip.Addr, unix bool) bool {
	return p.any || p.unix && unix || slices.ContainsFunc(p.networks, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// applySteering reads the headers and narrows the plan's candidates. It answers and
// returns false when they ask for what cannot be.
func (q *request) applySteering() bool {
	s := &q.steering
	*s = steering{allowed: s.allowed[:0], labels: s.labels[:0], workers: s.workers[:0], ranks: s.ranks[:0]}
	named := headerSession
	session := q.x.Header(named)
	if len(session) == 0 {
		named = headerSessionID
		session = q.x.Header(named)
	}
	if len(session) > maxSession {
		return q.refuseSteering(named, string(session[:40])+"…", fmt.Sprintf("it has %d bytes; want at most %d", len(session), maxSession))
	}
	if len(session) > 0 {
		s.session = xxh3.Hash(session) | 1
	}
	pin, allowed, labels := q.x.HeaderList(headerWorker), q.x.HeaderList(headerAllowed), q.x.HeaderList(headerLabels)
	if pin == nil && allowed == nil && labels == nil {
		return true
	}
	for _, h := range [...]struct {
		name  string
		value []byte
	}{{headerWorker, pin}, {headerAllowed, allowed}, {headerLabels, labels}} {
		if len(h.value) > maxHeaderBytes {
			return q.refuseSteering(h.name, string(h.value[:40])+"…", fmt.Sprintf("it has %d bytes; want at most %d", len(h.value), maxHeaderBytes))
		}
	}
	if (pin != nil || allowed != nil) && !q.settings.pins.allow(q.x.ClientIP(), q.x.Unix()) {
		name, value := headerWorker, pin
		if pin == nil {
			name, value = headerAllowed, allowed
		}
		return q.refuseSteering(name, string(value), "steering.pinning does not let this client name workers; the operator can add its network")
	}
	return q.readLabels(labels) && q.readAllowed(allowed) && q.readPin(pin) && q.filterPlan()
}

func (q *request) readPin(value []byte) bool {
	for word := range splitWords(value) {
		id, err := worker.ParseID(word)
		if err != nil {
			return q.refuseSteering(headerWorker, string(value), err.Error()+"; there are "+q.knownWorkers())
		}
		w := q.workerByID(id.Worker)
		ranked := strings.Contains(word, "/")
		if w == nil {
			return q.refuseSteering(headerWorker, string(value), fmt.Sprintf("there is no worker %q; there are %s", word, q.knownWorkers()))
		}
		if ranked && !slices.ContainsFunc(w.Ranks, func(r *worker.Rank) bool { return r.ID == id }) {
			return q.refuseSteering(headerWorker, string(value), fmt.Sprintf("there is no rank %d of worker %q, which has %d; there are %s", id.Rank, id.Worker, len(w.Ranks), q.knownWorkers()))
		}
		if len(q.steering.workers) == maxHeaderWords {
			return q.refuseSteering(headerWorker, string(value[:40])+"…", fmt.Sprintf("more than %d workers", maxHeaderWords))
		}
		q.steering.workers, q.steering.ranks = append(q.steering.workers, id), append(q.steering.ranks, ranked)
	}
	if value != nil && len(q.steering.workers) == 0 {
		return q.refuseSteering(headerWorker, string(value), "it names no worker; there are "+q.knownWorkers())
	}
	return true
}

func (q *request) readAllowed(value []byte) bool {
	for word := range splitWords(value) {
		if q.workerByID(word) == nil {
			return q.refuseSteering(headerAllowed, string(value), fmt.Sprintf("there is no worker %q; there are %s", word, q.knownWorkers()))
		}
		if len(q.steering.allowed) == maxHeaderWords {
			return q.refuseSteering(headerAllowed, string(value[:40])+"…", fmt.Sprintf("more than %d workers", maxHeaderWords))
		}
		q.steering.allowed = append(q.steering.allowed, word)
	}
	if value != nil && len(q.steering.allowed) == 0 {
		return q.refuseSteering(headerAllowed, string(value), "it names no worker; there are "+q.knownWorkers())
	}
	return true
}

func (q *request) readLabels(value []byte) bool {
	for word := range splitWords(value) {
		if len(q.steering.labels) == maxHeaderWords {
			return q.refuseSteering(headerLabels, string(value[:40])+"…", fmt.Sprintf("more than %d labels", maxHeaderWords))
		}
		if !slices.Contains(q.knownLabels(), word) {
			return q.refuseSteering(headerLabels, string(value), fmt.Sprintf("no worker has the label %q; there are %s", word, joinLimited(q.knownLabels())))
		}
		q.steering.labels = append(q.steering.labels, word)
	}
	if value != nil && len(q.steering.labels) == 0 {
		return q.refuseSteering(headerLabels, string(value), "it names no label; there are "+joinLimited(q.knownLabels()))
	}
	return true
}

// filterPlan takes the candidates that do not fit out of every leg of the plan.
func (q *request) filterPlan() bool {
	s, p := &q.steering, &q.plan
	used := make([]bool, len(s.workers))
	for _, leg := range [...]struct {
		name  string
		ranks *[]*worker.Rank
	}{{"prefill", &p.Prefill}, {"decode", &p.Decode}, {"aggregated", &p.Whole}} {
		if len(*leg.ranks) == 0 {
			continue
		}
		filtered := s.filter(*leg.ranks, used)
		if len(filtered) == 0 {
			name, value := headerLabels, q.x.HeaderList(headerLabels)
			if len(s.allowed) > 0 {
				name, value = headerAllowed, q.x.HeaderList(headerAllowed)
			}
			return q.refuseSteering(name, string(value), fmt.Sprintf("it leaves no ready %s worker for model %q; ready are %s", leg.name, q.model, idsOf(*leg.ranks)))
		}
		*leg.ranks = filtered
	}
	for i, u := range used {
		if !u {
			reason := "it is not ready, takes no leg of this request, or another of these headers excludes it"
			return q.refuseSteering(headerWorker, string(q.x.HeaderList(headerWorker)), fmt.Sprintf("%q cannot be used for model %q: %s", s.workers[i].Worker, q.model, reason))
		}
	}
	return true
}

// filter are the ranks that may take a leg: those allowed and labelled, and of
// them the pinned where there is one.
func (s *steering) filter(ranks []*worker.Rank, used []bool) []*worker.Rank {
	filtered := make([]*worker.Rank, 0, len(ranks))
	pinned := 0
	for _, r := range ranks {
		if s.stored != nil && r != s.stored && r.Worker.Spec.Role != worker.Prefill {
			continue
		}
		if len(s.allowed) > 0 && !slices.Contains(s.allowed, r.ID.Worker) {
			continue
		}
		if slices.ContainsFunc(s.labels, func(l string) bool { return !slices.Contains(r.Worker.Spec.Labels, l) }) {
			continue
		}
		hit := false
		for i, id := range s.workers {
			if id.Worker == r.ID.Worker && (!s.ranks[i] || id.Rank == r.ID.Rank) {
				hit, used[i] = true, true
			}
		}
		if hit { // those pinned stand first
			filtered = slices.Insert(filtered, pinned, r)
			pinned++
			continue
		}
		filtered = append(filtered, r)
	}
	if pinned > 0 {
		return filtered[:pinned]
	}
	return filtered
}

// splitWords yields the words of a header's list, which commas, spaces and tabs separate.
// It reads no further than the caller does, so a limit on the number of words also bounds
// the memory.
func splitWords(value []byte) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for {
			value = bytes.TrimLeft(value, ", \t")
			if len(value) == 0 {
				return
			}
			end := bytes.IndexAny(value, ", \t")
			if end < 0 {
				end = len(value)
			}
			if !yield(string(value[:end])) {
				return
			}
			value = value[end:]
		}
	}
}

func (q *request) refuseSteering(header, value, what string) bool {
	const maxShown = 200
	if len(value) > maxShown {
		value = value[:maxShown] + "…"
	}
	if h, ok := q.x.Attached.(*Hints); ok && h.FieldNames[header] != "" {
		field := h.FieldNames[header]
		q.refuseParam(front.BadField, field, fmt.Sprintf("field %q: got %q: %s", field, value, what), 0)
		return false
	}
	q.refuse(front.BadHeader, fmt.Sprintf("header %s: %q: %s", header, value, what), 0)
	return false
}

func (q *request) workerByID(id string) *worker.Worker {
	for _, w := range q.settings.Fleet.View().Workers {
		if w.Spec.ID == id {
			return w
		}
	}
	return nil
}

func (q *request) knownWorkers() string {
	var ids []string
	for _, w := range q.settings.Fleet.View().Workers {
		ids = append(ids, w.Spec.ID)
	}
	return joinLimited(ids)
}

func (q *request) knownLabels() []string {
	var labels []string
	for _, w := range q.settings.Fleet.View().Workers {
		labels = append(labels, w.Spec.Labels...)
	}
	slices.Sort(labels)
	return slices.Compact(labels)
}

func idsOf(ranks []*worker.Rank) string {
	ids := make([]string, len(ranks))
	for i, r := range ranks {
		ids[i] = r.ID.Worker
	}
	slices.Sort(ids)
	return joinLimited(slices.Compact(ids))
}

func joinLimited(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	more := ""
	if n := len(words) - maxListed; n > 0 {
		words, more = words[:maxListed], fmt.Sprintf(" and %d more", n)
	}
	return strings.Join(words, ", ") + more
}
