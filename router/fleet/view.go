package fleet

import (
	"context"
	"slices"
	"strings"

	"sluice/router/worker"
)

// View is an immutable snapshot of the fleet.
type View struct {
	Workers []*worker.Worker // every member, by id
	Models  []string         // served by at least one member that is or was Ready
	// WithoutModels counts members whose models are not known yet: a name that no pool has may turn
	// out to be theirs.
	WithoutModels int

	pools     map[string]*Pool
	soleModel *Pool         // serves the empty model name; nil if there are several
	changed   chan struct{} // closed when a newer View is published
}

// Pool is the Ready ranks that serve one model, by role. Slices are read-only. If a worker's ranks
// have their own servers, only the ranks with a healthy server are included. A rank with an open
// breaker is excluded unless its role has no other; a frozen rank always is.
type Pool struct {
	Model      string
	Prefill    []*worker.Rank
	Decode     []*worker.Rank
	Aggregated []*worker.Rank
	// Members counts workers of each role in any state but Gone, so that a 503 can distinguish an
	// empty pool from an unhealthy one.
	Members [3]int
	// Unknown counts workers of each role whose models are not known yet, because they have not
	// answered since the router started. They may serve this model.
	Unknown [3]int

	budget  *retryBudget      // of retries
	tripped [3][]*worker.Rank // by role: the ranks with an open breaker; used while the View is created
}

// AllModelsKnown reports whether a name that no pool has is not a model of this fleet: there are
// workers, and the models of each are known.
func (v *View) AllModelsKnown() bool { return v.WithoutModels == 0 && len(v.Workers) > 0 }

// MayGrow reports whether the pool has, or may get without a change of membership, a second worker
// of the role.
func (p *Pool) MayGrow(role worker.Role) bool { return p.Members[role]+p.Unknown[role] >= 2 }

// Ranks returns the ranks of one role.
func (p *Pool) Ranks(role worker.Role) []*worker.Rank { return *p.ranksOf(role) }

// Pool returns the pool of a model; ok is false for an unknown model. The empty model name selects
// the only pool if there is just one. Pools that consist of the same workers under other names
// (aliases, LoRA adapters) count as one, with the first name of the first worker.
func (v *View) Pool(model string) (p *Pool, ok bool) {
	if model == "" {
		return v.soleModel, v.soleModel != nil
	}
	p, ok = v.pools[model]
	return p, ok
}

// View returns the current snapshot; never nil. It takes no lock and does not allocate.
func (f *Fleet) View() *View { return f.view.Load() }

// Wait returns the first View for which ok holds, or the current one and false if ctx ends first.
func (f *Fleet) Wait(ctx context.Context, ok func(*View) bool) (*View, bool) {
	for {
		v := f.View()
		if ok(v) {
			return v, true
		}
		select {
		case <-v.changed:
		case <-ctx.Done():
			return f.View(), false
		case <-f.ctx.Done():
			return f.View(), false
		}
	}
}

// publish publishes a new View of the members and wakes waiters. Called with mu.
func (f *Fleet) publish() {
	v := &View{pools: map[string]*Pool{}, changed: make(chan struct{})}
	var unknown [3]int
	members := make([]*member, 0, len(f.members))
	for _, m := range f.members {
		members = append(members, m)
	}
	slices.SortFunc(members, func(a, b *member) int { return strings.Compare(a.worker.Spec.ID, b.worker.Spec.ID) })
	for _, m := range members {
		v.Workers = append(v.Workers, m.worker)
		models := m.worker.Info().Models
		if len(models) == 0 {
			v.WithoutModels++
			unknown[m.worker.Spec.Role]++
		}
		state, _ := m.worker.State()
		for _, name := range models {
			p := v.pools[name]
			if p == nil {
				p = &Pool{Model: name, budget: f.budgetOf(name)}
				v.pools[name] = p
			}
			p.Members[m.worker.Spec.Role]++
			if m.wasReady && !slices.Contains(v.Models, name) {
				v.Models = append(v.Models, name)
			}
			if state == worker.Ready {
				p.add(m)
			}
		}
	}
	for _, p := range v.pools {
		p.Unknown = unknown
		p.failStatic()
	}
	for name := range f.budgets {
		if v.pools[name] == nil {
			delete(f.budgets, name)
		}
	}
	slices.Sort(v.Models)
	v.soleModel = solePool(v)
	old := f.view.Swap(v)
	close(old.changed)
}

func (p *Pool) add(m *member) {
	for _, s := range m.servers {
		if !s.live.Load() {
			continue
		}
		for _, t := range s.breakers {
			if t.frozen() {
				continue // excluded even if the role has no other: it answers no request
			}
			to := p.ranksOf(m.worker.Spec.Role)
			if t.open() {
				to = &p.tripped[m.worker.Spec.Role]
			}
			*to = append(*to, t.rank)
		}
	}
}

// ranksOf returns the list of one role.
func (p *Pool) ranksOf(role worker.Role) *[]*worker.Rank {
	switch role {
	case worker.Prefill:
		return &p.Prefill
	case worker.Decode:
		return &p.Decode
	}
	return &p.Aggregated
}

// failStatic readmits ranks with open breakers where a role has no others: when all of a pool
// fails, the engines' own errors say more than an empty pool, and a request that breaks every rank
// must not close the pool to all.
func (p *Pool) failStatic() {
	for role := range p.tripped {
		if list := p.ranksOf(worker.Role(role)); len(*list) == 0 {
			*list = p.tripped[role]
		}
		p.tripped[role] = nil
	}
}

// solePool returns the pool of an empty model name: that of the first worker's first name, if every
// worker with known names has that name too.
func solePool(v *View) *Pool {
	var name string
	for _, w := range v.Workers {
		models := w.Info().Models
		switch {
		case len(models) == 0:
		case name == "":
			name = models[0]
		case !slices.Contains(models, name):
			return nil
		}
	}
	return v.pools[name]
}
