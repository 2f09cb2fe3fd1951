package recording

import (
	"time"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// maxDeferred bounds the items that wait while contents are written; their bytes count
// against the queue's bound like those in it.
const maxDeferred = 1 << 18

// writeContents writes what ranks hold. What happens meanwhile is queued, taken out of
// the queue so that it does not overflow by their number, and written afterwards:
// contents may show a change before its entry comes, never lack one whose entry
// came before. So the index that is made from the recording is right once these
// entries have been read. It ends early when the recording is stopped.
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
				share = 0 // or a chain that follows this one would be an orphan
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

// deferQueued takes what is in the queue.
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
