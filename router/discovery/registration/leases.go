package registration

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"sluice/router/discovery"
	"sluice/router/networks"
	"sluice/router/worker"
)

// leases holds the registered workers. Its methods hold the lock during calls of the fleet, so
// that a lease and its worker stay consistent. This cannot deadlock, because the fleet does not
// call back into leases.
type leases struct {
	set *discovery.Set

	mu              sync.Mutex
	max             int
	byID            map[string]*workerLease
	lastExpiryCheck time.Time // last call of expire
}

type workerLease struct {
	owner netip.Addr
	spec  worker.Spec
	lease time.Duration
	ends  time.Time
}

func newLeases() *leases {
	return &leases{byID: map[string]*workerLease{}, lastExpiryCheck: time.Now()}
}

// setMax sets the maximum number of leases. Leases beyond it stay.
func (l *leases) setMax(most int) {
	l.mu.Lock()
	l.max = most
	l.mu.Unlock()
}

// refusal is an error with its HTTP status and error code.
type refusal struct {
	status int
	code   string
	msg    string
	after  time.Duration // Retry-After; 0: none
}

func (r *refusal) Error() string { return r.msg }

// put registers a worker or renews its lease. It reports whether the fleet has changed.
func (l *leases) put(id string, owner netip.Addr, spec worker.Spec, lease time.Duration) (changed bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.byID[id]
	switch {
	case h != nil && h.owner != owner:
		return false, &refusal{409, "id_in_use", fmt.Sprintf("the worker %q was registered from another address and its lease has not expired; want another id, or wait", truncate(id)), time.Until(h.ends)}
	case h == nil && len(l.byID) >= l.max:
		return false, &refusal{429, "too_many_workers", fmt.Sprintf("%d workers are registered, which is the limit (registration.max_workers)", len(l.byID)), time.Second}
	}
	changed, err = l.set.Put(spec)
	if err != nil {
		if h != nil && changed {
			delete(l.byID, id) // the set removed the old worker, and the fleet refused the new spec
		}
		if own := (*networks.OwnAddressError)(nil); errors.As(err, &own) {
			return false, bad(own)
		}
		return false, &refusal{409, "not_added", err.Error(), time.Second}
	}
	l.byID[id] = &workerLease{owner: owner, spec: spec, lease: lease, ends: time.Now().Add(lease)}
	return changed, nil
}

// renew extends a lease by its duration and returns that duration.
func (l *leases) renew(id string, owner netip.Addr) (time.Duration, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, err := l.owned(id, owner)
	if err != nil {
		return 0, err
	}
	h.ends = time.Now().Add(h.lease)
	return h.lease, nil
}

// remove ends a lease at once and removes its worker.
func (l *leases) remove(id string, owner netip.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.owned(id, owner); err != nil {
		return err
	}
	delete(l.byID, id)
	l.set.Remove(id)
	return nil
}

// owned returns the lease of an id. It fails if another address registered the worker. The caller
// holds mu.
func (l *leases) owned(id string, owner netip.Addr) (*workerLease, error) {
	h := l.byID[id]
	switch {
	case h == nil:
		return nil, &refusal{404, "not_registered", fmt.Sprintf("no worker %q is registered (the router may have been restarted); register it with PUT", truncate(id)), 0}
	case h.owner != owner:
		return nil, &refusal{403, "not_owner", fmt.Sprintf("the worker %q was registered from another address", truncate(id)), 0}
	}
	return h, nil
}

// expire removes the workers whose leases have ended and returns their ids. If the process itself
// was paused (a suspended machine, a debugger), it first extends all leases by the pause, because
// the workers could not renew them.
func (l *leases) expire() (ended []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	paused := now.Sub(l.lastExpiryCheck) - 4*expiryInterval
	l.lastExpiryCheck = now
	for _, id := range slices.Sorted(maps.Keys(l.byID)) {
		h := l.byID[id]
		if paused > 0 {
			h.ends = h.ends.Add(paused)
		}
		if now.Before(h.ends) {
			continue
		}
		delete(l.byID, id)
		l.set.Remove(id)
		ended = append(ended, id)
	}
	return ended
}

// expiryInterval is the time between two calls of expire.
const expiryInterval = 250 * time.Millisecond

// Registered is one entry of the response to GET /v1/workers.
type Registered struct {
	ID        string  `json:"id"`
	URL       string  `json:"url"`
	Role      string  `json:"role"`
	From      string  `json:"from"` // address of the caller that registered it
	ExpiresIn float64 `json:"expires_in_seconds"`
	State     string  `json:"state"`
	Reason    string  `json:"reason,omitempty"`
}

func (l *leases) list() []Registered {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := []Registered{}
	for _, id := range slices.Sorted(maps.Keys(l.byID)) {
		h := l.byID[id]
		out = append(out, Registered{ID: id, URL: h.spec.URL, Role: h.spec.Role.String(), From: h.owner.String(),
			ExpiresIn: time.Until(h.ends).Round(time.Millisecond).Seconds()})
	}
	return out
}
