package pd

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// releaseKV implements abort.ReclaimByRelease: it frees the blocks of a handle whose client disconnected
// between the legs. Engines have no call for that. They free the blocks when decode has read them
// or the lease ends, which takes minutes in some releases and never happens in vLLM 0.9. The runner
// therefore sends decode nevertheless, for one token. If the side channel may release blocks
// (transfers.side_channel: release), it uses that instead.
//
// It runs on the request's goroutine and ends by the lease or the decode timeout.
func (q *request) releaseKV() {
	if q.prefillLeg.kv.Held().CanRelease() {
		q.noteFallback("abandoned_handle", "the client disconnected between the legs; prefill is asked to free its blocks")
		return // recycle releases it
	}
	q.noteFallback("abandoned_handle", "the client left between the legs; decode makes one token, so that the blocks are freed")
	opt := q.settings
	for range q.pd.DecodeAttempts {
		if q.leaseExpired() {
			return
		}
		choice, ok := q.acquireDecode(schedule.DecodeLeg)
		if !ok {
			return // no engine can read the blocks; they stay until the lease ends
		}
		rank := choice.Rank
		q.handover.Decode = rank
		q.legRequest.Reset()
		q.plan.Family.Decode(&q.legRequest, &q.handover)
		stream := q.legRequest.LimitForKVRelease(&q.handover)
		l := legRecord{settings: q.settings, rank: rank, reservation: choice.Reservation, kind: schedule.DecodeLeg}
		l.start()
		by := l.began.Time().Add(opt.Timeouts.Decode)
		if end := q.leaseDeadline(); end.Before(by) {
			by = end
		}
		outcome, unsent := q.callKVRelease(&upstream.Request{
			Method: "POST", Path: q.legPath(), Fields: q.legHeaders(&l), Body: q.legBody(), Deadline: by,
		}, rank, stream)
		l.end(outcome)
		if !unsent {
			return
		}
	}
}

// callKVRelease sends the leg and discards its response. unsent reports that no engine has seen the
// handle.
func (q *request) callKVRelease(req *upstream.Request, rank *worker.Rank, stream bool) (outcome string, unsent bool) {
	fleet := q.settings.Fleet
	resp, err := fleet.Endpoint(rank).Do(req, nil)
	if err == nil || !classify(err).unsent {
		q.prefillLeg.onKV(abort.Decoded)
	}
	status := 0
	if err == nil {
		status = resp.Status
		q.reply, err = discardAnswer(resp, q.reply[:0], stream)
		resp.Release()
	}
	if err != nil {
		f := q.recordFailure(rank, legName(schedule.DecodeLeg), err)
		return string(f.reason), f.unsent
	}
	fleet.ReportStatus(rank, status)
	return statusClass(status), false
}

// discardAnswer reads a response that no client gets. It reads only the part of a stream that shows
// that the engine has the KV.
func discardAnswer(resp *upstream.Response, dst []byte, stream bool) ([]byte, error) {
	if stream && resp.Status == 200 {
		_, err := resp.Peek()
		return dst, err
	}
	return resp.ReadAll(dst, maxPrefillAnswer)
}

// kvReleaseTimeout bounds how long a decode engine may wait for blocks that may no longer exist.
const kvReleaseTimeout = 10 * time.Second

// releaseKVDetached frees the blocks of a Concurrent pair whose decode failed on a rank after
// prefill had ended. Another decode engine fetches them, for one token, while the request goes on.
// Without another candidate the same engine fetches them, which works if it only refused the
// request.
func (q *request) releaseKVDetached(failed *worker.Rank) {
	b := q.concurrent
	if !q.plan.Traits.Refetchable || b.failed || b.status != 200 {
		return
	}
	choice, ok := q.choose(schedule.DecodeLeg, q.plan.Decode)
	if !ok {
		choice.Rank = failed
	}
	handover := q.handover
	handover.Decode = choice.Rank
	q.legRequest.Reset()
	q.plan.Family.Decode(&q.legRequest, &handover)
	h := &kvRelease{
		legRecord: legRecord{settings: q.settings, rank: choice.Rank, reservation: choice.Reservation, kind: schedule.DecodeLeg},
		stream:    q.legRequest.LimitForKVRelease(&handover),
	}
	if !q.detachLeg(&h.detachedLeg) {
		choice.Reservation.Release()
		return
	}
	h.copyFields(q.legHeaders(&h.legRecord))
	q.reservations.detach()
	h.req.Deadline = time.Now().Add(min(kvReleaseTimeout, q.pd.Lease, q.settings.Timeouts.Decode))
	q.noteFallback("abandoned_handle", "decode failed when prefill had ended; another makes one token, so that the blocks are freed")
	go h.run()
}

// kvRelease is the leg of releaseKVDetached. Its response and its failure have no effect.
type kvRelease struct {
	legRecord
	stream bool // see LegRequest.LimitForKVRelease
	detachedLeg
}

func (h *kvRelease) run() {
	h.start()
	outcome := ""
	resp, err := h.settings.Fleet.Endpoint(h.rank).Do(&h.req, nil)
	if err == nil {
		outcome = statusClass(resp.Status)
		_, err = discardAnswer(resp, nil, h.stream)
		resp.Release()
	}
	if err != nil {
		outcome = string(classify(err).reason)
	}
	h.releaseBody()
	h.end(outcome)
}
