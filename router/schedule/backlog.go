package schedule

import (
	"math"
	"time"

	"sluice/router/worker"
)

// Backlog returns how long the engine of a rank is expected to work on what it has been given and has
// not finished: prompts to compute, or KV to pull. Requests that are being decoded do not count.
//
// Of a request whose first token the router sees, the work counts until that token, so an engine that
// falls behind keeps its backlog; only the first of them is expected to shrink with time. Of others
// (answers that are not streamed), the work counts for the time that it is expected to take, once the
// rate of that work is known. Work that
// other routers have placed counts as the engine reports it.
func (s *Scheduler) Backlog(r *worker.Rank) time.Duration {
	now, work := s.now(), r.PendingWork.Load()
	if n := r.Pending.Load(); n > 0 {
		work -= min(max(now-r.HeadSince.Load(), 0), work/n)
	}
	if until := r.UnseenUntil.Load(); until > now && r.Unseen.Load() > 0 {
		work += until - now
	}
	work += tokensOfOthers(r) * s.rates.price(r, worker.Prefilling)
	return time.Duration(max(work, 0))
}

// EngineWait returns how long the engine of a rank is expected to leave a request alone that it is given
// now: Backlog or, by the pace of the first tokens, more.
func (s *Scheduler) EngineWait(r *worker.Rank) time.Duration {
	return max(s.Backlog(r), s.paceWait(r))
}

// paceWait returns the wait in the engine of a rank by the pace of its first tokens, which shows what the
// work does not: an engine that runs a bounded number of requests at a time starts one when another ends,
// however little the prompts take. It is 0 if IsBatchFull is exact, since the engine has no requests of
// other routers.
func (s *Scheduler) paceWait(r *worker.Rank) time.Duration {
	if r.Pace.Batch() > 0 && r.Running.Load()+r.Waiting.Load() <= r.Requests.Load()*5/4+2 {
		return 0
	}
	return r.Pace.Wait(r.Pending.Load(), time.Duration(s.now()-r.HeadSince.Load()))
}

// EngineQueue bounds what an engine is given beyond what it computes.
type EngineQueue struct {
	// Time is how long the work may take that waits there.
	Time time.Duration
	// Backlogged is how long requests have waited in the router for such engines without a break.
	Backlogged time.Duration
}

// lastingBacklog is how long requests must have waited in the router without a break before an engine with
// a full batch is given fewer.
const lastingBacklog = 3 * time.Second

// IsQueueFull reports whether the engine of a rank has as much work as it should: as takes queue.Time, or one of
// its steps if that is longer, as it may be without a GPU. Such an engine computes many prompts in a step,
// and none starts before the next; with less it would get a few in each, without end.
func (s *Scheduler) IsQueueFull(r *worker.Rank, queue EngineQueue) bool {
	return s.EngineWait(r) >= max(queue.Time, s.fixedTime(r))
}

// fixedTime returns the part of the time to a first token that does not depend on the prompt, 0 if it is
// unknown. Requests that wait for a place in the batch increase it, so it is at most the time of a request
// that met no other.
func (s *Scheduler) fixedTime(r *worker.Rank) time.Duration {
	_, base, legs := r.Worker.Speed.Rate(worker.Prefilling)
	if legs < minOwnLegs {
		_, base, _ = s.rates.fleet.Rate(worker.Prefilling)
	}
	return min(time.Duration(base*nsPerMS), r.Pace.Alone())
}

// TimePerToken returns how long the engine of a rank computes for each prompt token, on average over prompts of
// the usual length. The part of their time that does not depend on the length counts: prompts of one length do
// not show which part that is.
func (s *Scheduler) TimePerToken(r *worker.Rank) time.Duration {
	price := s.rates.price(r, worker.Prefilling)
	if s.rates.common[worker.Prefilling].fixed.Load() > 0 {
		return time.Duration(price)
	}
	tokens := r.Worker.Speed.MeanUnits(worker.Prefilling)
	if _, _, legs := r.Worker.Speed.Rate(worker.Prefilling); legs < minOwnLegs {
		tokens = s.rates.fleet.MeanUnits(worker.Prefilling)
	}
	return time.Duration(price) + time.Duration(float64(s.fixedTime(r))/max(tokens, 1))
}

// StartIn returns in how long the engine of a rank is expected to start a request that waits for the rank
// alone.
func (s *Scheduler) StartIn(r *worker.Rank) time.Duration {
	wait := s.EngineWait(r)
	if batch := r.Pace.Batch(); batch > 0 {
		wait += time.Duration(max(r.Requests.Load()-batch+1, 0)) * r.Pace.Interval()
	}
	return wait
}

// congestedWait is the wait, beyond the time that a request takes alone, from which an engine that reports
// waiting requests is taken to run as many as it can.
const congestedWait = 60 * time.Millisecond

// IsBatchFull reports whether the engine of a rank runs as many requests as it can, and has as many more as
// it should (aheadOfBatch). It returns false as long as the engine's reports have not shown how many
// requests run at a time.
func (s *Scheduler) IsBatchFull(r *worker.Rank, queue EngineQueue) bool {
	if n := r.Reports.Load(); n != r.PacedReports.Load() {
		r.PacedReports.Store(n)
		isCongested := r.KVUsage() < fullUsage && r.Pace.Wait(r.Pending.Load(), 0) > congestedWait
		r.Pace.Report(time.Duration(s.now()), r.Running.Load(), r.Waiting.Load(), r.Requests.Load(), isCongested)
	}
	batch := r.Pace.Batch()
	return batch > 0 && r.Requests.Load() >= batch+aheadOfBatch(r, queue)
}

// aheadOfBatch returns how many requests an engine is given beyond its batch: those that are expected to
// get a place in it within half of queue.Time, or an eighth if the backlog lasts.
//
// Without them each place stays empty for a step and the way to the router and back, because the engine
// begins its next step as soon as one ends. The other half of the time is for the request's own step and for
// places that become free later than expected. Where the mean time between two places is longer than that
// part, but not than queue.Time, one request is sent ahead. Where it is longer, none is: an empty place
// costs such an engine little, and a request that waits there can no longer go behind one of a higher class.
//
// Below saturation the queue must make no difference, so it keeps only what many more would delay. In a
// backlog that lasts, those of a tenant above its share and of lower classes would always be ahead of the
// others, and some places that are empty for a step matter less: there none is sent ahead of a place that
// becomes free later than that.
func aheadOfBatch(r *worker.Rank, queue EngineQueue) int64 {
	interval := r.Pace.Interval()
	if interval <= 0 || interval >= queue.Time {
		return 0
	}
	if queue.Backlogged >= lastingBacklog {
		return int64(queue.Time / 8 / interval)
	}
	return max(int64(queue.Time/2/interval), 1)
}

// CanStart reports whether the engine of a rank would start a leg soon: less work waits there than queue
// allows, its batch has a place or is expected to have one (see IsBatchFull), it reports no pressure, and
// its KV can hold the request. prompt and maxTokens are those of Query.
func (s *Scheduler) CanStart(r *worker.Rank, leg LegKind, queue EngineQueue, prompt, maxTokens int) bool {
	if s.IsQueueFull(r, queue) || s.IsBatchFull(r, queue) || UnderPressure(r) {
		return false
	}
	return leg == PrefillLeg || FitsKV(r, prompt, maxTokens)
}

// fullUsage is the fraction of KV blocks in use from which an engine that also has waiting requests is
// under pressure.
const fullUsage = 0.95

// UnderPressure reports whether the engine of a rank had requests waiting when it last reported, no
// fewer of this router's are there now, and the router cannot see them start or its KV is nearly full.
func UnderPressure(r *worker.Rank) bool {
	waiting, running := r.Waiting.Load(), r.Running.Load()
	if waiting <= 0 || running < 0 || r.Requests.Load() < waiting+running {
		return false
	}
	return r.Unseen.Load() > 0 || r.KVUsage() >= fullUsage
}

// FitsKV reports whether the KV of a request fits into the free blocks of a rank, as the engine reports
// them, beside the prompts that it has not computed yet. todo is the number of tokens of the prompt that are not
// cached there. It returns true if the engine reports no usage, and for a rank without requests: such
// an engine decides itself.
func FitsKV(r *worker.Rank, todo, maxTokens int) bool {
	return MissingKV(r, todo, maxTokens) == 0
}

// MissingKV returns how many blocks must become free on a rank before the KV of a request fits; 0 if it
// does (see FitsKV).
func MissingKV(r *worker.Rank, todo, maxTokens int) int64 {
	usage, total := r.KVUsage(), r.Worker.Info().TotalBlocks
	if usage < 0 || total <= 0 || r.Requests.Load() == 0 {
		return 0
	}
	free := int64((1 - min(usage, 1)) * float64(total))
	pending := r.PrefillTokens.Load() / int64(sizeOf(r))
	return max(int64(blocksFor(r, todo, outputTokens(maxTokens)))-(free-pending), 0)
}

// ExceedsKV reports whether a prompt is larger than the whole KV of a rank.
func ExceedsKV(r *worker.Rank, prompt int) bool {
	total := r.Worker.Info().TotalBlocks
	return total > 0 && blocksFor(r, prompt, 0) > total
}

// KVBlocks returns how many blocks a number of tokens takes on a rank.
func KVBlocks(r *worker.Rank, tokens int) int64 { return int64(blocksFor(r, tokens, 0)) }

// FreeKV corrects what the engine of a rank has last reported by blocks that a request has left, until the
// next report.
func FreeKV(r *worker.Rank, blocks int64) {
	if usage, total := r.KVUsage(), r.Worker.Info().TotalBlocks; usage > 0 && total > 0 {
		r.SetKVUsage(max(usage-float64(blocks)/float64(total), 0))
	}
}

// KVHeadroom returns how many requests of a size fit into the free blocks of a rank, as FitsKV counts them:
// at least one into a rank without requests, and math.MaxInt64 if the engine reports no usage.
func KVHeadroom(r *worker.Rank, todo, maxTokens int) int64 {
	usage, total := r.KVUsage(), r.Worker.Info().TotalBlocks
	if usage < 0 || total <= 0 {
		return math.MaxInt64
	}
	least := int64(0)
	if r.Requests.Load() == 0 {
		least = 1
	}
	free := int64((1-min(usage, 1))*float64(total)) - r.PrefillTokens.Load()/int64(sizeOf(r))
	return max(free/int64(blocksFor(r, todo, outputTokens(maxTokens))), least)
}

// BatchHeadroom returns how many more requests the engine of a rank may be given before IsBatchFull, at least
// 1; math.MaxInt64 if its batch is unknown.
func BatchHeadroom(r *worker.Rank, queue EngineQueue) int64 {
	if batch := r.Pace.Batch(); batch > 0 {
		return max(batch+aheadOfBatch(r, queue)-r.Requests.Load(), 1) // IsBatchFull was false a moment ago
	}
	return math.MaxInt64
}

// ExpectedOutput returns the number of tokens that a request with a limit of maxTokens is expected to
// generate; 0 means that it has none.
func ExpectedOutput(maxTokens int) int { return outputTokens(maxTokens) }

// FirstTokenTime returns the expected time from the dispatch of a request to its first token, with that
// many tokens to compute. delay is the part that the tokens do not take, as it has been on the rank lately:
// what other requests there take, and the fixed time of a request.
func (s *Scheduler) FirstTokenTime(r *worker.Rank, tokens int) (whole, delay time.Duration) {
	delay = r.Pace.Delay()
	return s.PrefillTime(r, tokens) + delay, delay
}

// PrefillTime returns the expected time to compute that many tokens on an idle rank.
func (s *Scheduler) PrefillTime(r *worker.Rank, tokens int) time.Duration {
	return time.Duration(int64(max(tokens, 0)) * s.rates.price(r, worker.Prefilling))
}

// StepTime returns the expected time between two tokens of a request that decodes on a rank beside what
// is decoded there now, and needs that many tokens of KV.
func (s *Scheduler) StepTime(r *worker.Rank, tokens int) time.Duration {
	blocks := r.DecodeBlocks.Load() + int64(tokens/sizeOf(r))
	_, base, legs := r.Worker.Speed.Rate(worker.Decoding)
	if legs == 0 {
		_, base, _ = s.rates.fleet.Rate(worker.Decoding)
	}
	return time.Duration(base*nsPerMS) + time.Duration(blocks*s.rates.price(r, worker.Decoding)/decodeSteps)
}

// ChoosesByCost reports whether the policy chooses by cost.
func (s *Scheduler) ChoosesByCost() bool { return s.currentSettings().policy == byCost }

// Preview returns the candidate with the lowest cost without reserving it and without a record. Its
// Reservation is nil.
func (s *Scheduler) Preview(q *Query) (c Choice, ok bool) {
	sc := s.scratch.Get()
	defer s.scratch.Put(sc)
	if !cheapestOf(s.preview(q, sc), q, sc, &sc.rng, false) {
		return c, false
	}
	t := &sc.best
	return Choice{Rank: t.rank, OverlapBlocks: int(t.depth), CachedTokens: int(t.cached), Cost: t.cost}, true
}

// FirstTokens returns for each candidate of a query, excluded or not, how long a request that is sent there now
// is expected to take to its first token. Leg is WholeLeg or PrefillLeg.
func (s *Scheduler) FirstTokens(q *Query) []time.Duration {
	sc := s.scratch.Get()
	defer s.scratch.Put(sc)
	f, times := s.preview(q, sc), make([]time.Duration, len(q.Candidates))
	var t candidateState
	for i, r := range q.Candidates {
		f.evaluate(r, &t)
		times[i] = s.StartIn(r) + s.PrefillTime(r, max(f.prompt-int(t.cached), 1))
	}
	return times
}

// preview prepares scratch memory to evaluate candidates as Choose does, without a reservation.
func (s *Scheduler) preview(q *Query, sc *scratch) *choiceContext {
	sc.ctx, sc.rng = s.newChoiceContext(q), s.random()
	f := &sc.ctx
	f.now = s.now()
	f.scaleOthers(s)
	f.reuse = s.reuse.at(f.now)
	if f.weights.inFlight > 0 && len(q.Keys) > 0 && q.Leg != DecodeLeg {
		sc.inFlight = s.inFlight.find(sc.inFlight[:0], q.Keys, q.KeyTokens, f.now)
		f.inFlight = sc.inFlight
	}
	sc.usable, sc.candidates = 0, sc.candidates[:0]
	return f
}

// SetOnCapacity makes f be called whenever a prompt has been computed or a reservation ends, on the
// goroutine of the leg or of an event loop: f must not block.
func (s *Scheduler) SetOnCapacity(f func()) { s.onCapacity.Store(&f) }

func (s *Scheduler) notifyCapacity() {
	if f := s.onCapacity.Load(); f != nil {
		(*f)()
	}
}

// begin counts a reservation's work that its engine has not finished yet.
func (res *Reservation) begin() {
	r := res.rank
	r.Requests.Add(1)
	if res.unseen {
		if !res.s.rates.isKnown(worker.Prefilling) {
			res.pending = 0 // nothing would correct an assumed rate
		}
		r.Unseen.Add(1)
		for {
			old := r.UnseenUntil.Load()
			if r.UnseenUntil.CompareAndSwap(old, max(old, res.started)+res.pending) {
				return
			}
		}
	}
	r.PendingWork.Add(res.pending)
	if res.alone = r.Pending.Add(1) == 1; res.alone {
		r.HeadSince.Store(res.started)
	}
}

// endUnseen ends the count of a request whose first token the router does not see. What it has not used of
// its expected time is given back, so that a leg that failed at once leaves nothing.
func (res *Reservation) endUnseen() {
	if rest := res.pending - (res.s.now() - res.started); rest > 0 {
		res.rank.UnseenUntil.Add(-rest)
	}
	res.rank.Unseen.Add(-1)
}

// endPending ends what begin has counted: at the first token, or when the leg ends without one.
func (res *Reservation) endPending(hasFirstToken bool) {
	if r := res.rank; !res.unseen {
		if hasFirstToken { // else the time since the last one goes on
			now := res.s.now()
			r.Pace.FirstToken(time.Duration(now-r.HeadSince.Swap(now)), time.Duration(now-res.started), time.Duration(res.pending), res.alone, r.Pending.Load() <= 1)
		}
		r.PendingWork.Add(-res.pending)
		r.Pending.Add(-1)
	}
	res.s.notifyCapacity()
}
