package kvevents

import (
	"math/bits"

	"github.com/zeebo/xxh3"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
)

// apply puts one batch into the index and moves the position past it.
func (f *feed) apply(seq uint64, payload []byte) {
	f.next, f.lastHash, f.hasLast = seq+1, xxh3.Hash(payload), true
	f.replayed = nil // the live stream has caught up with the replay
	f.counts["batches"]++
	if len(payload) > f.opt.MaxFrame {
		f.counts["oversize"]++
		f.distrust("resets")
		return
	}
	b, err := f.dec.Reset(payload)
	if err != nil {
		f.garbage(err)
		f.distrust("resets")
		return
	}
	if b.HasRank && !f.ours(b.Rank) {
		f.counts["wrong_rank"]++
		return
	}
	for {
		more, err := f.dec.Next(&f.ev)
		switch {
		case !more:
			return
		case err != nil:
			f.garbage(err)
			// A store that cannot be read is a block missed. Anything else may
			// have been a removal, without which the rank is believed to hold
			// what it does not.
			if f.ev.Kind != BlockStored {
				f.distrust("resets")
			}
		default:
			f.event(&f.ev)
		}
	}
}

// ours says whether a batch of that rank is this feed's. A worker of whose ranks
// nothing was said may be one rank of a larger deployment and call itself so.
func (f *feed) ours(rank int) bool {
	r := f.src.Rank
	return rank == int(r.ID.Rank) || r.Worker != nil && len(r.Worker.Ranks) == 1 && len(r.Worker.Spec.Ranks) == 0
}

func (f *feed) garbage(err error) {
	f.counts["garbage"]++
	f.unreadable++
	if bits.OnesCount64(f.unreadable) == 1 { // ever more seldom: an engine may send nothing else
		f.log.Warn("kv events: cannot read", "times", f.unreadable, "error", err)
	}
}

func (f *feed) event(ev *Event) {
	slot := f.src.Rank.Slot
	if ev.Kind == AllBlocksCleared {
		f.counts["cleared"]++
		f.opt.Index.Clear(slot)
		return
	}
	tier, known := TierOf(ev.Medium)
	if ev.Kind == Unknown || !known || ev.Group != 0 || ev.Remote {
		f.counts["ignored"]++
		return
	}
	if ev.Kind == BlockRemoved {
		removed, unknown := f.opt.Index.Remove(slot, tier, ev.Hashes)
		f.counts["removed"] += removed
		f.counts["unknown_removed"] += unknown
		return
	}
	if len(ev.Locals) == 0 || !f.sameBlockSize(ev.BlockSize) {
		f.counts["ignored"]++
		return
	}
	f.stored = kvindex.Stored{
		Slot: slot, Tier: tier, Salt: blockhash.NewSalt(f.src.Model, ev.LoRA, ev.CacheSalt),
		HasParent: ev.HasParent, Parent: ev.Parent, Engine: ev.Hashes, Local: ev.Locals,
	}
	res := f.opt.Index.Store(&f.stored)
	f.counts["stored"] += res.Added
	f.counts["repeated"] += res.Repeated
	if res.Orphan {
		f.counts["orphans"]++
	}
}

// sameBlockSize learns the rank's block size. Engines also send short blocks, at
// the end of a prompt or of hybrid models' groups: the largest size seen is the
// one prompts are cut by, and what was stored by a smaller one is of no use.
func (f *feed) sameBlockSize(size int) bool {
	if size > f.blockSize {
		if f.blockSize != 0 {
			f.distrust("resets")
		}
		f.blockSize = size
		f.src.Rank.EventBlockSize.Store(int64(size))
	}
	return size == f.blockSize
}
