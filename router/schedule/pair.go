package schedule

import (
	"time"

	"sluice/router/worker"
)

// PairQuery asks for the ranks of two legs at once.
type PairQuery struct {
	// Query is what both legs are chosen from. Its Leg, Candidates and
	// Reservation are not looked at.
	Query
	Prefill, Decode []*worker.Rank
	// LocalTokens: a decode rank that would have fewer tokens left to compute
	// does the whole request; 0: never for that reason.
	LocalTokens int
	// LocalWhenFaster: a decode rank does the whole request when that is
	// estimated to be sooner at its first token.
	LocalWhenFaster bool
	// Reservations, where not nil, are memory for those of prefill and decode, as
	// Query.Reservation is for one.
	Reservations [2]*Reservation
}

// PairChoice is what ChoosePair chose and booked.
type PairChoice struct {
	// Prefill is the zero Choice when Local.
	Prefill Choice
	// Decode is the decode leg's rank; when Local the rank of the whole request.
	Decode Choice
	Local  bool
	// Why is one of the Why constants, a label of metrics.
	Why string
}

// Why a pair was chosen, or none.
const (
	WhyFewUncached   = "few_uncached"   // local: fewer than LocalTokens are left
	WhyFaster        = "faster"         // local or remote: by the estimate
	WhyUncached      = "uncached"       // remote: as many as LocalTokens are left, and no estimate was asked for
	WhyUnknownPrompt = "unknown_prompt" // remote: how long the prompt is is not known, so neither can be said
	WhyNotAsked      = "not_asked"      // remote: no local alternative was asked for
)

// PairRate tells what it costs to move one token's KV from one rank to another,
// in ms; 0: not known. It is called on the request path, a few dozen times for a
// pair: it must not lock, allocate or block.
type PairRate func(from, to *worker.Rank) (msPerToken float64)

// UsePairRate has ChoosePair ask f what a transfer costs; nil: only the rates
// learned by rank.
func (s *Scheduler) UsePairRate(f PairRate) {
	if f == nil {
		s.pairRate.Store(nil)
		return
	}
	s.pairRate.Store(&f)
}

// pairing is one ChoosePair under way: three looks, none of which has booked
// anything. Pooled, so that a choice allocates no more than its reservations.
type pairing struct {
	prefill, decode, local look
	pull                   float64 // ms to move the prompt between the two, weighted
	rate                   float64 // ms per token the PairRate told, 0: rank's own
	handover               float64 // ms that a hand-over takes whatever the prompt
	remote                 float64 // ms in all
	asked                  bool    // there is a local alternative
	choice                 bool    // it won
	why                    string
}

// look is one leg's candidates as one pass saw them: the best of them in
// scratch.kept, each with the load it was judged by.
type look struct {
	q     Query
	sc    scratch
	board *board
	loads [keepAll + 1]int64 // of scratch.kept, in the ledger; where on a board
	at    int                // index in kept of the one taken
}

// ChoosePair picks the ranks of prefill and decode together for the least
// estimated time to first token, books both, and says when one decode rank had
// better do the whole request. ok is false, with nothing booked or recorded,
// when one of the legs has no candidate left.
//
// The estimate is
//
//	remote = prefill leg's cost on p + decode leg's cost on d, with the transfer p → d, + the hand-over
//	local  = the whole request's cost on a decode rank
//
// in which the hand-over is what pulling takes at no tokens, as learned. Of all
// terms only the transfer depends on both ranks, and where no PairRate is known
// it depends on d alone: the best pair is then the best p and the best d, exactly,
// and no product is looked at. With one, every pair of the best few of both sides
// is weighed (by their own costs: up to 16 in small pools, 8 or 4 in big ones). A
// pair outside cannot be better by more than its transfer is below the chosen
// pair's, less what its own costs are above the best; a wire that much faster to
// a rank that much busier is left aside, for a product of a thousand by a
// thousand would cost more than it could win.
func (s *Scheduler) ChoosePair(q *PairQuery) (c PairChoice, ok bool) {
	p := s.pairs.Get()
	defer s.pairs.Put(p)
	res := q.Reservations
	for lost := 0; ; lost++ {
		if !s.pair(p, q) {
			return PairChoice{}, false
		}
		force := s.blind() || lost >= retries
		c = PairChoice{Local: p.choice, Why: p.why}
		if p.choice {
			res[1] = room(res[1])
			if ok = p.local.book(s, res[1], force); ok {
				c.Decode = p.local.chosen(s, res[1])
			}
		} else if res[0], res[1] = room(res[0]), room(res[1]); p.prefill.book(s, res[0], force) {
			if ok = p.decode.book(s, res[1], force); ok {
				c.Prefill, c.Decode = p.prefill.chosen(s, res[0]), p.decode.chosen(s, res[1])
			} else {
				res[0].Release()
			}
		}
		if ok {
			s.tellPair(p, lost)
			return c, true
		}
	}
}

// pair takes the looks and weighs them; nothing is booked.
func (s *Scheduler) pair(p *pairing, q *PairQuery) bool {
	now := s.now()
	if !p.prefill.take(s, q, PrefillLeg, q.Prefill, now) || !p.decode.take(s, q, DecodeLeg, q.Decode, now) {
		return false
	}
	_, p.handover, _ = s.rates.fleet.Rate(worker.Pulling)
	p.handover *= s.tuned().weights.prefill
	s.weigh(p)
	p.choice, p.why, p.asked = false, WhyNotAsked, false
	if q.LocalTokens <= 0 && !q.LocalWhenFaster {
		return true
	}
	if q.PromptTokens <= 0 {
		p.why = WhyUnknownPrompt
		return true
	}
	if !p.local.take(s, q, Whole, q.Decode, now) {
		return true
	}
	p.asked = true
	local, d := p.local.best(), p.decode.best()
	p.choice, p.why = true, WhyFewUncached
	switch n := q.LocalTokens; {
	case q.PromptTokens-int(local.cached) < n:
	case q.PromptTokens-int(d.cached) < n:
		p.local.instead(d.rank)
	case !q.LocalWhenFaster:
		p.choice, p.why = false, WhyUncached
	default:
		p.choice, p.why = local.cost < p.remote, WhyFaster
	}
	return true
}

// weigh finds the best pair of what the two looks kept.
func (s *Scheduler) weigh(p *pairing) {
	a, b := p.prefill.best(), p.decode.best()
	f := &p.decode.sc.frame
	own := func(d *term) float64 { return s.tuned().weights.termsOf(DecodeLeg, f.prompt, d).Transfer }
	rate := s.pairRate.Load()
	if s.rates.common[worker.Pulling].fixed.Load() != 0 {
		rate = nil
	}
	pull := func(x, d *term) (ms, r float64) {
		if rate != nil {
			if r = (*rate)(x.rank, d.rank); r > 0 {
				return s.tuned().weights.prefill * r * max(0, float64(f.prompt)-d.credit), r
			}
		}
		return own(d), 0
	}
	p.pull, p.rate = pull(a, b)
	p.remote = a.cost + b.cost - own(b) + p.pull
	if rate != nil && s.tuned().policy == byCost && s.warmth(&p.decode.q) == 0 && p.decode.q.Session == 0 {
		for i := range p.prefill.sc.kept {
			x := &p.prefill.sc.kept[i]
			for k := range p.decode.sc.kept {
				d := &p.decode.sc.kept[k]
				if x.excluded || d.excluded {
					continue
				}
				ms, r := pull(x, d)
				if all := x.cost + d.cost - own(d) + ms; all < p.remote {
					p.remote, p.pull, p.rate = all, ms, r
					p.prefill.at, p.decode.at = i, k
				}
			}
		}
	}
	p.remote += p.handover
}

// take looks at the candidates of a leg.
func (l *look) take(s *Scheduler, q *PairQuery, leg Leg, candidates []*worker.Rank, now int64) bool {
	l.q = q.Query
	l.q.Leg, l.q.Candidates, l.q.Reservation = leg, candidates, nil
	sc := &l.sc
	sc.frame, sc.rng = s.newFrame(&l.q), s.random()
	sc.frame.now = now
	sc.recorded = s.book != nil && q.RequestID != ""
	sc.kept, l.board = sc.kept[:0], nil
	if l.awaits(s) {
		sc.await = s.sent.find(sc.await[:0], q.Keys, q.KeyTokens, now)
		sc.frame.awaited = sc.await
	}
	if s.fits(&l.q) {
		if l.board = s.boards.find(candidates); l.board != nil {
			l.survey(s)
			return true
		}
	}
	if !s.pick(&sc.frame, &l.q, sc, &sc.rng) {
		return false
	}
	if last := s.faded.Load(); now-last > int64(time.Second) && s.faded.CompareAndSwap(last, now) {
		for _, r := range candidates {
			s.rates.fade(r, now)
		}
	}
	l.keepBest()
	return true
}

func (l *look) awaits(s *Scheduler) bool {
	return s.tuned().weights.awaited > 0 && len(l.q.Keys) > 0 && l.q.Leg != DecodeLeg && s.tuned().policy == byCost
}

// keepBest makes the best one of those kept.
func (l *look) keepBest() {
	for i := range l.sc.kept {
		if l.sc.kept[i].rank == l.sc.best.rank {
			l.at = i
			l.sc.kept[i] = l.sc.best
			return
		}
	}
	l.at = len(l.sc.kept)
	l.sc.kept = append(l.sc.kept, l.sc.best)
}

// survey looks at a big pool: the best of a few blocks and the best holders are
// kept, with the loads they were judged by.
func (l *look) survey(s *Scheduler) {
	sc, x := &l.sc, l.board
	x.refresh(s, sc.frame.now)
	p := &sc.pass
	*p = pass{x: x, s: s, f: &sc.frame, load: &s.ledger.load[sc.frame.leg], rng: &sc.rng, rivals: bestOpen}
	if sc.frame.leg == DecodeLeg {
		p.kind = 1
	}
	best := p.least()
	sc.usable = len(x.ranks)
	l.see(best)
	l.at = 0
	for i := range p.open {
		l.see(p.open[i])
	}
	for i := range p.held {
		l.see(p.held[i])
	}
	sc.best = sc.kept[0]
}

func (l *look) see(o found) {
	if o.index < 0 {
		return
	}
	r := l.board.ranks[o.index]
	for i := range l.sc.kept {
		if l.sc.kept[i].rank == r {
			return
		}
	}
	n := len(l.sc.kept)
	l.sc.kept = append(l.sc.kept, term{})
	l.loads[n] = o.load
	l.sc.frame.lookAt(r, &l.sc.kept[n], int(o.depth))
}

// best is the one taken.
func (l *look) best() *term { return &l.sc.kept[l.at] }

// instead takes another rank of the same candidates, kept or not.
func (l *look) instead(r *worker.Rank) {
	l.board = nil // its load was not seen in the ledger
	l.sc.frame.look(r, &l.sc.best)
	l.keepBest()
}

// book reserves the one taken; false when its load has moved since the look.
func (l *look) book(s *Scheduler, res *Reservation, force bool) bool {
	f, t := &l.sc.frame, l.best()
	if l.board == nil || force {
		return res.reserve(s, f, t, force)
	}
	res.fill(s, f, t)
	if !s.ledger.swap(f.leg, t.rank.Slot, l.loads[l.at], res.ns[0], res.ns[1]) {
		return false
	}
	res.show()
	return true
}

// chosen is the Choice of a booked look; what it sends there is awaited.
func (l *look) chosen(s *Scheduler, res *Reservation) Choice {
	t := l.best()
	if l.awaits(s) {
		s.sent.enter(t.rank.Slot, l.q.Keys, t.told(l.q.KeyTokens), l.sc.frame.now, time.Duration(min(t.cost*nsPerMS, float64(longestWait)))+eventsLag)
	}
	return Choice{Rank: t.rank, OverlapBlocks: int(t.depth), CachedTokens: int(t.cached), Cost: t.cost, Reservation: res}
}

// tellPair writes what was chosen to the record and to who watches.
func (s *Scheduler) tellPair(p *pairing, lost int) {
	legs := [...]*look{&p.prefill, &p.decode}
	taken := legs[:]
	if p.choice {
		legs[0] = &p.local
		taken = legs[:1]
	}
	w := s.watch.Load()
	for _, l := range taken {
		l.sc.best = *l.best()
		if l.sc.recorded {
			s.book.decide(&l.q, &l.sc.frame, &l.sc, true, lost)
		}
		if w != nil {
			t := l.best()
			s.tell(*w, &l.q, &l.sc.frame, Choice{Rank: t.rank, CachedTokens: int(t.cached), Cost: t.cost})
		}
	}
	if p.decode.sc.recorded {
		s.book.pair(p)
	}
	for _, l := range [...]*look{&p.prefill, &p.decode, &p.local} {
		l.q = Query{} // lets go of what was borrowed
		l.sc.frame = frame{}
		l.board = nil
	}
}
