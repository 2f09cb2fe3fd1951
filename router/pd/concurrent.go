package pd

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/dataplane/redact"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// concurrentPrefill is the prefill leg of a Concurrent pair. It runs on its own goroutine and may
// outlive the request. It therefore has copies of its body and header lines, and its own account.
// timeouts.prefill bounds it.
//
// If it fails before decode has generated a token, it cancels the decode leg. The goroutine that
// runs decode then calls wait and finds the reason in failed, status and err.
//
// The request and the leg's goroutine each call drop when they no longer use it. The last drop
// returns it to the pool, unless retain was called: a stream, or the goroutine that ends both legs
// after a disconnect, may use it later.
type concurrentPrefill struct {
	legRecord
	family    family.Family
	peerInfo  string // that the decode leg was written with
	requestID string
	call      upstream.Call
	decode    upstream.Call // the call of the decode leg
	detachedLeg
	tokens int // number of prompt tokens
	// refusedIDs is the rank that refused the prompt as token ids in an earlier attempt; nil if none did.
	refusedIDs *worker.Rank
	keys       []blockhash.Seq // blocks for the approximate index; nil for ranks with KV events

	cached        atomic.Int64 // as reported by the engine; -1 if not yet or never reported
	handoverState atomic.Int32 // see handoverPending

	done  sync.WaitGroup // released when the leg has ended; the fields below are set before
	ended atomic.Bool
	// failed says that the leg failed by itself and was not cancelled.
	failed bool
	err    error // nil if the engine answered with a status
	answer []byte

	deadline *abort.Deadline // deadline of call after decode has ended

	refs     atomic.Int32 // number of users that have not called drop
	retained atomic.Bool

	runAlone, abortBoth, cancelBoth func() // methods run and abort, and cancellation of both calls; allocated once
	buffers                         *concurrentBuffers
}

// concurrentBuffers is memory that the leg uses while it runs. A stream does not retain it.
type concurrentBuffers struct {
	keys                []blockhash.Seq
	answer              []byte
	handover            family.Handover // used by checkPeerInfo
	peerInfo            []byte          // used by checkPeerInfo
	reusableReservation *schedule.Reservation
}

func (r *Runner) newConcurrentPrefill() *concurrentPrefill {
	b := &concurrentPrefill{buffers: new(concurrentBuffers), deadline: new(abort.Deadline)}
	r.answerDeadlines.Add(b.deadline)
	b.runAlone, b.abortBoth = b.run, b.abort
	b.cancelBoth = func() { b.call.Cancel(); b.decode.Cancel() }
	return b
}

// retain keeps b out of the pool, because a third user may keep it.
func (b *concurrentPrefill) retain() { b.retained.Store(true) }

// HalfClose implements abort.PrefillLeg.
func (b *concurrentPrefill) HalfClose() {
	b.retain()
	b.call.HalfClose()
}

// Wait implements abort.PrefillLeg.
func (b *concurrentPrefill) Wait() { b.wait() }

// drop says that one of b's two users no longer uses it.
func (b *concurrentPrefill) drop() {
	if b.refs.Add(-1) > 0 {
		return
	}
	b.deadline.Stop()
	b.answerBytes.Release()
	if b.retained.Load() {
		b.buffers, b.fieldBytes, b.fields, b.keys, b.answer = nil, nil, nil, nil, nil
		return
	}
	r := b.settings.r
	b.legRecord, b.family, b.peerInfo, b.requestID, b.keys = legRecord{}, nil, "", "", nil
	b.refusedIDs = nil
	b.failed, b.err, b.answer = false, nil, nil
	b.buffers.handover = family.Handover{}
	if cap(b.buffers.answer) > maxAnswer || cap(b.buffers.keys) > maxAnswer/8 {
		b.buffers = new(concurrentBuffers) // do not pool the memory of a huge prompt
	}
	r.concurrentPrefills.Put(b)
}

// wait returns after the leg has ended.
func (b *concurrentPrefill) wait() { b.done.Wait() }

// Values of handoverState. The first of two events decides: decode generates a token, for which it
// needs all of the KV, or prefill fails. The later event has no effect: a prefill that fails
// afterwards does not cancel the stream, and the client does not receive the first bytes of a
// decode whose prefill has failed.
const (
	handoverPending int32 = iota
	handoverDone
	handoverFailed
)

// completeHandover records that decode has generated a token. It returns false if prefill failed
// before; the decode leg is then cancelled.
func (b *concurrentPrefill) completeHandover() bool {
	return b == nil || b.handoverState.CompareAndSwap(handoverPending, handoverDone) || b.handoverState.Load() == handoverDone
}

// startConcurrentPrefill sends the leg that the Family wrote. It returns nil if the memory budget
// has no room for the copy of the leg's body, which must outlive the request.
func (q *request) startConcurrentPrefill(choice *schedule.Choice) *concurrentPrefill {
	rank := choice.Rank
	b := q.r.concurrentPrefills.Get()
	if !q.detachLeg(&b.detachedLeg) {
		return nil
	}
	q.startLeg(&b.legRecord, schedule.PrefillLeg, choice)
	b.copyFields(q.legHeaders(&b.legRecord))
	b.family, b.peerInfo, b.requestID, b.tokens = q.plan.Family, q.handover.PeerInfo, q.req.RequestID, q.prompt.Count
	b.refusedIDs = q.refusedIDs
	b.buffers.reusableReservation = q.reservations.replace(choice.Reservation, b.buffers.reusableReservation)
	b.call.Reset()
	b.decode.Reset()
	b.req.Group, b.req.Tokens = q.settings.Fleet.Calls(rank), q.prompt.Count
	b.req.Deadline = b.began.Time().Add(q.settings.Timeouts.Prefill)
	if keys := q.approxKeys(rank); keys != nil {
		b.buffers.keys = append(b.buffers.keys[:0], keys...)
		b.keys = b.buffers.keys
	}
	b.cached.Store(-1)
	b.handoverState.Store(handoverPending)
	b.ended.Store(false)
	b.refs.Store(2)
	b.done.Add(1)
	go b.runAlone()
	return b
}

// detachedLeg is a leg that may outlive its client's request.
type detachedLeg struct {
	req         upstream.Request
	body        membudget.Lease // counts in limits.memory_budget
	answerBytes membudget.Count // memory of the response
	segment     [1][]byte
	fieldBytes  []byte // memory of the header lines
	fields      []upstream.Field
}

// detachLeg copies the leg that the Family wrote into p, all but the header lines (see copyFields).
// It returns false if the memory budget has no room for it.
func (q *request) detachLeg(p *detachedLeg) bool {
	size := 0
	for _, s := range q.legBody() {
		size += len(s)
	}
	var ok bool
	if p.body, ok = q.x.LeaseMemory(size); !ok {
		return false
	}
	p.answerBytes = q.x.Budget().Count()
	at := 0
	for _, s := range q.segments {
		at += copy(p.body.Bytes()[at:], s)
	}
	p.segment[0] = p.body.Bytes()
	p.req = upstream.Request{Method: "POST", Path: q.legPath(), Body: p.segment[:]}
	return true
}

// releaseBody returns the body's memory to the budget.
func (p *detachedLeg) releaseBody() {
	p.body.Release()
	p.segment[0], p.req = nil, upstream.Request{}
}

// copyFields copies src as the leg's header lines. The next call overwrites them.
func (p *detachedLeg) copyFields(src []upstream.Field) {
	size := 0
	for i := range src {
		size += len(src[i].Name) + len(src[i].Value)
	}
	p.fieldBytes, p.fields = slices.Grow(p.fieldBytes[:0], size), slices.Grow(p.fields[:0], len(src))
	for i := range src {
		p.fieldBytes = append(append(p.fieldBytes, src[i].Name...), src[i].Value...)
	}
	all := unsafeString(p.fieldBytes)
	for i := range src {
		n, v := len(src[i].Name), len(src[i].Value)
		p.fields = append(p.fields, upstream.Field{Name: all[:n], Value: all[n : n+v]})
		all = all[n+v:]
	}
	p.req.Fields = p.fields
}

func (b *concurrentPrefill) run() {
	defer b.drop()
	opt := b.settings
	resp, err := opt.Fleet.Endpoint(b.rank).Do(&b.req, &b.call)
	if err == nil {
		b.status = int16(resp.Status)
		b.answer, err = resp.ReadAllBudgeted(b.buffers.answer[:0], maxPrefillAnswer, &b.answerBytes)
		b.buffers.answer = b.answer
		resp.Release()
	}
	b.releaseBody()
	outcome := "ok"
	switch {
	case err == nil:
		opt.Fleet.ReportStatus(b.rank, int(b.status))
		outcome = statusClass(int(b.status))
		if b.failed = b.status != 200; !b.failed {
			opt.confirmIDRefusal(b.refusedIDs)
			cached := relay.UsageOf(b.answer).Cached
			b.cached.Store(int64(cached))
			// The scheduler learns the rank's prefill rate from this time. If prefill answers after
			// the transfer, the rate includes the transfer, which such a worker needs for every
			// prompt.
			b.reservation.PrefillDone()
			b.reservation.Report(b.requestID, cached, 0)
			b.settings.r.learnCached(b.rank, b.keys, b.tokens, int(b.predicted), cached, b.elapsed())
			b.checkPeerInfo()
		}
	case b.call.Cancelled():
		outcome = relay.Cancelled.String()
	default:
		b.failed, b.err, b.status = true, err, 0
		f := classify(err)
		outcome = string(f.reason)
		if f.engineFault {
			opt.Fleet.ReportFailure(b.rank, err)
		}
	}
	b.end(outcome)
	b.ended.Store(true)
	b.done.Done()
	if b.failed && b.handoverState.CompareAndSwap(handoverPending, handoverFailed) {
		b.decode.Cancel() // it would wait for blocks that never arrive
	}
}

// errStalePeerInfo reports that the decode leg named a prefill engine that has since restarted.
var errStalePeerInfo = errors.New("the prefill engine has restarted and is not the one that the decode request names")

// checkPeerInfo checks with prefill's response that the decode leg named the right engine. If that
// engine has restarted, no engine answers under the old id, and decode would wait for a long time.
func (b *concurrentPrefill) checkPeerInfo() {
	learner, ok := b.family.(family.PeerInfoLearner)
	if !ok {
		return
	}
	p := &b.buffers.handover
	*p = family.Handover{Prefill: b.rank}
	var err error
	if p.Handle, err = b.family.Handle(p, b.answer); err != nil {
		b.failed, b.err = true, err
		return
	}
	b.settings.r.reportEngineID(p, b.began.Time())
	b.buffers.peerInfo = learner.LearnPeerInfo(b.buffers.peerInfo[:0], p)
	if text := b.buffers.peerInfo; string(text) != b.peerInfo {
		b.settings.r.peerInfos.store(b.rank, text)
		b.failed, b.err = true, errStalePeerInfo
	}
}

// cachedTokens returns the number of tokens that prefill found cached; -1 if the engine has not
// reported it, or not yet. Decode's count is not a substitute: it is of decode's own cache, or includes
// the blocks that it received.
func (b *concurrentPrefill) cachedTokens() int { return int(b.cached.Load()) }

// awaitPrefillAnswer waits for prefill's response if it becomes a part of the client's response
// (AnswerMerger). The caller passes its error to handleConcurrentFailure. A disconnect of the
// client ends the leg and so the wait.
func (q *request) awaitPrefillAnswer() error {
	b := q.concurrent
	if b == nil {
		return nil
	}
	if j, ok := q.plan.Family.(family.AnswerMerger); !ok || !j.MergesAnswers(&q.handover) {
		return nil
	}
	b.wait()
	if b.failed || b.call.Cancelled() {
		return upstream.ErrCancelled
	}
	if b.answer != nil {
		q.handover.Answer, b.answer = b.answer, nil // the stream keeps b but needs no second copy of the response
	}
	return nil
}

// leasePrefillAnswer copies prefill's response into memory that lives as long as the stream and
// counts in limits.memory_budget. It does so if every event repeats a part of the response
// (AnswerMerger). It returns false if the budget has no room.
func (q *request) leasePrefillAnswer(resp *upstream.Response) (ok bool) {
	if _, merges := q.answerRewriter().(family.AnswerMerger); !merges || resp.Status != 200 || !isEventStream(resp) {
		return true
	}
	q.answerLease = new(membudget.Lease)
	if *q.answerLease, ok = q.x.LeaseMemory(len(q.handover.Answer)); ok {
		copy(q.answerLease.Bytes(), q.handover.Answer)
		q.handover.Answer = q.answerLease.Bytes()
	}
	return ok
}

func (q *request) refuseForMemory() {
	q.refuse(front.BudgetExhausted, "the memory for request bodies (limits.memory_budget) is spent; try again", time.Second)
}

// hasFailed reports whether the leg has failed so far.
func (b *concurrentPrefill) hasFailed() bool {
	if b == nil {
		return false
	}
	return b.ended.Load() && b.failed
}

// abort implements abort.CancelPrefillFirst. When the router half-closes prefill's call, the blocks may
// be ready, and the engine keeps them for minutes if no decode asks for them. A decode engine that
// has admitted its leg tells prefill to free them when the leg is cancelled. abort does not block.
// It starts a goroutine that ends with the prefill leg, or within a second if the engine ignores
// the half-close.
func (b *concurrentPrefill) abort() {
	b.retain()
	b.call.HalfClose()
	go func() {
		b.wait()
		b.decode.Cancel()
	}()
}

// prefillAnswerGrace bounds how long a concurrent prefill leg runs after its decode leg has ended
// well. Prefill has finished its work by then and answers soon. Without the bound an engine that
// never answers would occupy the leg's reservation, its slot of max_requests and its body until
// timeouts.prefill.
const prefillAnswerGrace = 3 * time.Second

// cancelSoon bounds the rest of the leg by prefillAnswerGrace. The caller must not have dropped b.
func (b *concurrentPrefill) cancelSoon() {
	if b.ended.Load() {
		return
	}
	b.deadline.Start(&b.call, time.Now().Add(prefillAnswerGrace))
	b.settings.r.answerDeadlines.Wake()
}

// prefillFailureGrace is how long the router waits for a prefill leg to end by itself after its
// decode leg has failed. The death of a prefill engine fails both legs, in either order.
const prefillFailureGrace = 50 * time.Millisecond

// endConcurrentPrefill cancels the prefill leg and waits for its end. If its blocks can be freed
// (releaseKVDetached), it half-closes the call so that the router still reads a pending response.
// awaitFailure says that decode may have failed because prefill did.
func (q *request) endConcurrentPrefill(awaitFailure bool) {
	if b := q.concurrent; awaitFailure && !b.call.Cancelled() {
		for end := time.Now().Add(prefillFailureGrace); !b.ended.Load() && time.Now().Before(end); {
			time.Sleep(prefillFailureGrace / 20)
		}
	}
	if q.plan.Traits.Refetchable {
		q.concurrent.call.HalfClose()
	} else {
		q.concurrent.call.Cancel()
	}
	q.concurrent.wait()
}

// runConcurrent runs a Concurrent pair: prefill on its own goroutine, decode on the caller's.
func (q *request) runConcurrent(prefill schedule.Choice) legEnd {
	choice, ok := q.acquireDecode(schedule.DecodeLeg)
	if !ok {
		if waited, answered := q.awaitDecodeLimits(&prefill); waited {
			return legWaited
		} else if answered {
			return legAnswered
		}
	}
	if !ok && q.awaitCandidate(schedule.DecodeLeg) {
		choice, ok = q.acquireDecode(schedule.DecodeLeg)
	}
	if !ok {
		prefill.Reservation.Release()
		q.refuseNoRank(schedule.DecodeLeg)
		return legAnswered
	}
	choice.Reservation.SetNoPull()
	q.handover.Decode = choice.Rank
	q.legRequest.Reset()
	q.plan.Family.Prefill(&q.legRequest, &q.handover)
	q.watchTransfer(time.Now())
	b := q.startConcurrentPrefill(&prefill)
	if b == nil {
		prefill.Reservation.Release()
		choice.Reservation.Release()
		q.refuseForMemory()
		return legAnswered
	}
	if q.prefillLeg.transfer != nil {
		b.retain() // the watcher may cancel decode's call until the watch is closed
	}
	q.concurrent = b
	end := q.runConcurrentDecode(&choice, &b.decode)
	q.concurrent, q.decodeLeg.call = nil, nil
	b.drop() // not deferred: after a panic the front may still use its cancel functions
	return end
}

// runConcurrentDecode runs the decode leg of runConcurrent.
func (q *request) runConcurrentDecode(choice *schedule.Choice, call *upstream.Call) legEnd {
	l := q.startDecode(schedule.DecodeLeg, choice, call)
	resp, err := q.callDecode(l)
	if err != nil {
		return q.handleConcurrentFailure(l, err)
	}
	return q.handleAnswer(l, resp)
}

// handleConcurrentFailure ends a decode leg of a Concurrent pair that failed or was cancelled:
// because the client disconnected, prefill failed, or the hand-over is lost.
func (q *request) handleConcurrentFailure(l *decodeLeg, err error) legEnd {
	b, elapsed := q.concurrent, l.elapsed()
	clientGone := b.call.Cancelled() // up to here only a disconnect cancels it
	q.endConcurrentPrefill(!classify(err).unsent)
	l.release()
	rank := l.rank
	switch {
	case clientGone: // any other failure is a consequence of the disconnect
		l.completeAfter(q.abortReason(), elapsed)
		q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
		return legAnswered
	case b.failed:
		l.completeAfter(relay.Cancelled.String(), elapsed)
		return q.handlePrefillFailure(b)
	case !q.acceptAnswer():
		q.r.peerInfos.remove(b.rank)
		return q.endLostHandover(l)
	case errors.Is(err, errTransfer):
		l.completeAfter(statusClass(500), elapsed)
		return q.handleTransferFailure(b, rank)
	}
	q.r.peerInfos.remove(b.rank)
	f := q.recordFailure(rank, "decode", err)
	l.completeAfter(string(f.reason), elapsed)
	q.releaseKVDetached(rank)
	return q.retryOrRefuse(f, l, err, f.reason != front.UpstreamTimeout || f.unsent || !q.decodeTimedOut(b.began.Time()))
}

// errTransfer reports that the KV did not arrive at a healthy decode engine.
var errTransfer = errors.New("the transfer of the KV failed")

// handleTransferFailure runs a Concurrent pair again after its decode engine has reported that the
// KV did not arrive. The same decode engine may be chosen again.
func (q *request) handleTransferFailure(b *concurrentPrefill, decode *worker.Rank) legEnd {
	q.r.peerInfos.remove(b.rank)
	q.unsent = false
	q.exclude(b.rank, excludedDown)
	q.noteFallback("transfer_failed", "of the KV from "+b.rank.ID.String()+", as "+decode.ID.String()+" says")
	return q.retryHandover(b.rank, front.UpstreamFailed, errTransfer)
}

// handlePrefillFailure decides what follows a failed prefill leg of a Concurrent pair.
func (q *request) handlePrefillFailure(b *concurrentPrefill) legEnd {
	if errors.Is(b.err, errStalePeerInfo) { // checkPeerInfo has already stored the right one
		q.noteFallback("peer_info_stale", b.rank.ID.String()+": "+b.err.Error())
		q.unsent = false
		q.awaitReturn(b.rank)
		return q.retryHandover(b.rank, front.UpstreamFailed, b.err)
	}
	if errors.Is(b.err, upstream.ErrMemory) { // another engine's response would not fit either
		q.refuseForMemory()
		return legAnswered
	}
	if q.handover.ByIDs && b.err == nil && b.status/100 == 4 && !family.RetryableStatus(int(b.status)) {
		q.retryAsText(b.rank)
		return legRetry
	}
	q.r.peerInfos.remove(b.rank)
	if errors.Is(b.err, family.ErrIncompleteHandle) {
		q.exclude(b.rank, excludedError)
		q.noteFallback("incomplete_handle", b.rank.ID.String()+": "+b.err.Error())
		q.unsent = false
		return q.retryHandover(b.rank, front.UpstreamFailed, b.err)
	}
	if b.err == nil && !family.RetryableStatus(int(b.status)) {
		// Decode would refuse the request too, so the client gets prefill's error response.
		q.endExplain(schedule.Outcome{
			Status: int(b.status), Reason: "engine_" + statusClass(int(b.status)), CachedTokens: -1, Total: time.Since(q.req.Received),
		})
		q.x.SetHeader("X-Sluice-Prefill-Worker", b.rank.ID.Worker)
		redact.InPlace(b.answer, int(b.status))
		q.x.ReplyJSON(int(b.status), b.answer)
		return legAnswered
	}
	reason, err := front.UpstreamFailed, b.err
	if err != nil {
		f := classify(err)
		reason = f.reason
		q.applyFailure(b.rank, "prefill", f, err)
	} else {
		err = fmt.Errorf("it answered %d", b.status)
		died := family.EngineDied(int(b.status), b.answer)
		q.applyFailure(b.rank, "prefill", failure{suspect: died, down: died}, err)
	}
	if q.suspects >= maxSuspects {
		q.refuse(reason, fmt.Sprintf("%d engines failed while they served this request; it is not sent to a third: %s", q.suspects, upstream.ClientMessage(err)), 0)
		return legAnswered
	}
	return q.retryHandover(b.rank, reason, err)
}

// retryHandover runs a Concurrent pair again after its prefill has failed, if the pool's retry
// budget allows it. Otherwise decode runs the whole request, or the request is refused.
func (q *request) retryHandover(rank *worker.Rank, reason front.Reason, err error) legEnd {
	switch {
	case q.withdrawRetry():
	case q.plan.Traits.NoDecodeOnly, !q.pd.DecodeOnlyFallback:
		q.refuse(reason, fmt.Sprintf("prefill on %s failed%s: %s", rank.ID, q.triesSuffix(schedule.PrefillLeg), upstream.ClientMessage(err)), time.Second)
		return legAnswered
	default:
		q.decodeOnly = true
	}
	return legRetry
}
