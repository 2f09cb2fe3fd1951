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
	Models  []string         // served by at least one member that is Ready or was
	// Unasked counts members that have not told their models yet: a name no
	// pool knows may still turn out to be theirs.
	WithoutModels int

	pools     map[string]*Pool
	soleModel *Pool         // answers the empty model name; nil when there are several
	changed   chan struct{} // closed when a newer View is out
}

// Pool is the Ready ranks that serve one model, by role. Slices are read only.
// Of a worker whose ranks have servers of their own, only the ranks whose
// server is healthy are in; a rank whose breaker is open is not, unless its role
// has no other, and one that is frozen never is.
type Pool struct {
	Model      string
	Prefill    []*worker.Rank
	Decode     []*worker.Rank
	Aggregated []*worker.Rank
	// Members counts workers of each role in any state but Gone, so that a 503
	// can tell an empty pool from an unhealthy one.
	Members [3]int

	budget  *retryBudget      // of retries
	tripped [3][]*worker.Rank // by role: those whose breaker is open; used while the View is made
}

// AllModelsKnown says whether a name that no pool knows is the name of no model here:
// there are workers, and each has told its models.
func (v *View) AllModelsKnown() bool { return v.WithoutModels == 0 && len(v.Workers) > 0 }

// Ranks gives the slice of one role.
func (p *Pool) Ranks(role worker.Role) []*worker.Rank { return *p.ranksOf(role) }

// Pool gives the pool of a model; ok is false for an unknown model. The empty
// model name gives the only pool there is, when there is just one; pools that
// are the same workers under other names (aliases, LoRA adapters) count as one,
// and the name that the first worker tells first is taken.
func (v *View) Pool(model string) (p *Pool, ok bool) {
	if model == "" {
		return v.soleModel, v.soleModel != nil
	}
	p, ok = v.pools[model]
	return p, ok
}

// View is the present snapshot; never nil. No lock, no allocation.
func (f *Fleet) View() *View { return f.view.Load() }

// Wait returns the first View for which ok holds, or the present one and false
// when ctx ends first.
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

// publish makes a new View of the members and wakes who waits. Called with mu.
func (f *Fleet) publish() {
	v := &View{pools: map[string]*Pool{}, changed: make(chan struct{})}
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
				continue // not even where the role has no other: it answers nobody
			}
			to := p.ranksOf(m.worker.Spec.Role)
			if t.open() {
				to = &p.tripped[m.worker.Spec.Role]
			}
			*to = append(*to, t.rank)
		}
	}
}

// ranksOf is the list of one role.
func (p *Pool) ranksOf(role worker.Role) *[]*worker.Rank {
	switch role {
	case worker.Prefill:
		return &p.Prefill
	case worker.Decode:
		return &p.Decode
	}
	return &p.Aggregated
}

// failStatic lets ranks with open breakers back in where a role has no others:
// when all of a pool fails, the engines' own errors say more than an empty pool,
// and a request that breaks every rank must not close the pool to all.
func (p *Pool) failStatic() {
	for role := range p.tripped {
		if list := p.ranksOf(worker.Role(role)); len(*list) == 0 {
			*list = p.tripped[role]
		}
		p.tripped[role] = nil
	}
}

// solePool is the pool that an unnamed model means: the first worker's first
// name, if every worker that tells names tells that one too.
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
