package disagg

import (
	"context"
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/schedule"
	"sluice/router/sidechannel"
	"sluice/router/transfers"
	"sluice/router/worker"
)

// streamEnd is what a relayed stream still needs when its request's scratch has
// gone back to the pool. There are thousands: it just fills a size class of 224 bytes.
type streamEnd struct {
	r           *Runner
	rank        *worker.Rank
	requestID   string
	endpoint    *front.Endpoint
	client      [16]byte // its address, zero for none known; a netip.Addr has 24
	reservation *schedule.Reservation
	pass        front.Pass // nil: no keys are asked for
	received    moment
	began       moment
	status      int32
	tokens      int32 // of the prompt
	reserved    int32 // of them by the key
	predicted   int32
	// With a prefill leg, what its engine found cached (-1 unknown); without,
	// the decode engine's own report is learned from.
	found     int32
	prefilled bool
	moved     bool // it goes on from another engine
	closed    bool // the leg's books are: its engine failed, and no other took the stream
	leg       schedule.Leg
	beside    *beside         // may still run
	keys      []blockhash.Seq // of the approximate index; nil where events tell

	given   *sidechannel.Hold // prefill's blocks, until the first token
	grace   time.Duration     // of the leg, see request.grace
	wait    *transfers.Wait   // of the hand-over
	prefill *worker.Rank

	transfer  *schedule.Transfer // what became of the hand-over of a leg that was closed
	immovable string             // why the stream cannot go on from another engine
	carried   *carried           // nil: it cannot
	on        *worker.Worker     // where Runner.movers has it
}

// moment is a time counted from the package's start, which takes a third of a Time's room.
type moment time.Duration

var epoch = time.Now()

func momentOf(t time.Time) moment { return moment(t.Sub(epoch)) }

func (m moment) time() time.Time { return epoch.Add(time.Duration(m)) }

func (m moment) since() time.Duration { return time.Since(epoch) - time.Duration(m) }

// relay hands the stream to the front; it goes on after the handler returned.
func (q *request) relay(leg schedule.Leg, choice *schedule.Choice, call *upstream.Call, resp *upstream.Response, began time.Time) {
	s := &streamEnd{
		r: q.r, leg: leg, rank: choice.Rank, requestID: q.x.RequestID, endpoint: q.x.Endpoint, client: q.x.ClientIP().As16(),
		reservation: choice.Reservation, pass: q.x.Pass(), status: int32(resp.Status), received: momentOf(q.x.Received), began: momentOf(began),
		tokens: int32(q.prompt.Count), reserved: int32(q.reserved), predicted: int32(choice.CachedTokens),
		prefilled: q.prefilled, found: int32(q.pair.PrefillCached), beside: q.beside, given: q.given, grace: q.grace(),
	}
	if q.beside != nil {
		q.beside.keep()
	}
	q.given, q.call, q.paid = nil, nil, true
	q.rooms.handOn()
	if q.wait != nil {
		s.wait, s.prefill, q.wait = q.wait, q.pair.Prefill, nil
	}
	if !s.prefilled {
		s.keys = slices.Clone(q.guessKeys(choice.Rank)) // q.keys is scratch of the next request by then
	}
	if t := q.taking; t != nil {
		t.s, t.resp, t.call = s, resp, call
		if a := q.answerer(); a != nil && isEvents(resp) {
			t.rewriter = a.Events(&q.pair)
		}
		return
	}
	if q.x.Endpoint.Kind == front.ResponsesAPI && resp.Status == 200 && !isEvents(resp) {
		if seen, err := resp.Peek(); err == nil {
			q.rememberResponse(seen, choice.Rank)
		}
	}
	hooks := front.RelayHooks{Of: s, By: q.deadline}
	if q.lent != nil {
		hooks.Of, q.lent = lentEnd{s, q.lent}, nil
	}
	if n, ok := q.x.Doc.Int(jsonscan.KeyN); ok {
		hooks.Choices = int(min(n, math.MaxInt32))
	}
	if c := q.carry(s, resp); c != nil {
		s.carried = c
		q.r.movers.add(c)
		hooks.Transcript, hooks.Usage = &c.Transcript, wantsEndUsage(&q.x.Doc)
	} else if a := q.answerer(); a != nil && isEvents(resp) {
		hooks.Rewrite = a.Events(&q.pair)
	}
	q.x.Relay(resp, call, hooks)
}

// lentEnd is a streamEnd that outlives its request with what it lent.
type lentEnd struct {
	*streamEnd
	lent *membudget.Lease
}

// End implements front.Relayed.
func (l lentEnd) End(res relay.Result) {
	defer l.lent.Release()
	l.streamEnd.End(res)
}

// FirstToken takes the prefill work off the rank.
func (s *streamEnd) FirstToken() {
	s.beside.arrived()
	s.given.Passed()
	s.reservation.PrefillDone()
	s.r.opt().Observer.FirstToken(s.endpoint.Path, s.received.since())
}

// Done implements front.Doner: the engine has done the work, whenever it ends its response.
func (s *streamEnd) Done(usage relay.Usage, failed bool) {
	if !failed {
		s.reservation.Report(s.requestID, usage.Cached, max(usage.Completion, 0))
	}
	s.reservation.Release()
	s.reservation = nil // it may be another request's by now
}

// End implements front.Relayed.
func (s *streamEnd) End(res relay.Result) {
	opt := s.r.opt()
	s.r.movers.remove(s)
	if cached := res.Usage.Cached; res.Cause == relay.Completed {
		s.reservation.Report(s.requestID, cached, max(res.Usage.Completion, 0))
	}
	s.reservation.Release()
	switch {
	case res.EngineErr || res.Cause.EngineFailed():
		s.given.Reclaimed() // nothing, if a token came
	case res.Cause != relay.Completed && res.FirstByte.IsZero():
		reclaimBehind(s.given, s.grace)
	default:
		s.given.Passed()
	}
	s.pay(&res)
	s.judge(&res)
	if s.immovable != "" && (res.EngineErr || res.Cause.EngineFailed() || res.Cause == relay.EngineStalled) {
		s.note("not migrated: " + s.immovable)
		opt.Observer.Migrated(s.immovable)
	}
	outcome := "ok"
	if b := s.beside; b != nil {
		if res.Cause != relay.Completed {
			b.call.Cut() // prefill would wait for a decode that is no more
		}
		if !s.moved {
			s.found = int32(b.found(-1))
		}
	}
	switch {
	case res.Cause == relay.Cut && s.beside.broke():
		outcome = "prefill_failed"
	case res.Cause != relay.Completed:
		outcome = res.Cause.String()
	}
	if !s.closed {
		opt.Observer.LegEnded(s.leg, s.rank.ID, outcome, s.began.since())
	}
	opt.Observer.Streamed(s.endpoint.Path, &res)
	out := schedule.Outcome{
		Status: int(s.status), CachedTokens: res.Usage.Cached, PromptTokens: max(res.Usage.Prompt, 0),
		OutputTokens: max(res.Usage.Completion, 0), Total: s.received.since(),
	}
	if outcome != "ok" {
		out.Reason = outcome
	}
	switch {
	case s.wait != nil:
		out.Transfer = s.handedOver()
	case s.transfer != nil:
		out.Transfer = *s.transfer
	}
	if !res.FirstToken.IsZero() {
		out.TTFT = res.FirstToken.Sub(s.received.time())
	}
	if s.prefilled {
		out.CachedTokens = int(s.found)
	} else if res.Cause == relay.Completed && s.tokens > 0 && !s.moved {
		s.r.learn(s.rank, s.keys, int(s.tokens), int(s.predicted), res.Usage.Cached, out.Total)
	}
	opt.Scheduler.End(s.requestID, out)
	if outcome != "ok" {
		s.logEnd(res.Cause, outcome, res.Err)
	}
}

// logEnd says that the stream ended early, with what log lines about a request say of it.
func (s *streamEnd) logEnd(cause relay.Cause, outcome string, err error) {
	level := slog.LevelWarn
	if cause == relay.ClientGone || cause == relay.Drained || cause == relay.Deadline {
		level = slog.LevelInfo // clients leave all day, their time is over, and routers end; engines should not
	}
	args := append(make([]any, 0, 12), "request_id", s.requestID)
	if s.client != [16]byte{} {
		args = append(args, "client", netip.AddrFrom16(s.client).Unmap())
	}
	args = append(args, "endpoint", s.endpoint.Path)
	if s.pass != nil {
		args = append(args, "key", s.pass.Name())
	}
	args = append(args, "worker", s.rank.ID.String(), "cause", outcome)
	if err != nil {
		args = append(args, "err", err)
	}
	s.r.opt().Log.Log(context.Background(), level, "stream ended early", args...)
}

// handedOver closes the wait for the stream's hand-over and says what became of it.
func (s *streamEnd) handedOver() schedule.Transfer {
	return s.r.transferred(s.wait, s.requestID, s.prefill, s.rank, int(s.tokens-s.predicted))
}

// pay books the stream's tokens to the client's key, in the place of those reserved:
// what the engine reported, else the prompt's as counted here and an event for each of
// the output's.
func (s *streamEnd) pay(res *relay.Result) {
	if s.pass == nil {
		return
	}
	if s.status != 200 {
		s.pass.Settle(int(s.reserved), 0)
		return
	}
	prompt, output := res.Usage.Prompt, res.Usage.Completion
	if prompt < 0 {
		prompt = int(max(s.tokens, s.reserved))
	}
	if output < 0 {
		output = int(min(res.Events, 1<<30))
	}
	s.pass.Settle(int(s.reserved), prompt+output)
}

// judge tells the fleet how the engine did. An error event before any token may
// speak of the request.
func (s *streamEnd) judge(res *relay.Result) {
	fleet := s.r.opt().Fleet
	switch {
	case s.closed || s.status != 200: // told already
	case res.Cause.EngineFailed():
		fleet.Failed(s.rank, res.Err)
	case res.EngineErr && !res.FirstToken.IsZero():
		fleet.Answered(s.rank, 500)
	case res.EngineErr:
	case res.Cause == relay.Completed, !res.FirstToken.IsZero() && (res.Cause == relay.ClientGone || res.Cause == relay.ClientStalled || res.Cause == relay.Deadline):
		fleet.Answered(s.rank, 200)
	}
}
