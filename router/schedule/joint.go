package schedule

import (
	"time"

	"sluice/router/worker"
)

// JointQuery asks for the ranks of two legs at once.
type JointQuery struct {
	// Query is the input of both choices. Its Leg, Candidates and Reservation are ignored.
	Query
	Prefill, Decode []*worker.Rank
	// LocalTokens: if a decode rank would have fewer tokens left to compute, it runs the whole
	// request; 0: never for that reason.
	LocalTokens int
	// LocalWhenFaster: a decode rank runs the whole request if its estimated time to first token is
	// shorter.
	LocalWhenFaster bool
	// Reservations, if not nil, are the memory for the reservations of prefill and decode, as
	// Query.Reservation is for one leg.
	Reservations [2]*Reservation
}

// JointChoice is the result of ChooseJoint, with its reservations.
type JointChoice struct {
	// Prefill is the zero Choice if Local.
	Prefill Choice
	// Decode is the decode leg's rank; if Local the rank of the whole request.
	Decode Choice
	Local  bool
	// Reason is one of the Reason constants, a label of metrics.
	Reason string
}

// The reasons for a remote or local prefill.
const (
	ReasonFewUncached   = "few_uncached"   // local: fewer than LocalTokens are left
	ReasonFaster        = "faster"         // local or remote: by the estimate
	ReasonUncached      = "uncached"       // remote: at least LocalTokens are left, and no estimate was requested
	ReasonPromptUnknown = "unknown_prompt" // remote: the prompt's length is unknown, so neither rule applies
	ReasonNotConsidered = "not_considered" // remote: no local alternative was requested
)

// TransferRate returns the cost of moving one token's KV from one rank to another, in ms; 0:
// unknown. It is called on the request path, a few dozen times per joint choice: it must not lock,
// allocate or block.
type TransferRate func(from, to *worker.Rank) (msPerToken float64)

// SetTransferRate makes ChooseJoint use f for the cost of a transfer; nil: only the rates learned
// per rank.
func (s *Scheduler) SetTransferRate(f TransferRate) {
	if f == nil {
		s.transferRate.Store(nil)
		return
	}
	s.transferRate.Store(&f)
}

// jointState is the state of one ChooseJoint: three scans, none of which has reserved anything. It
// is pooled, so that a choice allocates only its reservations.
type jointState struct {
	prefill, decode, local legScan
	pull                   float64 // ms to move the prompt between the two, weighted
	rate                   float64 // ms per token from the TransferRate, 0: the rank's own rate
	handover               float64 // ms of a hand-over, independent of the prompt
	remote                 float64 // total ms
	localAllowed           bool    // there is a local alternative
	chooseLocal            bool    // the local alternative won
	reason                 string
}

// legScan is one leg's candidates as one pass saw them: the best of them in scratch.candidates,
// each with the load it was evaluated with.
type legScan struct {
	query    Query
	scratch  scratch
	index    *candidateIndex
	loads    [maxAllRecorded + 1]int64 // of scratch.candidates, from loadCounters; only with an index
	selected int                       // index in scratch.candidates of the chosen one
}

// ChooseJoint chooses the ranks of prefill and decode together for the shortest estimated time to
// first token, reserves both, and decides whether one decode rank runs the whole request instead.
// ok is false, with nothing reserved or recorded, if one of the legs has no candidate left.
//
// The estimate is
//
//	remote = prefill leg's cost on p + decode leg's cost on d, with the transfer p → d, + the hand-over
//	local  = the whole request's cost on a decode rank
//
// where the hand-over is the learned time of a pull of no tokens. Only the transfer depends on both
// ranks. If no TransferRate is known it depends on d alone: the best combination is then exactly
// the best p and the best d, and no product is examined. Otherwise every combination of the best
// few of both sides is evaluated (by their own costs: up to 16 in small pools, 8 or 4 in large
// ones). A combination outside these can be better only by the amount that its transfer is cheaper,
// minus the amount that its own costs are higher; such a fast link to such a busy rank is ignored,
// because a product of a thousand by a thousand would cost more than it could save.
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

// scanJoint performs the scans and compares their results. It reserves nothing.
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

// bestJoint finds the best combination of the candidates that the two scans kept.
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

// scanCandidates evaluates the candidates of a leg.
func (l *legScan) scanCandidates(s *Scheduler, q *JointQuery, leg LegKind, candidates []*worker.Rank, now int64) bool {
	l.query = q.Query
	l.query.Leg, l.query.Candidates, l.query.Reservation = leg, candidates, nil
	sc := &l.scratch
	sc.ctx, sc.rng = s.newChoiceContext(&l.query), s.random()
	sc.ctx.now = now
	sc.ctx.scaleOthers(s)
	sc.ctx.reuse = s.reuse.at(now)
	sc.recorded = s.records != nil && q.RequestID != ""
	sc.candidates, l.index = sc.candidates[:0], nil
	if l.findInFlight(s) {
		sc.inFlight = s.inFlight.find(sc.inFlight[:0], q.Keys, q.KeyTokens, now)
		sc.ctx.inFlight = sc.inFlight
		if cap(sc.used) == 0 {
			sc.used = make([]usedPrompt, 0, maxReused)
		}
		sc.ctx.reuse.find(sc.used[:0], q.Keys)
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

// keepBest selects the best of the kept candidates.
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

// scanIndex scans a large pool: it keeps the best candidates of a few blocks and the best holders,
// with the loads they were evaluated with.
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

// best returns the selected candidate.
func (l *legScan) best() *candidateState { return &l.scratch.candidates[l.selected] }

// selectOther selects another rank among the same candidates, kept or not.
func (l *legScan) selectOther(r *worker.Rank) {
	l.index = nil // its load was not read from loadCounters
	l.scratch.ctx.evaluate(r, &l.scratch.best)
	l.keepBest()
}

// reserve reserves the selected rank; it returns false if its load has changed since the scan.
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

// toChoice returns the Choice of a reserved scan and adds its prompt to the in-flight table.
func (l *legScan) toChoice(s *Scheduler, res *Reservation) Choice {
	t := l.best()
	if l.findInFlight(s) {
		s.inFlight.add(t.rank.Slot, l.query.Keys, t.confirmedBlocks(l.query.KeyTokens), l.scratch.ctx.now, time.Duration(min(l.scratch.ctx.ownTime(t)*nsPerMS, float64(maxInFlight)))+eventLag)
		l.scratch.ctx.reuse.place(t.rank.Slot, l.query.Keys, l.scratch.ctx.tokensKept(), int(t.cached))
	}
	if l.scratch.ctx.leg != DecodeLeg {
		s.lookBusy(l.query.Candidates, &l.scratch.rng)
	}
	return Choice{Rank: t.rank, OverlapBlocks: int(t.depth), CachedTokens: int(t.cached), Cost: t.cost, Reservation: res}
}

// publishJoint writes the choice to the record and to the observer.
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
		l.query = Query{} // release borrowed memory
		l.scratch.ctx = choiceContext{}
		l.index = nil
	}
}
