package registration

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"sluice/router/discovery"
	"sluice/router/worker"
)

// leases are the registered workers. Its lock is held while the fleet takes one
// in or out, so that a lease and its worker cannot come apart; the fleet calls
// nobody back under it.
type leases struct {
	set *discovery.Set

	mu              sync.Mutex
	max             int
	byID            map[string]*workerLease
	lastExpiryCheck time.Time // of the last look at what has ended
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

// setMax is how many there may be; those beyond it stay.
func (l *leases) setMax(most int) {
	l.mu.Lock()
	l.max = most
	l.mu.Unlock()
}

// refusal is an error with the HTTP status it makes.
type refusal struct {
	status int
	code   string
	msg    string
	after  time.Duration // Retry-After; 0: none
}

func (r *refusal) Error() string { return r.msg }

// put registers or renews.
func (l *leases) put(id string, owner netip.Addr, spec worker.Spec, lease time.Duration) (changed bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.byID[id]
	switch {
	case h != nil && h.owner != owner:
		return false, &refusal{409, "id_taken", fmt.Sprintf("the worker %q was registered from another address, and its lease lasts; want another id, or wait", truncate(id)), time.Until(h.ends)}
	case h == nil && len(l.byID) >= l.max:
		return false, &refusal{429, "too_many_workers", fmt.Sprintf("%d workers are registered, the most there may be (registration.max_workers)", len(l.byID)), time.Second}
	}
	changed, err = l.set.Put(spec)
	if err != nil {
		if h != nil && changed {
			delete(l.byID, id) // taken out, and not taken in again
		}
		return false, &refusal{409, "not_taken", err.Error(), time.Second}
	}
	l.byID[id] = &workerLease{owner: owner, spec: spec, lease: lease, ends: time.Now().Add(lease)}
	return changed, nil
}

// renew lengthens a lease as it is.
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

// remove ends a lease at once.
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

// owned finds a lease of the caller. Called with mu.
func (l *leases) owned(id string, owner netip.Addr) (*workerLease, error) {
	h := l.byID[id]
	switch {
	case h == nil:
		return nil, &refusal{404, "not_registered", fmt.Sprintf("no worker %q is registered (the router may have been restarted); register it with PUT", truncate(id)), 0}
	case h.owner != owner:
		return nil, &refusal{403, "not_yours", fmt.Sprintf("the worker %q was registered from another address", truncate(id)), 0}
	}
	return h, nil
}

// expire takes out the workers whose lease has ended, and gives their ids. After
// a pause of the process itself (a suspended machine, a debugger) nobody is taken
// out for not having been heard in it.
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

// expiryInterval is the time between two looks for leases that ended.
const expiryInterval = 250 * time.Millisecond

// Registered is one line of GET /v1/workers.
type Registered struct {
	ID        string  `json:"id"`
	URL       string  `json:"url"`
	Role      string  `json:"role"`
	From      string  `json:"from"` // address it was registered from
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
