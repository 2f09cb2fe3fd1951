package kvtransfer

import (
	"sluice/dataplane/zmtp"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
	"sluice/router/worker"
)

// outcome is how a watched hand-over ended.
type outcome int

const (
	unknown outcome = iota // no report arrived: the engine runs no connector, or the report was lost
	done
	failed
	expired
	stalled
	numOutcomes
)

var outcomeNames = [numOutcomes]string{"unknown", "done", "failed", "expired", "stalled"}

func (w *Watcher) count(t *Transfer, r *completion.Result) {
	o := unknown
	switch {
	case t.stalled.Load():
		o = stalled
	case r.State == completion.Done:
		o = done
	case r.State == completion.Failed:
		o = failed
	case r.LeaseExpired:
		o = expired
	}
	w.outcomeCounts[o].Add(1)
}

// RecordTransfer records the measured time of a successful transfer between two ranks.
func (w *Watcher) RecordTransfer(from, to *worker.Rank, tokens int, r *completion.Result) {
	if w == nil || from == nil || to == nil || r.State != completion.Done {
		return
	}
	w.rates.Observe(int(from.Slot), int(to.Slot), r.Bytes, tokens, r.Duration)
	for _, rank := range [...]*worker.Rank{from, to} {
		if rank.Removed() { // ForgetRank may have run before; another rank gets the slot next
			w.rates.Remove(int(rank.Slot))
		}
	}
}

// Outcomes returns the number of hand-overs by the name of their outcome.
func (w *Watcher) Outcomes() map[string]int64 {
	m := map[string]int64{}
	for i := range w.outcomeCounts {
		m[outcomeNames[i]] = w.outcomeCounts[i].Load()
	}
	return m
}

// Reports counts the reports received, by event and status ("recv_ok"), and also:
//
//	"unknown"          no transfer waits for it
//	"malformed"        it cannot be parsed
//	"refused"          a record or a nonce that matches no slot
//	"not_a_report"     a message that NIXL or UCX received and that cannot be a report: too long, or without a sender
//	"unauthenticated"  a UCX message without the document's secret
//	"at_capacity"      a transfer that receives no reports because the table of waits is full
func (w *Watcher) Reports() map[string]int64 {
	var seen nixl.Counters
	if w.agent != nil {
		seen = w.agent.Counters()
	}
	unread := seen.Unread
	if w.ucx != nil {
		unread += w.ucx.Counters().Unread
	}
	malformed := w.registry.Malformed()
	if socket, ok := w.Socket(); ok {
		malformed += socket.Multipart
	}
	m := map[string]int64{"unknown": w.registry.Unknown(), "malformed": malformed, "refused": w.refused.Load() + w.registry.Refused() + int64(seen.Unmatched),
		"not_a_report": int64(unread), "unauthenticated": w.forged.Load(), "at_capacity": w.registry.AtCapacity()}
	for _, e := range [...]completion.Event{completion.Received, completion.Sent, completion.Expired} {
		m[e.String()+"_ok"], m[e.String()+"_failed"] = w.registry.Count(e, false), w.registry.Count(e, true)
	}
	return m
}

// Socket returns the connection counters of the ZMQ tier; ok is false when there is none.
func (w *Watcher) Socket() (s zmtp.Stats, ok bool) {
	if w == nil || w.zmq == nil {
		return s, false
	}
	return w.zmq.stats(), true
}

// Pending returns the number of hand-overs whose outcome is not known yet.
func (w *Watcher) Pending() int { return w.registry.Len() }
