package disagg

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// giveBack has the blocks of a handle freed whose client left between the legs.
// There is no call for it: an engine lets go of them when decode has read them, or
// with the lease, which is minutes in some releases and never ends in vLLM 0.9. So
// decode is run all the same, for one token. Where the router may tell prefill
// itself (transfers.side_channel: release) it does that instead.
//
// It runs on the request's own goroutine, and ends by the lease or the decode
// time-out.
func (q *request) giveBack() {
	if q.plan.Traits.Unleased {
		return
	}
	if q.kept.Releases() {
		q.fellBack("abandoned_handle", "the client left between the legs; prefill is told to free its blocks")
		return // recycle tells
	}
	q.fellBack("abandoned_handle", "the client left between the legs; decode makes one token, so that the blocks are freed")
	opt := q.r.opt()
	for range q.pd.DecodeTries {
		if q.leaseOver() {
			return
		}
		choice, ok := q.takeDecode(schedule.DecodeLeg)
		if !ok {
			return // nobody to read them: the lease ends
		}
		rank := choice.Rank
		q.pair.Decode = rank
		q.leg.reset()
		q.plan.Family.Decode(&q.leg, &q.pair)
		stream := q.leg.briefly(&q.pair)
		opt.Observer.LegStarted(schedule.DecodeLeg, rank.ID)
		began := time.Now()
		by := began.Add(opt.Timeouts.Decode)
		if end := q.leaseEnd(); end.Before(by) {
			by = end
		}
		outcome, unsent := q.callGivingBack(&upstream.Request{
			Method: "POST", Path: q.path(), Fields: q.headers(rank), Body: q.body(), Deadline: by,
		}, &choice, stream)
		choice.Reservation.Release()
		opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, outcome, time.Since(began))
		if !unsent {
			return
		}
	}
}

// callGivingBack sends the leg and reads its answer, which is for nobody; unsent says
// that no engine has seen the handle.
func (q *request) callGivingBack(req *upstream.Request, choice *schedule.Choice, stream bool) (outcome string, unsent bool) {
	fleet := q.r.opt().Fleet
	resp, err := fleet.Endpoint(choice.Rank).Do(req, nil)
	if err == nil || !sort(err).unsent {
		q.passOn()
		q.hold(false)
	}
	status := 0
	if err == nil {
		status = resp.Status
		q.reply, err = readAside(resp, q.reply[:0], stream)
		resp.Release()
	}
	if err != nil {
		f := q.failed(choice.Rank, legName(schedule.DecodeLeg), err)
		return string(f.reason), f.unsent
	}
	fleet.Answered(choice.Rank, status)
	return statusClass(status), false
}

// readAside reads an answer that is for nobody: of a stream as much as shows that its engine
// has the KV.
func readAside(resp *upstream.Response, dst []byte, stream bool) ([]byte, error) {
	if stream && resp.Status == 200 {
		_, err := resp.Peek()
		return dst, err
	}
	return resp.ReadAll(dst, maxPrefillAnswer)
}

// handBackFor bounds how long a decode engine may wait for blocks that may be gone.
const handBackFor = 10 * time.Second

// handBack has the blocks of a Concurrent pair freed whose decode has failed by itself
// on that rank when prefill had ended: another decode asks for them, for one token,
// while the request goes on. Where all others are out, the same engine is asked: one
// that only refused will do it.
func (q *request) handBack(failed *worker.Rank) {
	b := q.beside
	if !q.plan.Traits.Keyed || b.failed || b.status != 200 {
		return
	}
	choice, ok := q.choose(schedule.DecodeLeg, q.plan.Decode)
	if !ok {
		choice.Rank = failed
	}
	pair := q.pair
	pair.Decode = choice.Rank
	q.leg.reset()
	q.plan.Family.Decode(&q.leg, &pair)
	h := &handingBack{r: q.r, choice: choice, began: time.Now(), stream: q.leg.briefly(&pair)}
	if !q.part(&h.parted, choice.Rank) {
		choice.Reservation.Release()
		return
	}
	q.rooms.handOn()
	h.req.Deadline = h.began.Add(min(handBackFor, q.pd.Lease, q.r.opt().Timeouts.Decode))
	q.fellBack("abandoned_handle", "decode failed when prefill had ended; another makes one token, so that the blocks are freed")
	go h.run()
}

// handingBack is that leg. Its answer is for nobody, and its failure is nobody's.
type handingBack struct {
	r      *Runner
	choice schedule.Choice
	began  time.Time
	stream bool // see Leg.briefly
	parted
}

func (h *handingBack) run() {
	opt, rank := h.r.opt(), h.choice.Rank
	opt.Observer.LegStarted(schedule.DecodeLeg, rank.ID)
	outcome := ""
	resp, err := opt.Fleet.Endpoint(rank).Do(&h.req, nil)
	if err == nil {
		outcome = statusClass(resp.Status)
		_, err = readAside(resp, nil, h.stream)
		resp.Release()
	}
	if err != nil {
		outcome = string(sort(err).reason)
	}
	h.forget()
	h.choice.Reservation.Release()
	opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, outcome, time.Since(h.began))
}
