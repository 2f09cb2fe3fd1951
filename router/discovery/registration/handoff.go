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

// KnownWorker is a registered worker as one router hands it to the next.
type KnownWorker struct {
	ID    string        `json:"id"`
	Owner netip.Addr    `json:"owner"`
	Spec  worker.Spec   `json:"spec"`
	Lease time.Duration `json:"lease"`
}

// knownGrace is added to the leases that a router begins with: their workers renew
// them with the router before, until it lets go.
const knownGrace = time.Minute

// Workers are the workers now, for the router that takes this one's place.
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

// Listener is where it listens, without TLS; for the router that takes its place.
func (s *Server) Listener() net.Listener { return s.rawListener }

// restoreKnown are the known workers that this router's configuration lets in: it may name
// other networks than the one before.
func (s *Server) restoreKnown() (known []KnownWorker) {
	for _, k := range s.opt.KnownWorkers {
		at := scopeOf(k.Owner, s.networks)
		var why error
		switch {
		case k.Lease <= 0 || k.Lease > s.settings.Load().MaxLease:
			why = fmt.Errorf("its lease of %s is longer than registration.max_lease", k.Lease)
		case !slices.ContainsFunc(s.networks, func(n netip.Prefix) bool { return n.Contains(k.Owner) }):
			why = errors.New("it was registered from outside of registration.networks")
		default:
			why = at.checkSpec(&k.Spec)
		}
		if why != nil {
			s.log.Info("a worker of the router before is not taken over: it may register again", "worker", k.ID, "from", k.Owner, "reason", why)
			continue
		}
		k.Spec.Networks = at.networks // as it would be by registering again
		known = append(known, k)
	}
	return known
}

// start gives l its set, with the workers that are known.
func (l *leases) start(set *discovery.Set, known []KnownWorker, log *slog.Logger) {
	l.mu.Lock()
	l.set = set
	l.mu.Unlock()
	for _, k := range known {
		if _, err := l.put(k.ID, k.Owner, k.Spec, k.Lease); err != nil {
			log.Warn("a worker of the router before is not taken over", "worker", k.ID, "err", err)
			continue
		}
		l.mu.Lock()
		if h := l.byID[k.ID]; h != nil {
			h.ends = h.ends.Add(knownGrace)
		}
		l.mu.Unlock()
	}
}
