package recording

import (
	"time"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// maxDeferred is the maximum number of items deferred while initial blocks are written. Their
// bytes count against the queue's limit.
const maxDeferred = 1 << 18

// writeContents writes the blocks that ranks hold. Entries that arrive meanwhile are taken from
// the queue, so that it does not overflow, and written afterwards. The initial blocks may
// therefore already include a change whose entry follows, but never lack a change whose entry
// came before. An index that is built from the recording is correct once these entries have
// been read. writeContents returns early when the recording is stopped.
func (s *session) writeContents(ranks []*worker.Rank) (err error) {
	if s.r.opt.Contents == nil {
		return nil
	}
	left, over, stopped := s.r.opt.MaxInitialBlocks, uint64(0), false
	for i, rank := range ranks {
		share := left / (len(ranks) - i)
		left -= share
		s.r.opt.Contents(rank, func(exact bool, x *kvindex.Exported) bool {
			s.deferQueued()
			select {
			case <-s.stop:
				stopped = true
				return false
			default:
			}
			if len(x.Seqs) > share {
				share = 0 // a chain that follows this one would have no parent
				over += uint64(len(x.Seqs))
				return true
			}
			share -= len(x.Seqs)
			e := Entry{Kind: InitialBlocks, At: time.Now(), Slot: rank.Slot, Tier: x.Tier, Exact: exact, HasParent: x.HasParent, Parent: x.Parent, ParentSeq: x.ParentSeq,
				Engine: x.Engine, Seqs: x.Seqs}
			s.entries = e.Append(s.entries)
			s.r.entries.Add(1)
			if len(s.entries) >= frameBytes {
				err = s.flush()
			}
			return err == nil
		})
		if err != nil || stopped {
			return err
		}
		left += share
	}
	if over > 0 {
		e := Entry{Kind: InitialSkipped, At: time.Now(), Count: over}
		s.entries = e.Append(s.entries)
	}
	return nil
}

// deferQueued moves the queued items to deferred.
func (s *session) deferQueued() {
	for len(s.deferred) < maxDeferred {
		select {
		case it := <-s.queue:
			s.deferred = append(s.deferred, it)
		default:
			return
		}
	}
}
