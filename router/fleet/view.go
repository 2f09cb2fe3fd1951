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
	Unasked int

	pools   map[string]*Pool
	sole    *Pool         // answers the empty model name; nil when there are several
	changed chan struct{} // closed when a newer View is out
}

// Pool is the Ready ranks that serve one model, by role. Slices are read only.
// Of a worker whose ranks have servers of their own, only the ranks whose
// server is healthy are in.
type Pool struct {
	Model      string
	Prefill    []*worker.Rank
	Decode     []*worker.Rank
	Aggregated []*worker.Rank
	// Members counts workers of each role in any state but Gone, so that a 503
	// can tell an empty pool from an unhealthy one.
	Members [3]int
}

// Ranks gives the slice of one role.
func (p *Pool) Ranks(role worker.Role) []*worker.Rank {
	switch role {
	case worker.Prefill:
		return p.Prefill
	case worker.Decode:
		return p.Decode
	}
	return p.Aggregated
}

// Pool gives the pool of a model; ok is false for an unknown model. The empty
// model name gives the only pool there is, when there is just one; pools that
// are the same workers under other names (aliases, LoRA adapters) count as one,
// and the name that the first worker tells first is taken.
func (v *View) Pool(model string) (p *Pool, ok bool) {
	if model == "" {
		return v.sole, v.sole != nil
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
	slices.SortFunc(members, func(a, b *member) int { return strings.Compare(a.w.Spec.ID, b.w.Spec.ID) })
	for _, m := range members {
		v.Workers = append(v.Workers, m.w)
		models := m.w.Info().Models
		if len(models) == 0 {
			v.Unasked++
		}
		state, _ := m.w.State()
		for _, name := range models {
			p := v.pools[name]
			if p == nil {
				p = &Pool{Model: name}
				v.pools[name] = p
			}
			p.Members[m.w.Spec.Role]++
			if m.wasReady && !slices.Contains(v.Models, name) {
				v.Models = append(v.Models, name)
			}
			if state == worker.Ready {
				p.add(m)
			}
		}
	}
	slices.Sort(v.Models)
	v.sole = solePool(v)
	old := f.view.Swap(v)
	close(old.changed)
}

func (p *Pool) add(m *member) {
	for _, s := range m.servers {
		if !s.live.Load() {
			continue
		}
		switch m.w.Spec.Role {
		case worker.Prefill:
			p.Prefill = append(p.Prefill, s.ranks...)
		case worker.Decode:
			p.Decode = append(p.Decode, s.ranks...)
		default:
			p.Aggregated = append(p.Aggregated, s.ranks...)
		}
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
