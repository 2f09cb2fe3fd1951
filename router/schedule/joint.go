package schedule

import (
	"time"

	"sluice/router/worker"
)

// JointQuery asks for the ranks of two legs at once.
type JointQuery struct {
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

// JointChoice is what ChooseJoint chose and booked.
type JointChoice struct {
	// Prefill is the zero Choice when Local.
	Prefill Choice
	// Decode is the decode leg's rank; when Local the rank of the whole request.
	Decode Choice
	Local  bool
	// Why is one of the Why constants, a label of metrics.
	Reason string
}

// Why a pair was chosen, or none.
const (
	ReasonFewUncached   = "few_uncached"   // local: fewer than LocalTokens are left
	ReasonFaster        = "faster"         // local or remote: by the estimate
	ReasonUncached      = "uncached"       // remote: as many as LocalTokens are left, and no estimate was asked for
	ReasonPromptUnknown = "unknown_prompt" // remote: how long the prompt is is not known, so neither can be said
	ReasonNotConsidered = "not_asked"      // remote: no local alternative was asked for
)

// TransferRate tells what it costs to move one token's KV from one rank to another,
// in ms; 0: not known. It is called on the request path, a few dozen times for a
// pair: it must not lock, allocate or block.
type TransferRate func(from, to *worker.Rank) (msPerToken float64)

// SetTransferRate has ChooseJoint ask f what a transfer costs; nil: only the rates
// learned by rank.
func (s *Scheduler) SetTransferRate(f TransferRate) {
	if f == nil {
		s.transferRate.Store(nil)
		return
	}
	s.transferRate.Store(&f)
}

// jointState is one ChooseJoint under way: three looks, none of which has booked
// anything. Pooled, so that a choice allocates no more than its reservations.
type jointState struct {
	prefill, decode, local legScan
	pull                   float64 // ms to move the prompt between the two, weighted
	rate                   float64 // ms per token the TransferRate told, 0: rank's own
	handover               float64 // ms that a hand-over takes whatever the prompt
	remote                 float64 // ms in all
	localAllowed           bool    // there is a local alternative
	chooseLocal            bool    // it won
	reason                 string
}

// legScan is one leg's candidates as one pass saw them: the best of them in
// scratch.kept, each with the load it was judged by.
type legScan struct {
	query    Query
	scratch  scratch
	index    *candidateIndex
	loads    [maxAllRecorded + 1]int64 // of scratch.kept, in the ledger; where on a board
	selected int                       // index in kept of the one taken
}

// ChooseJoint picks the ranks of prefill and decode together for the least
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
// terms only the transfer depends on both ranks, and where no TransferRate is known
// it depends on d alone: the best pair is then the best p and the best d, exactly,
// and no product is looked at. With one, every pair of the best few of both sides
// is weighed (by their own costs: up to 16 in small pools, 8 or 4 in big ones). A
// pair outside cannot be better by more than its transfer is below the chosen
// pair's, less what its own costs are above the best; a wire that much faster to
// a rank that much busier is left aside, for a product of a thousand by a
// thousand would cost more than it could win.
func (s *Scheduler) ChooseJoint(q *JointQuery) (c JointChoice, ok bool) {
	p := s.jointStates.Get()
	defer s.jointStates.Put(p)
	res := q.Reservations
	for lost := 0; ; lost++ {
		if !s.scanJoint(p, q) {
			return JointChoice{}, false
		}
		force := s.ignoresLoad() || lost >= retries
		c = JointChoice{Local: p.chooseLocal, Reason: p.reason}
		if p.chooseLocal {
			res[1] = reservationFor(res[1])
			if ok = p.local.reserve(s, res[1], force); ok {
				c.Decode = p.local.toChoice(s, res[1])
			}
		} else if res[0], res[1] = reservationFor(res[0]), reservationFor(res[1]); p.prefill.reserve(s, res[0], force) {
			if ok = p.decode.reserve(s, res[1], force); ok {
				c.Prefill, c.Decode = p.prefill.toChoice(s, res[0]), p.decode.toChoice(s, res[1])
			} else {
				res[0].Release()
			}
		}
		if ok {
			s.publishJoint(p, lost)
			return c, true
		}
	}
}

// scanJoint takes the looks and weighs them; nothing is booked.
func (s *Scheduler) scanJoint(p *jointState, q *JointQuery) bool {
	now := s.now()
	if !p.prefill.scanCandidates(s, q, PrefillLeg, q.Prefill, now) || !p.decode.scanCandidates(s, q, DecodeLeg, q.Decode, now) {
		return false
	}
	_, p.handover, _ = s.rates.fleet.Rate(worker.Pulling)
	p.handover *= s.currentSettings().weights.prefill
	s.bestJoint(p)
	p.chooseLocal, p.reason, p.localAllowed = false, ReasonNotConsidered, false
	if q.LocalTokens <= 0 && !q.LocalWhenFaster {
		return true
	}
	if q.PromptTokens <= 0 {
		p.reason = ReasonPromptUnknown
		return true
	}
	if !p.local.scanCandidates(s, q, WholeLeg, q.Decode, now) {
		return true
	}
	p.localAllowed = true
	local, d := p.local.best(), p.decode.best()
	p.chooseLocal, p.reason = true, ReasonFewUncached
	switch n := q.LocalTokens; {
	case q.PromptTokens-int(local.cached) < n:
	case q.PromptTokens-int(d.cached) < n:
		p.local.selectOther(d.rank)
	case !q.LocalWhenFaster:
		p.chooseLocal, p.reason = false, ReasonUncached
	default:
		p.chooseLocal, p.reason = local.cost < p.remote, ReasonFaster
	}
	return true
}

// bestJoint finds the best pair of what the two looks kept.
func (s *Scheduler) bestJoint(p *jointState) {
	a, b := p.prefill.best(), p.decode.best()
	f := &p.decode.scratch.ctx
	own := func(d *candidateState) float64 {
		return s.currentSettings().weights.termsOf(DecodeLeg, f.prompt, d).Transfer
	}
	rate := s.transferRate.Load()
	if s.rates.common[worker.Pulling].fixed.Load() != 0 {
		rate = nil
	}
	pull := func(x, d *candidateState) (ms, r float64) {
		if rate != nil {
			if r = (*rate)(x.rank, d.rank); r > 0 {
				return s.currentSettings().weights.prefill * r * max(0, float64(f.prompt)-d.credit), r
			}
		}
		return own(d), 0
	}
	p.pull, p.rate = pull(a, b)
	p.remote = a.cost + b.cost - own(b) + p.pull
	if rate != nil && s.currentSettings().policy == byCost && s.temperature(&p.decode.query) == 0 && p.decode.query.Session == 0 {
		for i := range p.prefill.scratch.candidates {
			x := &p.prefill.scratch.candidates[i]
			for k := range p.decode.scratch.candidates {
				d := &p.decode.scratch.candidates[k]
				if x.excluded || d.excluded {
					continue
				}
				ms, r := pull(x, d)
				if all := x.cost + d.cost - own(d) + ms; all < p.remote {
					p.remote, p.pull, p.rate = all, ms, r
					p.prefill.selected, p.decode.selected = i, k
				}
			}
		}
	}
	p.remote += p.handover
}

// scanCandidates looks at the candidates of a leg.
func (l *legScan) scanCandidates(s *Scheduler, q *JointQuery, leg LegKind, candidates []*worker.Rank, now int64) bool {
	l.query = q.Query
	l.query.Leg, l.query.Candidates, l.query.Reservation = leg, candidates, nil
	sc := &l.scratch
	sc.ctx, sc.rng = s.newChoiceContext(&l.query), s.random()
	sc.ctx.now = now
	sc.recorded = s.records != nil && q.RequestID != ""
	sc.candidates, l.index = sc.candidates[:0], nil
	if l.findInFlight(s) {
		sc.inFlight = s.inFlight.find(sc.inFlight[:0], q.Keys, q.KeyTokens, now)
		sc.ctx.inFlight = sc.inFlight
	}
	if s.usesIndex(&l.query) {
		if l.index = s.indexes.find(candidates); l.index != nil {
			l.scanIndex(s)
			return true
		}
	}
	if !s.pick(&sc.ctx, &l.query, sc, &sc.rng) {
		return false
	}
	if last := s.expiredAt.Load(); now-last > int64(time.Second) && s.expiredAt.CompareAndSwap(last, now) {
		for _, r := range candidates {
			s.rates.expireOwn(r, now)
		}
	}
	l.keepBest()
	return true
}

func (l *legScan) findInFlight(s *Scheduler) bool {
	return s.currentSettings().weights.inFlight > 0 && len(l.query.Keys) > 0 && l.query.Leg != DecodeLeg && s.currentSettings().policy == byCost
}

// maxBestRecorded makes the best one of those kept.
func (l *legScan) keepBest() {
	for i := range l.scratch.candidates {
		if l.scratch.candidates[i].rank == l.scratch.best.rank {
			l.selected = i
			l.scratch.candidates[i] = l.scratch.best
			return
		}
	}
	l.selected = len(l.scratch.candidates)
	l.scratch.candidates = append(l.scratch.candidates, l.scratch.best)
}

// scanIndex looks at a big pool: the best of a few blocks and the best holders are
// kept, with the loads they were judged by.
func (l *legScan) scanIndex(s *Scheduler) {
	sc, x := &l.scratch, l.index
	x.refresh(s, sc.ctx.now)
	p := &sc.scan
	*p = scan{index: x, scheduler: s, ctx: &sc.ctx, load: &s.load.load[sc.ctx.leg], rng: &sc.rng, minBlocks: maxShownBlocks}
	if sc.ctx.leg == DecodeLeg {
		p.kind = 1
	}
	best := p.cheapest()
	sc.usable = len(x.ranks)
	l.addCandidate(best)
	l.selected = 0
	for i := range p.blockBest {
		l.addCandidate(p.blockBest[i])
	}
	for i := range p.holderBest {
		l.addCandidate(p.holderBest[i])
	}
	sc.best = sc.candidates[0]
}

func (l *legScan) addCandidate(o scanHit) {
	if o.index < 0 {
		return
	}
	r := l.index.ranks[o.index]
	for i := range l.scratch.candidates {
		if l.scratch.candidates[i].rank == r {
			return
		}
	}
	n := len(l.scratch.candidates)
	l.scratch.candidates = append(l.scratch.candidates, candidateState{})
	l.loads[n] = o.load
	l.scratch.ctx.evaluateAt(r, &l.scratch.candidates[n], int(o.depth))
}

// best is the one taken.
func (l *legScan) best() *candidateState { return &l.scratch.candidates[l.selected] }

// selectOther takes another rank of the same candidates, kept or not.
func (l *legScan) selectOther(r *worker.Rank) {
	l.index = nil // its load was not seen in the ledger
	l.scratch.ctx.evaluate(r, &l.scratch.best)
	l.keepBest()
}

// reserve reserves the one taken; false when its load has moved since the look.
func (l *legScan) reserve(s *Scheduler, res *Reservation, force bool) bool {
	f, t := &l.scratch.ctx, l.best()
	if l.index == nil || force {
		return res.reserve(s, f, t, force)
	}
	res.fill(s, f, t)
	if !s.load.compareAndAdd(f.leg, t.rank.Slot, l.loads[l.selected], res.ns[0], res.ns[1]) {
		return false
	}
	res.publish()
	return true
}

// toChoice is the Choice of a booked look; what it sends there is awaited.
func (l *legScan) toChoice(s *Scheduler, res *Reservation) Choice {
	t := l.best()
	if l.findInFlight(s) {
		s.inFlight.add(t.rank.Slot, l.query.Keys, t.confirmedBlocks(l.query.KeyTokens), l.scratch.ctx.now, time.Duration(min(t.cost*nsPerMS, float64(maxInFlight)))+eventLag)
	}
	return Choice{Rank: t.rank, OverlapBlocks: int(t.depth), CachedTokens: int(t.cached), Cost: t.cost, Reservation: res}
}

// publishJoint writes what was chosen to the record and to who watches.
func (s *Scheduler) publishJoint(p *jointState, lost int) {
	legs := [...]*legScan{&p.prefill, &p.decode}
	candidates := legs[:]
	if p.chooseLocal {
		legs[0] = &p.local
		candidates = legs[:1]
	}
	w := s.observer.Load()
	for _, l := range candidates {
		l.scratch.best = *l.best()
		if l.scratch.recorded {
			s.records.addDecision(&l.query, &l.scratch.ctx, &l.scratch, true, lost)
		}
		if w != nil {
			t := l.best()
			s.notify(*w, &l.query, &l.scratch.ctx, Choice{Rank: t.rank, CachedTokens: int(t.cached), Cost: t.cost})
		}
	}
	if p.decode.scratch.recorded {
		s.records.addJoint(p)
	}
	for _, l := range [...]*legScan{&p.prefill, &p.decode, &p.local} {
		l.query = Query{} // lets go of what was borrowed
		l.scratch.ctx = choiceContext{}
		l.index = nil
	}
}
