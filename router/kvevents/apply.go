package kvevents

import (
	"math/bits"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/backoff"
)

// apply applies one message to the index and advances the position.
func (f *feed) apply(seq uint64, payload []byte) {
	f.next, f.lastHash, f.hasLast = seq+1, xxh3.Hash(payload), true
	f.replayed = nil // the live stream has caught up with the replay
	if len(payload) > f.options.MaxFrame {
		f.counts["batches"]++
		f.counts["oversize"]++
		f.clearUntrusted("resets")
		f.unreadable++
		f.resyncSoon()
		return
	}
	resets := f.counts["resets"]
	err := f.Apply(payload)
	f.warnOrphans()
	if err != nil {
		f.unreadable++
		if f.counts["resets"] != resets { // otherwise only a stored block is missing, and the rest is valid
			f.resyncSoon()
		}
		if bits.OnesCount64(f.unreadable) == 1 { // at powers of two: an engine may send nothing else
			f.log.Warn("kv events: cannot decode a message", "failures", f.unreadable, "error", err)
		}
	}
}

// maxResyncs bounds, per incarnation of the engine, the resyncs that fail because a message still
// cannot be read: the message may have been damaged in transit, or the engine may send it like
// that. Resyncs that succeed are not bounded; their intervals grow up to RetryMax.
const maxResyncs = 8

func (f *feed) resyncSoon() {
	if f.source.ReplayEndpoint != "" && f.resyncAt.IsZero() && f.failedResyncs < maxResyncs {
		f.resyncAt = time.Now().Add(backoff.Delay(f.options.RetryMin, f.options.RetryMax, f.resyncs))
		f.resyncs++
	}
}

// resync rebuilds the rank's blocks from all messages that the engine keeps.
func (f *feed) resync() {
	f.resyncAt = time.Time{}
	if f.known && f.hasReplay() {
		f.counts["resyncs"]++
		before := f.unreadable
		f.catchUp(false, f.suspect) // messages that arrived while the connection was lost are not trusted
		if f.unreadable != before {
			f.failedResyncs++
		}
	}
}
