package pd

import (
	"strings"
	"time"

	"sluice/dataplane/relay"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/completion"
	"sluice/router/pd/abort"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// watchTransfer starts to watch the engines' reports about the hand-over, beginning at now. That is
// the time of prefill's response or, for a Concurrent pair, a time before the legs are sent.
func (q *request) watchTransfer(now time.Time) {
	if q.plan.Traits.Reports {
		q.prefillLeg.transfer = q.settings.Transfers.Open(q.handover.RequestID, now)
	}
}

// acquireSlot acquires a slot of the completion board for decode if its engine is known to run the
// connector. Other engines get the handle unchanged.
func (q *request) acquireSlot(l *decodeLeg) {
	l.hasConnector = q.prefillLeg.transfer != nil && (q.handover.Handle != nil || q.concurrent != nil) && l.rank.Option("connector") == "true"
	q.handover.Slot = nil
	if !l.hasConnector {
		return
	}
	q.prefillLeg.transfer.AcquireSlot(q.settings.Timeouts.Decode)
	if q.slotBuf = q.prefillLeg.transfer.AppendSlot(q.slotBuf[:0]); len(q.slotBuf) > 0 {
		q.handover.Slot = q.slotBuf
	}
}

// guardDecode makes the transfer watch and the engine-down monitor cancel the decode call if the
// hand-over is reported lost or the engine that has the KV goes down.
func (q *request) guardDecode(l *decodeLeg) {
	q.decodeLeg.monitor.Reset()
	if q.handover.Handle != nil && !q.plan.Traits.NoLease {
		q.monitorPrefill(q.handover.Prefill)
	}
	if q.prefillLeg.transfer == nil || q.handover.Handle == nil && q.concurrent == nil {
		return
	}
	stall := time.Duration(0)
	if l.hasConnector {
		stall = q.settings.TransferStall
	}
	l.shareCall() // the watch may cancel the call until the watch is closed
	q.prefillLeg.transfer.Guard(l.call, stall)
}

// endLostHandover ends a decode leg whose hand-over is lost before the client has received a byte.
// The next attempt has another pair, or decode runs the whole request.
func (q *request) endLostHandover(l *decodeLeg) legEnd {
	l.end(relay.Cancelled.String())
	reason := q.prefillLeg.transfer.LostReason()
	if reason == "" {
		reason = "prefill_down"
	}
	if q.handleLostHandover(reason) == legDecodeOnly {
		q.decodeOnly = true
	}
	return legRetry
}

// handleLostHandover decides what follows if decode cannot get this prefill's KV. reason is a
// fallback kind without its "transfer_" prefix. legRetry means that the pair runs again on another
// prefill rank, and on another decode rank if there is one. legDecodeOnly means that no tries are
// left and decode runs the whole request.
func (q *request) handleLostHandover(reason string) legEnd {
	prefill, decode := q.handover.Prefill, q.handover.Decode
	since := q.prefillLeg.handleAt
	if q.handover.Handle == nil {
		since = q.req.Received
	}
	q.noteFallback("transfer_"+reason, "of the KV from "+prefill.ID.String()+", after "+time.Since(since).Round(time.Millisecond).String())
	q.prefillLeg.unwatch()
	q.decodeLeg.monitor.Reset()
	if reason == "expired" {
		q.prefillLeg.onKV(abort.Expired)
	} else {
		q.prefillLeg.onKV(abort.Abandoned)
		q.exclude(prefill, excludedDown)
		if decode != nil && !q.isExcluded(decode) && q.hasOtherCandidate(q.plan.Decode, decode) {
			q.exclude(decode, excludedError)
		}
	}
	if q.triesLeft() && q.withdrawRetry() {
		return legRetry
	}
	return legDecodeOnly
}

// hasOtherCandidate reports whether a candidate other than except has not failed the request.
func (q *request) hasOtherCandidate(candidates []*worker.Rank, except *worker.Rank) bool {
	for _, c := range candidates {
		if c != except && !q.isExcluded(c) {
			return true
		}
	}
	return false
}

// finishTransfer closes the watch of a request whose response was read whole.
func (q *request) finishTransfer(l *decodeLeg) schedule.Transfer {
	w := q.prefillLeg.transfer
	q.prefillLeg.transfer = nil
	return q.r.finishTransfer(w, l.model, q.req.RequestID, q.handover.Prefill, l.rank, q.prompt.Count-int(l.predicted))
}

// minRateTokens is the minimum number of tokens of a transfer from which the router learns a rate.
const minRateTokens = 64

// finishTransfer closes a watch, records the transfer's duration for the pair of ranks, and returns
// the transfer's entry for the explain record. If the report arrives a moment later, it is recorded
// then.
func (r *Runner) finishTransfer(w *kvtransfer.Transfer, model ModelObserver, requestID string, from, to *worker.Rank, tokens int) schedule.Transfer {
	if w == nil {
		return schedule.Transfer{}
	}
	if tokens < minRateTokens {
		tokens = 0
	}
	if w.Pending() {
		id := strings.Clone(requestID)
		if w.CloseOnReport(func(res completion.Result) {
			r.options().Scheduler.AddTransfer(id, r.recordTransfer(&res, model, from, to, tokens))
		}) {
			return schedule.Transfer{State: "unknown"}
		}
	}
	res := w.Close()
	return r.recordTransfer(&res, model, from, to, tokens)
}

func (r *Runner) recordTransfer(res *completion.Result, model ModelObserver, from, to *worker.Rank, tokens int) schedule.Transfer {
	observeTransfer(model, res)
	r.options().Transfers.RecordTransfer(from, to, tokens, res)
	t := schedule.Transfer{State: "unknown", Bytes: res.Bytes, Duration: res.Duration, Delay: res.Elapsed}
	if res.State != completion.Pending {
		t.State = res.State.String()
	} else if res.LeaseExpired {
		t.State = "expired"
	}
	return t
}
