package disagg

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

// beside is the prefill leg of a Concurrent pair. It runs on a goroutine of its
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
type beside struct {
	r           *Runner
	family      Family
	fact        string // that decode was given
	requestID   string
	rank        *worker.Rank
	reservation *schedule.Reservation
	call        upstream.Call
	decode      upstream.Call // the other leg's
	parted
	began     time.Time
	tokens    int // of the prompt
	predicted int
	keys      []blockhash.Seq // of the approximate index; nil where events tell

	cached atomic.Int64 // as the engine reported, -1 not (yet)
	say    atomic.Int32 // whose word came first, see besideOpen

	done sync.WaitGroup // over at the end; what follows is set before
	over atomic.Bool    // it is
	// failed says that the leg ended badly by itself, not by a cut.
	failed bool
	status int   // 0: none came
	err    error // nil with a status
	answer []byte

	users atomic.Int32 // who have not dropped it
	kept  atomic.Bool

	start, left, cut func() // run, leave, and both Cuts; made once
	room             *besideRoom
}

// besideRoom is what the leg needs while it runs: none of it stays with a stream.
type besideRoom struct {
	keys   []blockhash.Seq
	answer []byte
	told   Pair   // checkFact's
	fact   []byte // likewise
	spare  *schedule.Reservation
}

func newBeside() *beside {
	b := &beside{room: new(besideRoom)}
	b.start, b.left = b.run, b.leave
	b.cut = func() { b.call.Cut(); b.decode.Cut() }
	return b
}

// keep leaves b to somebody beyond its two users, for good.
func (b *beside) keep() { b.kept.Store(true) }

// drop is called by each of the two when it is done with b.
func (b *beside) drop() {
	if b.users.Add(-1) > 0 {
		return
	}
	b.derived.Release()
	if b.kept.Load() {
		b.room, b.text, b.lines, b.keys, b.answer = nil, nil, nil, nil, nil
		return
	}
	r := b.r
	b.r, b.family, b.fact, b.requestID, b.rank, b.reservation, b.keys = nil, nil, "", "", nil, nil, nil
	b.failed, b.status, b.err, b.answer = false, 0, nil, nil
	b.room.told = Pair{}
	if cap(b.room.answer) > maxAnswer || cap(b.room.keys) > maxAnswer/8 {
		b.room = new(besideRoom) // let the collector have what one huge prompt needed
	}
	r.besides.Put(b)
}

// wait returns when the leg has ended.
func (b *beside) wait() { b.done.Wait() }

// Who had the first word on the hand-over: decode, by making a token, for which it
// needs all the KV, or prefill, by failing. What comes second changes nothing: a
// prefill that fails afterwards does not cut the stream, and the first bytes of a
// decode whose prefill has failed do not go to the client.
const (
	besideOpen int32 = iota
	besideArrived
	besideBroke
)

// arrived says that decode has made a token; false: prefill failed before, and the
// decode leg is cut.
func (b *beside) arrived() bool {
	return b == nil || b.say.CompareAndSwap(besideOpen, besideArrived) || b.say.Load() == besideArrived
}

// startBeside sends the leg that the Family wrote; nil when there is no memory for a
// copy of its body, which the leg may need longer than the client's request lives.
func (q *request) startBeside(choice *schedule.Choice) *beside {
	rank := choice.Rank
	b := q.r.besides.Get()
	if !q.part(&b.parted, rank) {
		return nil
	}
	q.engaged = true
	b.r, b.family, b.fact, b.requestID, b.rank, b.began = q.r, q.plan.Family, q.pair.Fact, q.x.RequestID, rank, time.Now()
	b.tokens, b.predicted = q.prompt.Count, choice.CachedTokens
	b.reservation, b.room.spare = choice.Reservation, q.rooms.handOver(choice.Reservation, b.room.spare)
	b.call.Renew()
	b.decode.Renew()
	b.req.Group, b.req.Tokens = q.r.opt().Fleet.Calls(rank), q.prompt.Count
	b.req.Deadline = b.began.Add(q.r.opt().Timeouts.Prefill)
	if keys := q.guessKeys(rank); keys != nil {
		b.room.keys = append(b.room.keys[:0], keys...)
		b.keys = b.room.keys
	}
	b.cached.Store(-1)
	b.say.Store(besideOpen)
	b.over.Store(false)
	b.users.Store(2)
	b.done.Add(1)
	q.legStarted(schedule.PrefillLeg, rank)
	go b.start()
	return b
}

// parted is a leg that may outlive its client's request.
type parted struct {
	req     upstream.Request
	body    membudget.Lease // counted in limits.body_budget
	derived membudget.Count // its answer
	segment [1][]byte
	text    []byte // of lines
	lines   []upstream.Field
}

// part copies the leg that the Family wrote; false when there is no memory for it.
func (q *request) part(p *parted, rank *worker.Rank) bool {
	size := 0
	for _, s := range q.body() {
		size += len(s)
	}
	var ok bool
	if p.body, ok = q.x.Lend(size); !ok {
		return false
	}
	p.derived = q.x.Budget().Count()
	at := 0
	for _, s := range q.segments {
		at += copy(p.body.Bytes()[at:], s)
	}
	p.segment[0] = p.body.Bytes()
	p.copyFields(q.headers(rank))
	p.req = upstream.Request{Method: "POST", Path: q.path(), Fields: p.lines, Body: p.segment[:]}
	return true
}

// forget gives the memory back.
func (p *parted) forget() {
	p.body.Release()
	p.segment[0], p.req = nil, upstream.Request{}
}

// copyFields makes lines such a copy, which lasts until the next.
func (p *parted) copyFields(fields []upstream.Field) {
	size := 0
	for i := range fields {
		size += len(fields[i].Name) + len(fields[i].Value)
	}
	p.text, p.lines = slices.Grow(p.text[:0], size), slices.Grow(p.lines[:0], len(fields))
	for i := range fields {
		p.text = append(append(p.text, fields[i].Name...), fields[i].Value...)
	}
	all := borrow(p.text)
	for i := range fields {
		n, v := len(fields[i].Name), len(fields[i].Value)
		p.lines = append(p.lines, upstream.Field{Name: all[:n], Value: all[n : n+v]})
		all = all[n+v:]
	}
}

func (b *beside) run() {
	defer b.drop()
	opt := b.r.opt()
	resp, err := opt.Fleet.Endpoint(b.rank).Do(&b.req, &b.call)
	if err == nil {
		b.status = resp.Status
		b.answer, err = resp.ReadCounted(b.room.answer[:0], maxPrefillAnswer, &b.derived)
		b.room.answer = b.answer
		resp.Release()
	}
	b.forget()
	outcome := "ok"
	switch {
	case err == nil:
		opt.Fleet.Answered(b.rank, b.status)
		outcome = statusClass(b.status)
		if b.failed = b.status != 200; !b.failed {
			found := relay.UsageOf(b.answer).Cached
			b.cached.Store(int64(found))
			// So its rate is learned, of the hand-over's time too where prefill answers
			// after it: time that such a worker takes for each of its prompts.
			b.reservation.PrefillDone()
			b.reservation.Report(b.requestID, found, 0)
			b.r.learn(b.rank, b.keys, b.tokens, b.predicted, found, time.Since(b.began))
			b.checkFact()
		}
	case b.call.WasCut():
		outcome = relay.Cut.String()
	default:
		b.failed, b.err, b.status = true, err, 0
		f := sort(err)
		outcome = string(f.reason)
		if f.ofEngine {
			opt.Fleet.Failed(b.rank, err)
		}
	}
	b.reservation.Release()
	opt.Observer.LegEnded(schedule.PrefillLeg, b.rank.ID, outcome, time.Since(b.began))
	b.over.Store(true)
	b.done.Done()
	if b.failed && b.say.CompareAndSwap(besideOpen, besideBroke) {
		b.decode.Cut() // it would wait for blocks that never come
	}
}

// errStale: the fact that decode was given of prefill is not true any more.
var errStale = errors.New("prefill is another engine than decode was told")

// checkFact reads from prefill's answer whether decode was told the truth: an
// engine that has started anew is met by nobody, and decode would wait long.
func (b *beside) checkFact() {
	learner, ok := b.family.(Learner)
	if !ok {
		return
	}
	p := &b.room.told
	*p = Pair{Prefill: b.rank}
	var err error
	if p.Handle, err = b.family.Handle(p, b.answer); err != nil {
		b.failed, b.err = true, err
		return
	}
	b.r.identified(p, b.began)
	b.room.fact = learner.Learn(b.room.fact[:0], p)
	if text := b.room.fact; string(text) != b.fact {
		b.r.facts.learn(b.rank, text)
		b.failed, b.err = true, errStale
	}
}

// found is how many tokens prefill found cached, other when that is not known.
func (b *beside) found(other int) int {
	if n := b.cached.Load(); n >= 0 {
		return int(n)
	}
	return other
}

// join waits for prefill's answer where the client is due a part of it (Joiner); an error:
// there is none, for pairBroke to sort. Who leaves meanwhile ends the leg, and so the wait.
func (q *request) join() error {
	b := q.beside
	if b == nil {
		return nil
	}
	if j, ok := q.plan.Family.(Joiner); !ok || !j.Joins(&q.pair) {
		return nil
	}
	b.wait()
	if b.failed || b.call.WasCut() {
		return upstream.ErrCut
	}
	if b.answer != nil {
		q.pair.Answer, b.answer = b.answer, nil // the stream keeps b, and need not keep this too
	}
	return nil
}

// keepAnswer has prefill's answer, where every event of a stream repeats a part of it
// (Joiner), last as long as the stream, and counted in limits.body_budget; false when there
// is no memory for it.
func (q *request) keepAnswer(resp *upstream.Response) (ok bool) {
	if _, joins := q.answerer().(Joiner); !joins || resp.Status != 200 || !isEvents(resp) {
		return true
	}
	q.lent = new(membudget.Lease)
	if *q.lent, ok = q.x.Lend(len(q.pair.Answer)); ok {
		copy(q.lent.Bytes(), q.pair.Answer)
		q.pair.Answer = q.lent.Bytes()
	}
	return ok
}

func (q *request) refuseForMemory() {
	q.refuse(front.BudgetSpent, "the memory for request bodies (limits.body_budget) is spent; try again", time.Second)
}

// broke says whether the leg has ended badly by now.
func (b *beside) broke() bool {
	if b == nil {
		return false
	}
	return b.over.Load() && b.failed
}

// leave takes both legs down for a client that has left, when decode's head has come:
// prefill at once, decode when prefill has ended. Prefill may have its
// blocks ready by then, answered or not, and keeps them for minutes if no decode asks
// for them; an engine that has admitted decode tells it, on a cut, to let them go. It
// waits for nothing itself; what it starts ends with prefill's leg, within a second
// for an engine that does not mind the hang-up.
func (b *beside) leave() {
	b.keep()
	b.call.HangUp()
	go func() {
		b.wait()
		b.decode.Cut()
	}()
}

// besideSettles is how long a prefill leg may take to end by itself when its decode has
// failed: the death of a prefill engine fails both, and either may be seen first.
const besideSettles = 50 * time.Millisecond

// endBeside cuts the leg beside and waits for its end. An answer that is on its way
// is read where the blocks it speaks of can be freed (handBack). settles says that decode's
// failure may be the consequence of prefill's.
func (q *request) endBeside(settles bool) {
	if b := q.beside; settles && !b.call.WasCut() {
		for end := time.Now().Add(besideSettles); !b.over.Load() && time.Now().Before(end); {
			time.Sleep(besideSettles / 20)
		}
	}
	if q.plan.Traits.Keyed {
		q.beside.call.HangUp()
	} else {
		q.beside.call.Cut()
	}
	q.beside.wait()
}

// both runs a Concurrent pair: prefill beside, decode here.
func (q *request) both(prefill schedule.Choice) legEnd {
	choice, ok := q.takeDecode(schedule.DecodeLeg)
	if !ok && q.anotherRank(schedule.DecodeLeg) {
		choice, ok = q.takeDecode(schedule.DecodeLeg)
	}
	if !ok {
		prefill.Reservation.Release()
		q.noneLeft(schedule.DecodeLeg)
		return legAnswered
	}
	choice.Reservation.PullsNothing()
	q.pair.Decode = choice.Rank
	q.leg.reset()
	q.plan.Family.Prefill(&q.leg, &q.pair)
	q.watch(time.Now())
	b := q.startBeside(&prefill)
	if b == nil {
		prefill.Reservation.Release()
		choice.Reservation.Release()
		q.refuseForMemory()
		return legAnswered
	}
	if q.wait != nil {
		b.keep() // it may cut decode's call until it is closed
	}
	call := &b.decode
	q.beside = b
	end := q.besideDecode(&choice, call)
	q.beside = nil
	b.drop() // not behind a panic, where its cut may be armed yet
	return end
}

// besideDecode is decode's part of it.
func (q *request) besideDecode(choice *schedule.Choice, call *upstream.Call) legEnd {
	q.legStarted(schedule.DecodeLeg, choice.Rank)
	began := time.Now()
	resp, err := q.callDecode(choice.Rank, call, began)
	if err != nil {
		return q.pairBroke(choice, call, err, time.Since(began))
	}
	return q.answered(schedule.DecodeLeg, choice, call, resp, began)
}

// pairBroke takes in that the decode leg of a Concurrent pair failed, or was
// cut: by the client's leaving, because prefill failed, or because the hand-over is
// lost.
func (q *request) pairBroke(choice *schedule.Choice, call *upstream.Call, err error, took time.Duration) legEnd {
	opt, b := q.r.opt(), q.beside
	left := b.call.WasCut() // by its client's leaving: nobody else has cut it so far
	q.endBeside(!sort(err).unsent)
	choice.Reservation.Release()
	rank := choice.Rank
	switch {
	case left: // whatever else went wrong is of our making, and nobody waits for more
		opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, q.whyGone(), took)
		q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
		return legAnswered
	case b.failed:
		opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, relay.Cut.String(), took)
		return q.prefillBroke(b)
	case !q.settle():
		q.r.facts.forget(b.rank)
		return q.lostOn(rank, took)
	case errors.Is(err, errTransfer):
		opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, statusClass(500), took)
		return q.transferFailed(b, rank)
	}
	q.r.facts.forget(b.rank)
	f := q.failed(rank, "decode", err)
	opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, string(f.reason), took)
	q.handBack(rank)
	return q.againOr(f, schedule.DecodeLeg, rank, err, f.reason != front.UpstreamTimeout || f.unsent || !q.overdue(b.began))
}

// errTransfer: a decode engine says that the KV did not come. It is well itself.
var errTransfer = errors.New("the transfer of the KV failed")

// transferError is in the answer of an SGLang decode engine (500) whose KV did not come,
// because prefill's engine is gone or the network between them.
var transferError = []byte("KVTransferError(")

// transferFailed takes in that the KV of a Concurrent pair did not come to a decode engine,
// which says so. The pair is run again; that engine may decode it.
func (q *request) transferFailed(b *beside, decode *worker.Rank) legEnd {
	q.r.facts.forget(b.rank)
	q.unsent = false
	q.exclude(b.rank, wentDown)
	q.fellBack("transfer_failed", "of the KV from "+b.rank.ID.String()+", as "+decode.ID.String()+" says")
	return q.pairAgain(b.rank, front.UpstreamFailed, errTransfer)
}

// prefillBroke takes in that the prefill leg of a Concurrent pair failed.
func (q *request) prefillBroke(b *beside) legEnd {
	if errors.Is(b.err, errStale) { // the true one is known by now
		q.fellBack("stale_fact", b.rank.ID.String()+": "+b.err.Error())
		q.unsent = false
		q.awaitReturn(b.rank)
		return q.pairAgain(b.rank, front.UpstreamFailed, b.err)
	}
	if errors.Is(b.err, upstream.ErrMemory) { // another engine's answer would find none either
		q.refuseForMemory()
		return legAnswered
	}
	q.r.facts.forget(b.rank)
	if errors.Is(b.err, ErrIncompleteHandle) {
		q.exclude(b.rank, answeredBadly)
		q.fellBack("incomplete_handle", b.rank.ID.String()+": "+b.err.Error())
		q.unsent = false
		return q.pairAgain(b.rank, front.UpstreamFailed, b.err)
	}
	if b.err == nil && !worthRetry(b.status) {
		// What prefill refuses decode would refuse too: the client's to see.
		q.endRecord(schedule.Outcome{
			Status: b.status, Reason: "engine_" + statusClass(b.status), CachedTokens: -1, Total: time.Since(q.x.Received),
		})
		q.x.SetHeader("X-Sluice-Prefill-Worker", b.rank.ID.Worker)
		relay.Veil(b.answer, b.status)
		q.x.ReplyJSON(b.status, b.answer)
		return legAnswered
	}
	reason, err := front.UpstreamFailed, b.err
	if err != nil {
		f := sort(err)
		reason = f.reason
		q.note(b.rank, "prefill", f, err)
	} else {
		err = fmt.Errorf("it answered %d", b.status)
		dies := diedOf(b.status, b.answer)
		q.note(b.rank, "prefill", failure{suspect: dies, down: dies}, err)
	}
	if q.suspects >= maxSuspects {
		q.refuse(reason, fmt.Sprintf("%d engines failed while they held this request; it is not tried on a third: %s", q.suspects, upstream.Told(err)), 0)
		return legAnswered
	}
	return q.pairAgain(b.rank, reason, err) // another prefill worker, or what there is without one
}

// pairAgain lets a Concurrent pair whose prefill went wrong run again, if the
// pool's budget has it; else decode does it all, or the request is refused.
func (q *request) pairAgain(rank *worker.Rank, reason front.Reason, err error) legEnd {
	switch {
	case q.retryGranted():
	case q.plan.Traits.NoPlain, !q.pd.PlainDecode:
		q.refuse(reason, fmt.Sprintf("prefill on %s failed%s: %s", rank.ID, q.afterTries(schedule.PrefillLeg), upstream.Told(err)), time.Second)
		return legAnswered
	default:
		q.plainly = true
	}
	return legAgain
}
