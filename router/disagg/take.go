package disagg

import (
	"context"
	"math"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// taking is the Party of a request that is the rest of a stream: it runs as any
// request does, by the same plans and with the same retries, and what it gets is the
// stream's.
type taking struct {
	front.Leaver
	s        *streamEnd
	resp     *upstream.Response
	call     *upstream.Call
	rewriter relay.Rewriter
	refused  string
}

// Refuse implements front.Party.
func (t *taking) Refuse(_ front.Reason, _, message string, _ time.Duration) { t.refused = message }

// Answer implements front.Party: an answer that is whole is no stream.
func (t *taking) Answer(status int, _ []byte) {
	t.refused = "an engine answered " + statusClass(status) + " in the place of a stream"
}

// Relay implements front.Party; the runner hands taking its stream itself.
func (t *taking) Relay(resp *upstream.Response, call *upstream.Call, hooks front.RelayHooks) {
	call.Cut()
	resp.Release()
}

// maxMoved bounds the ids that another engine is given: of several choices each is a prompt.
const maxMoved = 1 << 20

// take has another engine, none of those that failed, go on with the open choices of the
// stream, held to a grammar by a member of the request or not; nil when none did.
func (c *carried) take(client front.Leaver, open []*relay.Sequence, failed []*worker.Rank, cause relay.Cause, grammar []byte) *taking {
	s := c.s
	opt := s.r.opt()
	q := s.r.requests.Get()
	q.r, q.id, q.model, q.stream = s.r, s.requestID, c.model, true
	defer q.recycle()
	t := &taking{Leaver: client}
	q.taking, q.before, q.by = t, int(c.attempt), c.deadline.time()
	q.steering = c.few().steering

	waits := cause != relay.Cut // else its engine is well, and the stream stays there
	length := shortest(c.takers(client, waits))
	conts := make([]Continuation, len(open))
	most, least, total := 0, 0, 0
	for i, o := range open {
		cont := &conts[i]
		*cont = Continuation{Prompt: c.Prompt.Len(), Most: int(c.most), Least: int(c.least)}
		var room []uint32
		if i == 0 {
			room = q.prompt.Tokens[:0]
		}
		cont.Tokens = append(c.Prompt.Append(room), o.Out[:o.Told]...)
		left, must, ok := cont.Left(c.kind, length)
		if !ok {
			s.note("not migrated: the model's length, which bounds an answer without max_tokens, is not known, or reached")
			return nil
		}
		c.Limit = int32(min(o.Told+left, math.MaxInt32)) // the same for all
		if i > 0 {
			q.besides += o.Told // the client's prompt, which all begin with, is computed once
		}
		if most == 0 || left < most {
			most = left
		}
		least = max(least, must)
		if total += len(cont.Tokens); total > maxMoved && len(open) > 1 {
			s.note("not migrated: too_long")
			return nil
		}
	}
	q.prompt.Tokens, q.prompt.Count = conts[0].Tokens, len(conts[0].Tokens)
	q.maxTokens = most
	var err error
	asked := c.asked()
	q.x, err = front.NewExchange(&front.Detached{
		Endpoint: front.EndpointOf(asked.path(c.kind)), RequestID: s.requestID, Body: asked.complete(c.kind, conts, min(least, most), most, grammar),
		Fields: c.fields(), Received: time.Now(), Party: t, Log: opt.Log,
	})
	if err != nil {
		s.note("not migrated: " + err.Error())
		return nil
	}
	if q.takeView(opt.Fleet.View()); q.pool != nil && q.missing() != "" && waits {
		q.awaitPlan(time.Now().Add(opt.Timeouts.PoolWait))
	}
	if q.missing() != "" || q.plan.Unfit {
		s.note("not migrated: no other worker can take the stream")
		return nil
	}
	q.plan.Prefill = fittingOr(&q.steering, q.plan.Prefill)
	q.plan.Decode = fittingOr(&q.steering, q.plan.Decode)
	q.plan.Whole = fittingOr(&q.steering, q.plan.Whole)
	for i, r := range failed {
		q.exclude(r, failure{down: cause.EngineFailed() && i == len(failed)-1}.setback())
	}
	q.suspects = max(int(c.suspects)-opt.Migration.Max+1, 0)
	q.salted = c.salt
	q.lookUp(time.Now())
	if !q.fit() {
		return nil
	}
	if q.plan.Family != nil && !q.handsOver() {
		q.plan.decodeAlone("")
	}
	if q.plan.Family == nil {
		q.runWhole()
	} else {
		q.runDisaggregated()
	}
	client.OnGone(nil)
	c.attempt += int32(max(q.attempt, 1))
	if t.s == nil {
		if t.refused != "" {
			s.note("not migrated: " + t.refused)
		}
		return nil
	}
	return t
}

// takers are the ready ranks that may go on with the stream, the failed one among them.
// Where there are none and waits says so, they are waited for: for timeouts.pool_wait, and
// while the client is there.
func (c *carried) takers(client front.Leaver, waits bool) (ranks []*worker.Rank) {
	r := c.s.r
	opt := r.opt()
	look := func(v *fleet.View) bool {
		pool, ok := v.Pool(c.model)
		if !ok {
			return !waits
		}
		ranks = wholeRanks(pool)
		if m := r.pdOf(c.model); disaggregated(pool, m) {
			ranks = decodeRanks(pool, m.traits)
		}
		return len(ranks) > 0
	}
	if look(opt.Fleet.View()) || !waits {
		return ranks
	}
	n := r.waiting.Add(1)
	defer r.waiting.Add(-1)
	if opt.PoolWaiters > 0 && n > int64(opt.PoolWaiters) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), opt.Timeouts.PoolWait)
	defer cancel()
	client.OnGone(cancel)
	defer client.OnGone(nil)
	opt.Fleet.Wait(ctx, look)
	return ranks
}

// fittingOr are the ranks that the request's headers leave.
func fittingOr(s *steering, ranks []*worker.Rank) []*worker.Rank {
	if len(ranks) == 0 {
		return ranks
	}
	return s.fitting(ranks, make([]bool, len(s.workers)))
}

// handsOver says whether a stream that moves is prefilled on a prefill worker again:
// where decode workers cannot prefill, where the two are weighed for every request,
// and where the decode worker that is the best choice would have to compute so much
// that it held up those it decodes. Else it is booked for all of it.
func (q *request) handsOver() bool {
	if q.plan.Traits.NoPlain || !q.pd.PlainDecode || q.joint() {
		return true
	}
	choice, ok := q.choose(schedule.Whole, q.plan.Decode)
	if !ok {
		return false
	}
	if len(q.plan.Prefill) > 0 && q.prompt.Count-choice.CachedTokens >= q.r.opt().Migration.HandoverTokens {
		choice.Reservation.Release()
		return true
	}
	q.booked = choice
	return false
}
