package transfers

import (
	"sluice/nixl"
	"sluice/nixl/completion"
	"sluice/nixl/zmtp"
	"sluice/router/worker"
)

// outcome is what became of a watched hand-over.
type outcome int

const (
	untold outcome = iota // nothing came: the engine runs no connector, or its report was lost
	done
	failed
	expired
	stalled
	outcomes
)

var outcomeNames = [outcomes]string{"untold", "done", "failed", "expired", "stalled"}

func (w *Watch) count(t *Wait, r *completion.Result) {
	o := untold
	switch {
	case t.stalled.Load():
		o = stalled
	case r.State == completion.Done:
		o = done
	case r.State == completion.Failed:
		o = failed
	case r.Lost:
		o = expired
	}
	w.outcomes[o].Add(1)
}

// Moved books a transfer that succeeded between two ranks.
func (w *Watch) Moved(from, to *worker.Rank, tokens int, r *completion.Result) {
	if w == nil || from == nil || to == nil || r.State != completion.Done {
		return
	}
	w.pairs.Note(int(from.Slot), int(to.Slot), r.Bytes, tokens, r.Took)
	for _, rank := range [...]*worker.Rank{from, to} {
		if rank.Left() { // and was forgotten before; its number is another's next
			w.pairs.Forget(int(rank.Slot))
		}
	}
}

// Outcomes are how many hand-overs ended how, by name.
func (w *Watch) Outcomes() map[string]int64 {
	m := map[string]int64{}
	for i := range w.outcomes {
		m[outcomeNames[i]] = w.outcomes[i].Load()
	}
	return m
}

// Reports counts what came: by event and status ("recv ok"), and beside them
// "unknown" (nobody waited), "malformed", "refused" (a record or a nonce that fitted no
// ticket), "unread" (a message that NIXL or UCX had and that is none: too long, of a nameless sender), "forged" (a message over UCX without the document's secret)
// and "crowded" (a hand-over that heard nothing for lack of a place).
func (w *Watch) Reports() map[string]int64 {
	var seen nixl.Counters
	if w.agent != nil {
		seen = w.agent.Counters()
	}
	unread := seen.Unread
	if w.ucx != nil {
		unread += w.ucx.Counters().Unread
	}
	malformed := w.book.Malformed()
	if socket, ok := w.Socket(); ok {
		malformed += socket.Parts
	}
	m := map[string]int64{"unknown": w.book.Unknown(), "malformed": malformed, "refused": w.refused.Load() + w.book.Refused() + int64(seen.Unmatched),
		"unread": int64(unread), "forged": w.forged.Load(), "crowded": w.book.Crowded()}
	for _, e := range [...]completion.Event{completion.Received, completion.Sent, completion.Expired} {
		m[e.String()+"_ok"], m[e.String()+"_failed"] = w.book.Count(e, false), w.book.Count(e, true)
	}
	return m
}

// Socket counts the connections of the ZMQ tier; ok is false where there is none.
func (w *Watch) Socket() (s zmtp.Stats, ok bool) {
	if w == nil || w.zmq == nil {
		return s, false
	}
	return w.zmq.stats(), true
}

// Waiting is how many hand-overs are watched now.
func (w *Watch) Waiting() int { return w.book.Len() }
