package registration

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"sluice/router/discovery"
	"sluice/router/worker"
)

// KnownWorker is a registered worker, as a router process hands it to its successor.
type KnownWorker struct {
	ID    string        `json:"id"`
	Owner netip.Addr    `json:"owner"`
	Spec  worker.Spec   `json:"spec"`
	Lease time.Duration `json:"lease"`
}

// knownGrace extends the leases that a router process inherits: their workers renew them with the
// predecessor until it closes its connections.
const knownGrace = time.Minute

// Workers returns the registered workers, sorted by id, for this router's successor.
func (s *Server) Workers() []KnownWorker {
	l := s.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	known := make([]KnownWorker, 0, len(l.byID))
	for id, h := range l.byID {
		known = append(known, KnownWorker{ID: id, Owner: h.owner, Spec: h.spec, Lease: h.lease})
	}
	slices.SortFunc(known, func(a, b KnownWorker) int { return strings.Compare(a.ID, b.ID) })
	return known
}

// Listener returns the listener without TLS, for this router's successor.
func (s *Server) Listener() net.Listener { return s.rawListener }

// restoreKnown returns the inherited workers that this router's configuration allows; its networks
// may differ from the predecessor's.
func (s *Server) restoreKnown() (known []KnownWorker) {
	for _, k := range s.opt.KnownWorkers {
		at := scopeOf(k.Owner, s.networks)
		var why error
		switch {
		case k.Lease <= 0 || k.Lease > s.settings.Load().MaxLease:
			why = fmt.Errorf("its lease of %s exceeds registration.max_lease", k.Lease)
		case !slices.ContainsFunc(s.networks, func(n netip.Prefix) bool { return n.Contains(k.Owner) }):
			why = errors.New("its client address is outside registration.networks")
		default:
			why = at.checkSpec(&k.Spec)
		}
		if why != nil {
			s.log.Info("a worker of the previous process was not inherited; it can register again", "worker", k.ID, "client", k.Owner, "reason", why)
			continue
		}
		k.Spec.Networks = at.networks // as a new registration would set it
		known = append(known, k)
	}
	return known
}

// start sets the Set of l and adds the inherited workers to it.
func (l *leases) start(set *discovery.Set, known []KnownWorker, log *slog.Logger) {
	l.mu.Lock()
	l.set = set
	l.mu.Unlock()
	for _, k := range known {
		if _, err := l.put(k.ID, k.Owner, k.Spec, k.Lease); err != nil {
			log.Warn("a worker of the previous process was not inherited", "worker", k.ID, "error", err)
			continue
		}
		l.mu.Lock()
		if h := l.byID[k.ID]; h != nil {
			h.ends = h.ends.Add(knownGrace)
		}
		l.mu.Unlock()
	}
}
