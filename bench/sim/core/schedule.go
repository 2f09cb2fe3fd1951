package core

import (
	"math"
	"slices"
	"sort"
	"time"

	"sluice/bench/sim/eventcodec"
)

// planStep plans the next step: which sequences run and how long it takes. It allocates
// their blocks and adds the sequences that compute to running.
func (r *Rank) planStep(now time.Time) (time.Duration, bool) {
	budget := r.o.MaxBatch
	prefill, decodes, context := 0, 0, 0
	for i := 0; i < len(r.running); i++ {
		s := r.running[i]
		s.chunk = 0
		if budget == 0 || s.stalledUntil.After(now) {
			continue
		}
		n := min(s.Total()-s.computed, budget)
		if n == 0 {
			decodes++ // it gets a token
			continue
		}
		if !r.allocate(s, s.computed+n) {
			if len(r.running) == 1 {
				continue // the blocks it needs are leased; leases end
			}
			at := r.victim()
			victim := r.running[at]
			if at < i { // planned for this step already
				budget += victim.chunk
				switch {
				case victim.chunk > 1:
					prefill -= victim.chunk
				case victim.chunk == 1:
					decodes--
					context -= victim.computed
				case !victim.stalledUntil.After(now):
					decodes--
				}
				i--
			}
			r.preempt(victim)
			i-- // s again, or the one that now has its place
			continue
		}
		s.chunk = n
		budget -= n
		if n == 1 {
			decodes++
			context += s.computed
		} else {
			prefill += n
		}
	}
	for budget > 0 && len(r.running) < r.o.MaxSeqs {
		s := r.admit()
		if s == nil {
			break
		}
		r.running = append(r.running, s)
		s.chunk = min(s.Total()-s.computed, budget)
		budget -= s.chunk
		prefill += s.chunk
	}
	for _, s := range r.running {
		if s.chunk > 0 {
			r.compute(s)
		}
	}
	if len(r.running) == 0 {
		return 0, false
	}
	d := r.o.Cost.StepTime(prefill, decodes, context)
	if prefill+decodes == 0 {
		// Faults or missing blocks hold back all sequences: check again soon, in real
		// time.
		d = time.Millisecond
		if !math.IsInf(r.o.Speed, 1) {
			d = time.Duration(float64(d) * r.o.Speed)
		} else {
			r.stepEnd = now.Add(d)
		}
	}
	return d, true
}

// allocate allocates blocks for n tokens of s; it returns false if there are none.
func (r *Rank) allocate(s *Seq, n int) bool {
	need := (n+r.o.BlockSize-1)/r.o.BlockSize - len(s.blocks)
	if need > r.pool.Free {
		return false
	}
	for range need {
		s.blocks = append(s.blocks, r.pool.Allocate())
	}
	return true
}

// before reports whether a is scheduled before b under the policy "priority".
func before(a, b *Seq) bool {
	if pa, pb := a.Job.Params.Priority, b.Job.Params.Priority; pa != pb {
		return pa < pb
	}
	return a.order < b.order
}

// wait adds a sequence to the queue, at its end or at the place of its priority.
func (r *Rank) wait(s *Seq) {
	at := len(r.waiting)
	if r.o.Scheduling == "priority" {
		at = sort.Search(at, func(i int) bool { return before(s, r.waiting[i]) })
	}
	r.waiting = slices.Insert(r.waiting, at, s)
}

// victim returns the index of the running sequence that gives up its blocks: the last of
// the queue's order among them. As in vLLM that is the last admitted, unless the policy is
// "priority".
func (r *Rank) victim() int {
	at := len(r.running) - 1
	if r.o.Scheduling == "priority" {
		for i, s := range r.running {
			if before(r.running[at], s) {
				at = i
			}
		}
	}
	return at
}

// preempt puts a running sequence back to the front of the queue, or to the place of its
// priority. It is computed again, prompt and output, as far as the prefix cache does not have it.
func (r *Rank) preempt(s *Seq) {
	r.Counters.Preempted++
	r.running = slices.DeleteFunc(r.running, func(x *Seq) bool { return x == s })
	r.pool.Release(s.blocks)
	s.blocks, s.computed, s.chunk = nil, 0, 0
	if r.o.Scheduling == "priority" {
		r.wait(s)
	} else {
		r.waiting = slices.Insert(r.waiting, 0, s)
	}
}

// admit takes the next sequence that can start and allocates the blocks of its whole
// context. It returns nil if there is none, or no space for the first in the queue.
func (r *Rank) admit() *Seq {
	if len(r.ready) > 0 {
		s := r.ready[0]
		r.ready = r.ready[1:]
		return s
	}
	for len(r.waiting) > 0 {
		s := r.waiting[0]
		total := s.Total()
		size := r.o.BlockSize
		hits, idle := 0, 0
		// The last token is always computed: its logits are needed.
		for i := 0; i < (total-1)/size && !r.o.NoPrefixCache; i++ {
			if s.ScoresBefore((i + 1) * size) {
				break // tokens whose log probabilities are requested are computed
			}
			s.hashTo(&r.hash, i+1, size)
			id, ok := r.pool.Lookup(&s.hashes[i])
			if !ok {
				break
			}
			if r.pool.Blocks[id].Ref == 0 {
				idle++
			}
			hits++
		}
		if (total+size-1)/size-hits+idle > r.pool.Free {
			return nil
		}
		for i := range hits {
			id, _ := r.pool.Lookup(&s.hashes[i])
			r.pool.Share(id)
			s.blocks = append(s.blocks, id)
		}
		r.allocate(s, total)
		r.waiting = r.waiting[1:]
		s.computed = hits * size
		if len(s.Out) == 0 {
			s.local, s.Cached = s.computed, s.computed
			r.Counters.Queries += int64(total)
			r.Counters.Hits += int64(s.computed)
			if leg := s.Job.Leg; leg != nil && !s.pulled && leg.OnAdmitted(r, s) {
				continue
			}
			r.Counters.LocalHit += int64(s.computed)
			r.Counters.LocalCompute += int64(total - s.computed)
			r.Counters.Prompt += int64(total)
		}
		return s
	}
	return nil
}

// compute advances s by its chunk and caches the blocks that became full.
func (r *Rank) compute(s *Seq) {
	s.computed += s.chunk
	r.store(s, s.computed-s.chunk)
}

// store publishes the blocks of s that became full after from tokens.
func (r *Rank) store(s *Seq, from int) {
	size := r.o.BlockSize
	first, full := from/size, s.computed/size
	if r.o.NoPrefixCache || first >= full {
		return
	}
	s.hashTo(&r.hash, full, size)
	for i := first; i < full; i++ {
		r.pool.Store(s.blocks[i], &s.hashes[i])
	}
	ev := eventcodec.Event{Kind: eventcodec.Stored, Hashes: s.hashes[first:full:full], Root: first == 0,
		Tokens: s.Slice(first*size, full*size), Salt: s.Job.Params.Salt, Session: s.Job.Params.Session}
	if first > 0 {
		ev.Parent = s.hashes[first-1]
	}
	r.event(ev)
}

func (r *Rank) event(ev eventcodec.Event) {
	if r.Publisher != nil {
		r.events = append(r.events, ev)
	}
}
