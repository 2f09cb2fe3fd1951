package kvevents

import (
	"math/bits"
	"time"

	"github.com/zeebo/xxh3"
)

// apply puts one message into the index and moves the position past it.
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
		if f.counts["resets"] != resets { // else a block is missed, and what is held stands
			f.resyncSoon()
		}
		if bits.OnesCount64(f.unreadable) == 1 { // ever more seldom: an engine may send nothing else
			f.log.Warn("kv events: cannot read", "times", f.unreadable, "error", err)
		}
	}
}

// maxResyncs bounds, for one life of an engine, how often all that it keeps is asked
// for in vain because a message could not be read: it may have been damaged on its
// way, or be like that. What was damaged on its way is asked for each time, ever
// later, up to RetryMax.
const maxResyncs = 8

func (f *feed) resyncSoon() {
	if f.source.ReplayEndpoint != "" && f.resyncAt.IsZero() && f.failedResyncs < maxResyncs {
		f.resyncAt = time.Now().Add(min(f.options.RetryMin<<min(f.resyncs, 16), f.options.RetryMax))
		f.resyncs++
	}
}

// resync learns anew what the rank holds from all that the engine keeps.
func (f *feed) resync() {
	f.resyncAt = time.Time{}
	if f.known && f.hasReplay() {
		f.counts["resyncs"]++
		before := f.unreadable
		f.catchUp(false, f.suspect) // what came while the connection was lost is not believed for it
		if f.unreadable != before {
			f.failedResyncs++
		}
	}
}
