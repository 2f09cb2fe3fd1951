package pd

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"sluice/dataplane/front"
	"sluice/router/worker"
)

// The request headers by which a client narrows the choice of workers. A header names workers by
// their configured ids and never by host, so a client cannot make the router connect to any other
// address.
const (
	headerWorker  = "X-Sluice-Worker"
	headerAllowed = "X-Sluice-Allowed-Workers"
	headerLabels  = "X-Sluice-Require-Labels"

	maxHeaderWords = 64       // maximum number of words in one header
	maxHeaderBytes = 32 << 10 // maximum size of one header in bytes; an in-process caller can set longer headers than HTTP allows
	maxListed      = 32       // maximum number of ids or labels that an error message lists
)

// steering holds the constraints that a request's headers set. The zero value sets none.
type steering struct {
	session uint64
	workers []worker.ID // pinned workers: a leg runs on one of them if any of them is a candidate for the leg
	ranks   []bool      // ranks[i] reports whether workers[i] names a rank and not only a worker
	allowed []string    // ids of the allowed workers; empty allows all
	labels  []string    // a worker must have all of these labels
	// stored is the rank that stored the response which the request continues; nil if any rank may
	// run the request. It does not restrict the prefill leg.
	stored *worker.Rank
}

// isSet reports whether the headers set any constraint.
func (s *steering) isSet() bool {
	return s.session != 0 || s.isRestricting()
}

// isRestricting reports whether the headers leave fewer ranks than the plan has without them.
func (s *steering) isRestricting() bool {
	return s.stored != nil || len(s.workers) > 0 || len(s.allowed) > 0 || len(s.labels) > 0
}

// clientPolicy says which clients may do something, by their addresses.
type clientPolicy struct {
	any      bool
	unix     bool // callers that use the Unix socket of the engine API
	networks []netip.Prefix
}

// newClientPolicy reads the list of the configuration's field.
func newClientPolicy(field string, list []string) (p clientPolicy, err error) {
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
				return p, fmt.Errorf("pd: cannot read %s %q: want a network (10.0.0.0/8), unix, any, or off", field, w)
			}
			p.networks = append(p.networks, n.Masked())
		}
	}
	return p, nil
}

func (p *clientPolicy) allow(ip netip.Addr, unix bool) bool {
	return p.any || p.unix && unix || slices.ContainsFunc(p.networks, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// applySteering reads the headers and removes the excluded candidates from the plan. It answers
// with an error and returns false if a header is invalid or no candidate remains.
func (q *request) applySteering() bool {
	s := &q.steering
	*s = steering{allowed: s.allowed[:0], labels: s.labels[:0], workers: s.workers[:0], ranks: s.ranks[:0]}
	if !q.recogniseSession() {
		return false
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
	if (pin != nil || allowed != nil) && !q.settings.pins.allow(q.req.ClientIP, q.req.Unix) {
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

// filterPlan removes the candidates that the headers exclude from every leg of the plan.
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

// filter returns the ranks that may run a leg: the allowed ranks with all labels. If some of them
// are pinned, it returns only those. It sets used[i] for each pinned worker that it finds.
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
		if hit { // the pinned ranks come first
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

// splitWords yields the words of a header's list. Commas, spaces and tabs separate words. It reads
// only as far as the caller iterates, so the caller's limit on the number of words also bounds
// memory.
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
	if h, ok := q.req.Attached.(*Hints); ok && h.FieldNames[header] != "" {
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
