package kvevents

import (
	"math/bits"

	"github.com/zeebo/xxh3"
)

// apply puts one message into the index and moves the position past it.
func (f *feed) apply(seq uint64, payload []byte) {
	f.next, f.lastHash, f.hasLast = seq+1, xxh3.Hash(payload), true
	f.replayed = nil // the live stream has caught up with the replay
	if len(payload) > f.opt.MaxFrame {
		f.counts["batches"]++
		f.counts["oversize"]++
		f.distrust("resets")
		return
	}
	if err := f.Apply(payload); err != nil {
		f.unreadable++
		if bits.OnesCount64(f.unreadable) == 1 { // ever more seldom: an engine may send nothing else
			f.log.Warn("kv events: cannot read", "times", f.unreadable, "error", err)
		}
	}
}
