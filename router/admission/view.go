package admission

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// ClassView is what waits in one class.
type ClassView struct {
	Class    string `json:"class"`
	Requests int    `json:"requests"`
	// OnHold is how many of the requests may not start yet, because their sessions have no place among the
	// active ones.
	OnHold int `json:"on_hold"`
	// Suspended is how many of them are streams that were suspended.
	Suspended int           `json:"suspended"`
	Bytes     int64         `json:"bytes"`
	Tokens    int64         `json:"tokens"`
	Oldest    time.Duration `json:"-"` // how long the first has waited
	OldestMS  int64         `json:"oldest_ms"`
}

// Classes returns what waits in each class, in all pools.
func (c *Controller) Classes() []ClassView {
	c.mu.Lock()
	defer c.mu.Unlock()
	views := make([]ClassView, len(c.settings.Classes))
	for i := range views {
		u := &c.queue.perClass[i]
		views[i] = ClassView{Class: c.settings.Classes[i].Name, Requests: u.requests, Bytes: u.bytes, Tokens: u.cost, Suspended: u.suspended, OnHold: u.onHold}
		if it := c.queue.Oldest(i); it != nil {
			views[i].Oldest = time.Duration(c.now() - it.Arrived)
			views[i].OldestMS = views[i].Oldest.Milliseconds()
		}
	}
	return views
}

// View is what waits, in flat lists.
type View struct {
	Classes []ClassView  `json:"classes"` // in all pools, the highest first
	Pools   []PoolView   `json:"pools"`
	Tenants []TenantView `json:"tenants"`
}

// PoolView is what waits in one pool and class.
type PoolView struct {
	Pool     string  `json:"pool"`
	Class    string  `json:"class"`
	Requests int     `json:"requests"`
	OnHold   int     `json:"on_hold"` // of the requests
	Bytes    int64   `json:"bytes"`
	Tokens   int64   `json:"tokens"`
	Rate     float64 `json:"tokens_per_second"` // dispatched by the pool while requests waited; 0: not known
	Tenants  int     `json:"tenants"`
}

// TenantView is what waits of one tenant in one pool and class.
type TenantView struct {
	Pool     string `json:"pool"`
	Class    string `json:"class"`
	Tenant   string `json:"tenant"`
	Weight   int    `json:"weight"`
	Requests int    `json:"requests"`
	OnHold   int    `json:"on_hold"` // of the requests
	Tokens   int64  `json:"tokens"`
	Late     int    `json:"late"` // requests that can no longer meet their target
	OldestMS int64  `json:"oldest_ms"`
}

// TenantWait is what waits of one tenant in all pools and classes.
type TenantWait struct {
	Requests int
	Oldest   time.Duration // how long the first has waited
}

// TenantWaits returns what waits by tenant, under the names of ShownTenant, NoTenant and Overflow.
func (c *Controller) TenantWaits() map[string]TenantWait {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, waits := c.now(), map[string]TenantWait{}
	for _, l := range c.queue.pools {
		for i := range l.classes {
			k := &l.classes[i]
			for t := range k.all {
				if t.usage.requests == 0 {
					continue
				}
				name := cmp.Or(k.shown(t), NoTenant)
				w := waits[name]
				waits[name] = TenantWait{Requests: w.Requests + t.usage.requests, Oldest: max(w.Oldest, t.oldestWait(now))}
			}
		}
	}
	return waits
}

// maxShownTenants bounds the tenants of one pool and class in a View. Those with the most tokens are in
// it.
const maxShownTenants = 32

// View returns what waits, in the order of the pools' names and of the classes.
func (c *Controller) View() View {
	v := View{Classes: c.Classes(), Pools: []PoolView{}, Tenants: []TenantView{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.queue.Pools(nil) {
		l := c.queue.pools[name]
		for i := range l.classes {
			k := &l.classes[i]
			if k.usage.requests == 0 {
				continue
			}
			pool := PoolView{Pool: name, Class: c.settings.Classes[i].Name, Requests: k.usage.requests, OnHold: k.usage.onHold, Bytes: k.usage.bytes, Tokens: k.usage.cost}
			if m := c.rates[name]; m != nil {
				pool.Rate = math.Round(m.perSecond(c.now(), rateWindow))
			}
			tenants := k.views(name, pool.Class, c.now())
			pool.Tenants = len(tenants)
			v.Pools = append(v.Pools, pool)
			v.Tenants = append(v.Tenants, tenants[:min(len(tenants), maxShownTenants)]...)
		}
	}
	return v
}

// shown returns the name of a tenant for metrics and the admin API.
func (k *classQueue) shown(t *tenant) string {
	if t == k.overflow {
		return Overflow
	}
	return ShownTenant(t.name)
}

// views returns the tenants with waiting requests, those with the most tokens first.
func (k *classQueue) views(pool, class string, now int64) (all []TenantView) {
	for t := range k.all {
		if t.usage.requests > 0 {
			all = append(all, TenantView{Pool: pool, Class: class, Tenant: k.shown(t), Weight: t.weight, Requests: t.usage.requests, OnHold: t.usage.onHold, Tokens: t.usage.cost, Late: t.countLate(), OldestMS: t.oldestWait(now).Milliseconds()})
		}
	}
	slices.SortFunc(all, func(a, b TenantView) int {
		return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Tenant, b.Tenant))
	})
	return all
}
