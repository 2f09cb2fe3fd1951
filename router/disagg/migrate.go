package disagg

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// carried is a request whose stream is to go on from another engine when its own
// fails: what that engine must be asked, kept because the request's scratch and
// the client's bytes are gone by then. The Transcript has the tokens.
type carried struct {
	relay.Transcript
	s        *streamEnd
	body     []byte // of a completions request, but for prompt and limits
	fields   []upstream.Field
	model    string
	salt     blockhash.Salt
	steering steering
	most     int // tokens the client wants at most; 0: it said nothing
	least    int
	failed   []*worker.Rank
	suspects int
	attempt  int
	moves    int
	deadline time.Time // of the leg, wherever it runs
}

// maxTakers bounds how many engines are asked to take one stream over.
const maxTakers = 3

// movability looks once whether the request's stream could go on elsewhere.
func (q *request) movability() {
	if q.looked {
		return
	}
	q.looked = true
	m := &q.r.opt.Migration
	switch own := q.x.Doc.Bool(jsonscan.KeyReturnTokenIDs); {
	case m.Max == 0 || !q.stream || q.x.Endpoint.Kind != front.Chat && q.x.Endpoint.Kind != front.Completions:
		q.unmovable = "off"
	case m.Tokens != "auto" && !own:
		q.unmovable = "tokens"
	case q.plan.Family != nil && (q.plan.Traits.NoPlain || !q.pd.PlainDecode):
		q.unmovable = "plain_decode"
	case q.pd.ReasoningParser && q.x.Endpoint.Kind == front.Chat:
		q.unmovable = "reasoning"
	case len(q.plan.Decode) < 2 && len(q.plan.Whole) < 2 && q.pool.Members[worker.Decode] < 2 && q.pool.Members[worker.Aggregated] < 2:
		q.unmovable = "alone"
	default:
		q.movable, q.unmovable = movable(&q.x.Doc, q.x.Endpoint.Kind, m.Allow)
	}
}

// asksIDs says whether the leg that was written for rank asks the engine for token
// ids, so that its stream can be carried.
func (q *request) asksIDs(rank *worker.Rank) bool {
	q.movability()
	q.why = q.unmovable
	_, rewrites := q.plan.Family.(Answerer)
	switch {
	case q.why != "":
	case q.pair.Trial:
		q.why = "trial"
	case q.leg.Body != nil || q.handed && rewrites:
		q.why = "family"
	case !givesIDs(rank) && !q.x.Doc.Bool(jsonscan.KeyReturnTokenIDs):
		q.why = "engine"
	}
	return q.why == ""
}

// carry makes the stream's carried, nil where it cannot be, and says so in a
// header.
func (q *request) carry(s *streamEnd, resp *upstream.Response) *carried {
	switch {
	case q.unmovable == "off":
		return nil
	case q.why == "" && (resp.Status != 200 || resp.ContentLength != upstream.LengthChunked):
		q.why = "endpoint"
	}
	if q.why != "" {
		s.immovable = q.why
		q.x.SetHeader("X-Sluice-Migration", "no; "+q.why)
		return nil
	}
	q.x.SetHeader("X-Sluice-Migration", "ready")
	least, _ := q.x.Doc.Int(jsonscan.KeyMinTokens)
	c := &carried{
		Transcript: relay.Transcript{Chat: q.x.Endpoint.Kind == front.Chat, ShowIDs: q.x.Doc.Bool(jsonscan.KeyReturnTokenIDs)},
		s:          s, body: q.movable, fields: cloneFields(q.x.ForwardFields(q.fields[:0])),
		model: q.pool.Model, salt: q.salted, most: q.maxTokens, least: int(min(max(least, 0), 1<<24)),
		failed: slices.Clone(q.excluded), suspects: q.suspects, attempt: q.attempt, deadline: s.began.Add(q.r.opt.Timeouts.Decode),
	}
	g := &q.steering
	c.steering = steering{session: g.session, workers: slices.Clone(g.workers), ranks: slices.Clone(g.ranks), allowed: slices.Clone(g.allowed), labels: slices.Clone(g.labels)}
	return c
}

// wantsEndUsage says whether the client asked for usage at the stream's end.
func wantsEndUsage(doc *jsonscan.Doc) bool {
	raw := doc.Raw(jsonscan.KeyStreamOptions)
	v, ok, _ := jsonscan.Find(raw, "include_usage")
	return ok && v.Kind == jsonscan.Bool && raw[v.Start] == 't'
}

// next is front.RelayHooks.Next.
func (c *carried) next(b relay.Break, watch func(*upstream.Call)) (*upstream.Response, *upstream.Call) {
	s := c.s
	opt := &s.r.opt
	why := c.Stuck
	c.suspects++
	switch {
	case why != "":
	case c.moves >= opt.Migration.Max || c.suspects > opt.Migration.Max:
		why = "limit"
	case time.Now().After(c.deadline):
		why = "deadline"
	case c.Half || c.ShowIDs && c.Told < len(c.Out):
		why = "half_character"
	case c.most > 0 && c.Told >= c.most:
		why = "spent"
	}
	if why != "" {
		s.note("not migrated: " + why)
		opt.Observer.Migrated(why)
		return nil, nil
	}
	from := s.rank
	s.breakLeg(b)
	c.failed = append(c.failed, from)
	resp, call := c.take(watch)
	if resp == nil {
		opt.Observer.Migrated("failed")
		return nil, nil
	}
	c.moves++
	opt.Observer.Migrated("done")
	s.note(fmt.Sprintf("migrated: %s failed after %d tokens, %s goes on", from.ID, c.Told, s.rank.ID))
	opt.Log.Warn("stream migrated", "request_id", s.requestID, "from", from.ID.String(), "to", s.rank.ID.String(), "tokens", c.Told, "cause", b.Cause.String(), "err", b.Err)
	return resp, call
}

// take asks other engines, one after the other, to go on with the stream. The
// first is no load that the pool did not have; those after it are paid from its
// budget of retries.
func (c *carried) take(watch func(*upstream.Call)) (*upstream.Response, *upstream.Call) {
	s := c.s
	opt := &s.r.opt
	q := s.r.requests.Get().(*request)
	q.r, q.id, q.model, q.maxTokens, q.steering = s.r, s.requestID, c.model, max(c.most-c.Told, 0), c.steering
	defer q.recycle()
	var ok bool
	if q.pool, ok = opt.Fleet.View().Pool(c.model); !ok {
		return nil, nil
	}
	m := s.r.pdOf(c.model)
	q.pd = &m.pd
	q.plan.Whole = wholeRanks(q.pool)
	if disaggregated(q.pool, m) {
		q.plan.Whole = labelled(decodeRanks(q.pool, m), m.pd.DecodeLabel)
	}
	q.plan.Whole = c.steering.fitting(q.plan.Whole, make([]bool, len(c.steering.workers)))
	q.prompt.Tokens = append(append(q.prompt.Tokens[:0], c.Prompt...), c.Out[:c.Told]...)
	q.prompt.Count = len(q.prompt.Tokens)
	q.excluded = append(q.excluded[:0], c.failed...)
	q.salted = c.salt
	q.lookUp(time.Now())
	body := c.request(q.prompt.Tokens)
	for try := 1; try <= maxTakers; try++ {
		if try > 1 && !opt.Fleet.Retry(q.pool) {
			s.note("not migrated: the pool's budget of retries is spent")
			return nil, nil
		}
		c.attempt++
		q.attempt = c.attempt
		choice, ok := q.choose(schedule.Whole, q.plan.Whole)
		if !ok {
			s.note("not migrated: no other worker can take the stream")
			return nil, nil
		}
		rank := choice.Rank
		q.excluded = append(q.excluded, rank)
		segments, ok := c.limits(body, rank)
		if !ok {
			choice.Reservation.Release()
			s.note("not migrated: the model's length, which bounds an answer without max_tokens, is not known of " + rank.ID.String())
			continue
		}
		call := new(upstream.Call)
		watch(call)
		began, refused := time.Now(), false
		opt.Observer.LegStarted(schedule.Whole, rank.ID)
		resp, err := opt.Fleet.Endpoint(rank).Do(&upstream.Request{
			Method: "POST", Path: completionsPath, Fields: c.headers(rank), Body: segments,
			HeadTimeout: opt.Timeouts.FirstByte, Deadline: c.deadline,
		}, call)
		if err == nil {
			if resp.Status == 200 && resp.ContentLength == upstream.LengthChunked {
				opt.Fleet.Began(rank)
				_ = resp.SetReadDeadline(time.Now().Add(opt.Timeouts.StreamIdle))
				if _, err = resp.Peek(); err == nil {
					choice.Reservation.PrefillDone()
					s.moveTo(&choice, began)
					return resp, call
				}
			} else {
				opt.Fleet.Answered(rank, resp.Status)
				err, refused = fmt.Errorf("it answered %d", resp.Status), true
			}
			status := resp.Status
			resp.Release()
			if status >= 400 && status < 500 && status != 429 {
				try = maxTakers // others would say the same
			}
		}
		choice.Reservation.Release()
		outcome := string(sort(err).reason)
		switch {
		case call.WasCut():
			outcome = string(front.ClientGone)
		case refused: // Answered has told
			outcome = "refused"
		case sort(err).ofEngine:
			opt.Fleet.Failed(rank, err)
		}
		opt.Observer.LegEnded(schedule.Whole, rank.ID, outcome, time.Since(began))
		if call.WasCut() {
			return nil, nil
		}
		s.note("migration to " + rank.ID.String() + " failed: " + err.Error())
	}
	return nil, nil
}

// request is the body without its limits: what the client asked for, behind the
// prompt and what has been told.
func (c *carried) request(tokens []uint32) []byte {
	body := append(make([]byte, 0, len(c.body)+8*len(tokens)+64), c.body...)
	return jsonscan.AppendTokenIDs(append(body, `,"prompt":`...), tokens)
}

// limits adds what is left of the client's limits. Without one a chat goes on to
// the end of the model's length, which completions must be told; not ok when that
// is not known.
func (c *carried) limits(body []byte, rank *worker.Rank) (segments [][]byte, ok bool) {
	left := c.most - c.Told
	if c.most == 0 {
		left = completionsDefault - c.Told
		if c.Chat {
			left = rank.Worker.Info().MaxModelLen - len(c.Prompt) - c.Told
		}
	}
	if left <= 0 {
		return nil, false
	}
	end := strconv.AppendInt([]byte(`,"max_tokens":`), int64(left), 10)
	if least := c.least - c.Told; least > 0 {
		end = strconv.AppendInt(append(end, `,"min_tokens":`...), int64(least), 10)
	}
	return [][]byte{body, append(end, '}')}, true
}

func (c *carried) headers(rank *worker.Rank) []upstream.Field {
	fields := append(slices.Clip(c.fields), upstream.Field{Name: "X-Request-Id", Value: c.s.requestID + "-" + strconv.Itoa(c.attempt)})
	if rank.SendRank {
		fields = append(fields, upstream.Field{Name: "X-data-parallel-rank", Value: strconv.Itoa(int(rank.ID.Rank))})
	}
	return fields
}

// note adds a note to the request's explain record.
func (s *streamEnd) note(text string) { s.r.opt.Scheduler.Note(s.requestID, text) }

// breakLeg closes the books of a leg whose engine failed, of a stream that may go
// on.
func (s *streamEnd) breakLeg(b relay.Break) {
	s.blame(b)
	s.reservation.Release()
	if s.beside != nil {
		s.beside.call.Cut()
		s.beside = nil
	}
	if s.wait != nil {
		s.transfer, s.wait = s.r.transferred(s.wait, s.prefill, s.rank, s.tokens-s.predicted), nil
	}
	outcome := b.Cause.String()
	if b.Event != nil {
		outcome = "engine_error"
	}
	s.r.opt.Observer.LegEnded(s.leg, s.rank.ID, outcome, time.Since(s.began))
	s.closed = true
}

// blame tells the fleet of an engine that failed in the middle of a stream. That
// it was silent for long is no sign of ill health.
func (s *streamEnd) blame(b relay.Break) {
	switch {
	case b.Event != nil:
		s.r.opt.Fleet.Answered(s.rank, 500)
	case b.Cause == relay.EngineClosed:
		s.r.opt.Fleet.Failed(s.rank, b.Err)
	}
}

// moveTo opens the books of the leg that goes on.
func (s *streamEnd) moveTo(choice *schedule.Choice, began time.Time) {
	s.leg, s.rank, s.reservation, s.began, s.closed = schedule.Whole, choice.Rank, choice.Reservation, began, false
	s.moved = true
	s.keys = nil // the prompt is another, and so is what was found of it
}
