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
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// concurrentPrefill is the prefill leg of a Concurrent pair. It runs on a goroutine of its
// own and may outlive the request's scratch, so it holds copies: of its body,
// its header lines, and what is needed to close its books. Its end is bounded
// by the prefill time-out.
//
// When it fails before decode has made a token it cuts the decode leg; whoever reads
// that leg's end finds the reason here behind wait.
//
// Two have it, the request and the goroutine, and whoever is done with it last (drop)
// gives its memory to the next pair, unless somebody else may look at it yet: a stream, or
// what takes both legs down for a client that left (keep).
type concurrentPrefill struct {
	legRecord
	family    Family
	peerInfo  string // that decode was given
	requestID string
	call      upstream.Call
	decode    upstream.Call // the other leg's
	detachedLeg
	tokens int             // of the prompt
	keys   []blockhash.Seq // of the approximate index; nil where events tell

	cached        atomic.Int64 // as the engine reported, -1 not (yet)
	handoverState atomic.Int32 // whose word came first, see handoverPending

	done  sync.WaitGroup // over at the end; what follows is set before
	ended atomic.Bool    // it is
	// failed says that the leg ended badly by itself, not by a cut.
	failed bool
	err    error // nil with a status
	answer []byte

	refs     atomic.Int32 // who have not dropped it
	retained atomic.Bool

	runAlone, abortBoth, cutBoth func() // run, leave, and both Cuts; made once
	buffers                      *concurrentBuffers
}

// concurrentBuffers is what the leg needs while it runs: none of it stays with a stream.
type concurrentBuffers struct {
	keys             []blockhash.Seq
	answer           []byte
	handover         Handover // checkPeerInfo's
	peerInfo         []byte   // likewise
	spareReservation *schedule.Reservation
}

func newConcurrentPrefill() *concurrentPrefill {
	b := &concurrentPrefill{buffers: new(concurrentBuffers)}
	b.runAlone, b.abortBoth = b.run, b.abort
	b.cutBoth = func() { b.call.Cancel(); b.decode.Cancel() }
	return b
}

// retain leaves b to somebody beyond its two users, for good.
func (b *concurrentPrefill) retain() { b.retained.Store(true) }

// drop is called by each of the two when it is done with b.
func (b *concurrentPrefill) drop() {
	if b.refs.Add(-1) > 0 {
		return
	}
	b.answerBytes.Release()
	if b.retained.Load() {
		b.buffers, b.fieldBytes, b.fields, b.keys, b.answer = nil, nil, nil, nil, nil
		return
	}
	r := b.r
	b.legRecord, b.family, b.peerInfo, b.requestID, b.keys = legRecord{}, nil, "", "", nil
	b.failed, b.err, b.answer = false, nil, nil
	b.buffers.handover = Handover{}
	if cap(b.buffers.answer) > maxAnswer || cap(b.buffers.keys) > maxAnswer/8 {
		b.buffers = new(concurrentBuffers) // let the collector have what one huge prompt needed
	}
	r.concurrentPrefills.Put(b)
}

// wait returns when the leg has ended.
func (b *concurrentPrefill) wait() { b.done.Wait() }

// Who had the first word on the hand-over: decode, by making a token, for which it
// needs all the KV, or prefill, by failing. What comes second changes nothing: a
// prefill that fails afterwards does not cut the stream, and the first bytes of a
// decode whose prefill has failed do not go to the client.
const (
	handoverPending int32 = iota
	handoverDone
	handoverFailed
)

// completeHandover says that decode has made a token; false: prefill failed before, and the
// decode leg is cut.
func (b *concurrentPrefill) completeHandover() bool {
	return b == nil || b.handoverState.CompareAndSwap(handoverPending, handoverDone) || b.handoverState.Load() == handoverDone
}

// startConcurrentPrefill sends the leg that the Family wrote; nil when there is no memory for a
// copy of its body, which the leg may need longer than the client's request lives.
func (q *request) startConcurrentPrefill(choice *schedule.Choice) *concurrentPrefill {
	rank := choice.Rank
	b := q.r.concurrentPrefills.Get()
	if !q.detachLeg(&b.detachedLeg, rank) {
		return nil
	}
	q.legSent = true
	b.legRecord = q.startLeg(schedule.PrefillLeg, choice, nil).legRecord
	b.family, b.peerInfo, b.requestID, b.tokens = q.plan.Family, q.handover.PeerInfo, q.x.RequestID, q.prompt.Count
	b.buffers.spareReservation = q.reservations.replace(choice.Reservation, b.buffers.spareReservation)
	b.call.Reset()
	b.decode.Reset()
	b.req.Group, b.req.Tokens = q.settings.Fleet.Calls(rank), q.prompt.Count
	b.req.Deadline = b.began.time().Add(q.settings.Timeouts.Prefill)
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
	body        membudget.Lease // counted in limits.memory_budget
	answerBytes membudget.Count // its answer
	segment     [1][]byte
	fieldBytes  []byte // of lines
	fields      []upstream.Field
}

// detachLeg copies the leg that the Family wrote; false when there is no memory for it.
func (q *request) detachLeg(p *detachedLeg, rank *worker.Rank) bool {
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
	p.copyFields(q.legHeaders(rank))
	p.req = upstream.Request{Method: "POST", Path: q.legPath(), Fields: p.fields, Body: p.segment[:]}
	return true
}

// releaseBody gives the memory back.
func (p *detachedLeg) releaseBody() {
	p.body.Release()
	p.segment[0], p.req = nil, upstream.Request{}
}

// copyFields makes lines such a copy, which lasts until the next.
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
}

func (b *concurrentPrefill) run() {
	defer b.drop()
	opt := b.r.options()
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
			cached := relay.UsageOf(b.answer).Cached
			b.cached.Store(int64(cached))
			// So its rate is learned, of the hand-over's time too where prefill answers
			// after it: time that such a worker takes for each of its prompts.
			b.reservation.PrefillDone()
			b.reservation.Report(b.requestID, cached, 0)
			b.r.learnCached(b.rank, b.keys, b.tokens, int(b.predicted), cached, b.elapsed())
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
		b.decode.Cancel() // it would wait for blocks that never come
	}
}

// errStalePeerInfo: the fact that decode was given of prefill is not true any more.
var errStalePeerInfo = errors.New("prefill is another engine than decode was told")

// checkPeerInfo reads from prefill's answer whether decode was told the truth: an
// engine that has started anew is met by nobody, and decode would wait long.
func (b *concurrentPrefill) checkPeerInfo() {
	learner, ok := b.family.(PeerInfoLearner)
	if !ok {
		return
	}
	p := &b.buffers.handover
	*p = Handover{Prefill: b.rank}
	var err error
	if p.Handle, err = b.family.Handle(p, b.answer); err != nil {
		b.failed, b.err = true, err
		return
	}
	b.r.reportEngineID(p, b.began.time())
	b.buffers.peerInfo = learner.LearnPeerInfo(b.buffers.peerInfo[:0], p)
	if text := b.buffers.peerInfo; string(text) != b.peerInfo {
		b.r.peerInfos.store(b.rank, text)
		b.failed, b.err = true, errStalePeerInfo
	}
}

// cachedOr is how many tokens prefill found cached, other when that is not known.
func (b *concurrentPrefill) cachedOr(fallback int) int {
	if n := b.cached.Load(); n >= 0 {
		return int(n)
	}
	return fallback
}

// awaitPrefillAnswer waits for prefill's answer where the client is due a part of it (Joiner); an error:
// there is none, for handleConcurrentFailure to sort. Who leaves meanwhile ends the leg, and so the wait.
func (q *request) awaitPrefillAnswer() error {
	b := q.concurrent
	if b == nil {
		return nil
	}
	if j, ok := q.plan.Family.(AnswerMerger); !ok || !j.MergesAnswers(&q.handover) {
		return nil
	}
	b.wait()
	if b.failed || b.call.Cancelled() {
		return upstream.ErrCancelled
	}
	if b.answer != nil {
		q.handover.Answer, b.answer = b.answer, nil // the stream keeps b, and need not keep this too
	}
	return nil
}

// leasePrefillAnswer has prefill's answer, where every event of a stream repeats a part of it
// (Joiner), last as long as the stream, and counted in limits.memory_budget; false when there
// is no memory for it.
func (q *request) leasePrefillAnswer(resp *upstream.Response) (ok bool) {
	if _, merges := q.answerRewriter().(AnswerMerger); !merges || resp.Status != 200 || !isEventStream(resp) {
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

// hasFailed says whether the leg has ended badly by now.
func (b *concurrentPrefill) hasFailed() bool {
	if b == nil {
		return false
	}
	return b.ended.Load() && b.failed
}

// abort takes both legs down for a client that has left, when decode's head has come:
// prefill at once, decode when prefill has ended. Prefill may have its
// blocks ready by then, answered or not, and keeps them for minutes if no decode asks
// for them; an engine that has admitted decode tells it, on a cut, to let them go. It
// waits for nothing itself; what it starts ends with prefill's leg, within a second
// for an engine that does not mind the hang-up.
func (b *concurrentPrefill) abort() {
	b.retain()
	b.call.HalfClose()
	go func() {
		b.wait()
		b.decode.Cancel()
	}()
}

// prefillAnswerGrace is how long a concurrent prefill leg may go on when its decode leg has
// ended well. Prefill has done its work by then and answers in a moment. An engine that
// never does would otherwise keep the leg's reservation, its slot of max_requests and its
// body until timeouts.prefill.
const prefillAnswerGrace = 3 * time.Second

// cancelSoon bounds the rest of the leg by prefillAnswerGrace. Its caller holds b.
func (b *concurrentPrefill) cancelSoon() {
	if b.ended.Load() {
		return
	}
	b.retain()
	time.AfterFunc(prefillAnswerGrace, b.call.Cancel)
}

// prefillFailureGrace is how long a prefill leg may take to end by itself when its decode has
// failed: the death of a prefill engine fails both, and either may be seen first.
const prefillFailureGrace = 50 * time.Millisecond

// endConcurrentPrefill cuts the leg beside and waits for its end. An answer that is on its way
// is read where the blocks it speaks of can be freed (releaseKVDetached). settles says that decode's
// failure may be the consequence of prefill's.
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

// runConcurrent runs a Concurrent pair: prefill beside, decode here.
func (q *request) runConcurrent(prefill schedule.Choice) legEnd {
	choice, ok := q.acquireDecode(schedule.DecodeLeg)
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
	q.legRequest.reset()
	q.plan.Family.Prefill(&q.legRequest, &q.handover)
	q.watchTransfer(time.Now())
	b := q.startConcurrentPrefill(&prefill)
	if b == nil {
		prefill.Reservation.Release()
		choice.Reservation.Release()
		q.refuseForMemory()
		return legAnswered
	}
	if q.transfer != nil {
		b.retain() // it may cut decode's call until it is closed
	}
	q.concurrent = b
	end := q.runConcurrentDecode(&choice, &b.decode)
	q.concurrent = nil
	b.drop() // not behind a panic, where its cut may be armed yet
	return end
}

// runConcurrentDecode is decode's part of it.
func (q *request) runConcurrentDecode(choice *schedule.Choice, call *upstream.Call) legEnd {
	l := q.startLeg(schedule.DecodeLeg, choice, call)
	resp, err := q.callDecode(&l)
	if err != nil {
		return q.handleConcurrentFailure(&l, err)
	}
	return q.handleAnswer(&l, resp)
}

// handleConcurrentFailure takes in that the decode leg of a Concurrent pair failed, or was
// cut: by the client's leaving, because prefill failed, or because the hand-over is
// lost.
func (q *request) handleConcurrentFailure(l *leg, err error) legEnd {
	b, elapsed := q.concurrent, l.elapsed()
	clientGone := b.call.Cancelled() // by its client's leaving: nobody else has cut it so far
	q.endConcurrentPrefill(!classify(err).unsent)
	l.release()
	rank := l.rank
	switch {
	case clientGone: // whatever else went wrong is of our making, and nobody waits for more
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
	return q.retryOrRefuse(f, l, err, f.reason != front.UpstreamTimeout || f.unsent || !q.decodeTimedOut(b.began.time()))
}

// errTransfer: a decode engine says that the KV did not come. It is well itself.
var errTransfer = errors.New("the transfer of the KV failed")

// transferError is in the answer of an SGLang decode engine (500) whose KV did not come,
// because prefill's engine is gone or the network between them.
var transferError = []byte("KVTransferError(")

// handleTransferFailure takes in that the KV of a Concurrent pair did not come to a decode engine,
// which says so. The pair is run again; that engine may decode it.
func (q *request) handleTransferFailure(b *concurrentPrefill, decode *worker.Rank) legEnd {
	q.r.peerInfos.remove(b.rank)
	q.unsent = false
	q.exclude(b.rank, excludedDown)
	q.noteFallback("transfer_failed", "of the KV from "+b.rank.ID.String()+", as "+decode.ID.String()+" says")
	return q.retryHandover(b.rank, front.UpstreamFailed, errTransfer)
}

// handlePrefillFailure takes in that the prefill leg of a Concurrent pair failed.
func (q *request) handlePrefillFailure(b *concurrentPrefill) legEnd {
	if errors.Is(b.err, errStalePeerInfo) { // the true one is known by now
		q.noteFallback("stale_fact", b.rank.ID.String()+": "+b.err.Error())
		q.unsent = false
		q.awaitReturn(b.rank)
		return q.retryHandover(b.rank, front.UpstreamFailed, b.err)
	}
	if errors.Is(b.err, upstream.ErrMemory) { // another engine's answer would find none either
		q.refuseForMemory()
		return legAnswered
	}
	q.r.peerInfos.remove(b.rank)
	if errors.Is(b.err, ErrIncompleteHandle) {
		q.exclude(b.rank, excludedError)
		q.noteFallback("incomplete_handle", b.rank.ID.String()+": "+b.err.Error())
		q.unsent = false
		return q.retryHandover(b.rank, front.UpstreamFailed, b.err)
	}
	if b.err == nil && !isRetryableStatus(int(b.status)) {
		// What prefill refuses decode would refuse too: the client's to see.
		q.endExplain(schedule.Outcome{
			Status: int(b.status), Reason: "engine_" + statusClass(int(b.status)), CachedTokens: -1, Total: time.Since(q.x.Received),
		})
		q.x.SetHeader("X-Sluice-Prefill-Worker", b.rank.ID.Worker)
		relay.RedactInPlace(b.answer, int(b.status))
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
		died := engineDied(int(b.status), b.answer)
		q.applyFailure(b.rank, "prefill", failure{suspect: died, down: died}, err)
	}
	if q.suspects >= maxSuspects {
		q.refuse(reason, fmt.Sprintf("%d engines failed while they held this request; it is not tried on a third: %s", q.suspects, upstream.ClientMessage(err)), 0)
		return legAnswered
	}
	return q.retryHandover(b.rank, reason, err) // another prefill worker, or what there is without one
}

// retryHandover lets a Concurrent pair whose prefill went wrong run again, if the
// pool's budget has it; else decode does it all, or the request is refused.
func (q *request) retryHandover(rank *worker.Rank, reason front.Reason, err error) legEnd {
	switch {
	case q.withdrawRetry():
	case q.plan.Traits.NoPlainDecode, !q.pd.PlainDecode:
		q.refuse(reason, fmt.Sprintf("prefill on %s failed%s: %s", rank.ID, q.triesSuffix(schedule.PrefillLeg), upstream.ClientMessage(err)), time.Second)
		return legAnswered
	default:
		q.plainDecode = true
	}
	return legRetry
}
