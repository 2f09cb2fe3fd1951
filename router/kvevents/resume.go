package kvevents

import (
	"sync"
	"time"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Position is a feed's progress and what it had learned of the engine at that moment. Together with
// the rank's blocks at that moment or later it lets a restarted router continue where the previous
// one stopped. LastHash proves that the engine is the same incarnation: no other one can have
// published the message before Next, which contains its creation time.
type Position struct {
	Next       uint64                `json:"next"`
	LastHash   uint64                `json:"last_hash"` // XXH3-64 of message Next-1
	BlockSize  int                   `json:"block_size"`
	Group      int                   `json:"group,omitempty"`
	GroupKnown bool                  `json:"group_told,omitempty"`
	TierRatio  [kvindex.NumTiers]int `json:"coarse,omitempty"`
}

// resumeState is the state of a position from a previous router.
type resumeState struct {
	pending  bool
	deadline time.Time // unverified blocks are dropped at this time
}

// startResume sets a position whose blocks are already in the index. The feed counts as syncing
// until the engine has proven its identity (startPosition) or the rank is cleared.
func (f *feed) startResume(p *Position) {
	f.position = position{next: p.Next, lastHash: p.LastHash, hasLast: p.Next > 0}
	f.blockSize, f.group, f.groupKnown, f.tierRatio = p.BlockSize, p.Group, p.GroupKnown, p.TierRatio
	if p.BlockSize > 0 {
		f.source.Rank.EventBlockSize.Store(int64(p.BlockSize))
	}
	f.resume = resumeState{pending: true, deadline: time.Now().Add(f.options.maxIdleTimeouts / 2 * f.options.ReplayTimeout)}
	f.source.Rank.CachedBlocks.Store(int64(f.Index.CachedBlocks(f.source.Rank.Slot)))
}

// dropUnverified drops the blocks that could not be verified.
func (f *feed) dropUnverified() {
	f.resume = resumeState{}
	f.clearUntrusted("resets")
	f.position = position{}
	f.resetEngine()
	if !f.connected {
		f.warnNoConnection()
	}
}

// sharedPosition is a feed's position for other goroutines.
type sharedPosition struct {
	mu  sync.Mutex
	pos Position
	ok  bool
}

// publish is called between bursts. The index may be ahead of the published position, never behind.
// Applying the same messages again leads to the same blocks.
func (f *feed) publish() {
	ok := f.known && f.hasLast && f.state() == worker.FeedLive
	f.shared.mu.Lock()
	f.shared.ok = ok
	if ok {
		f.shared.pos = Position{Next: f.next, LastHash: f.lastHash, BlockSize: f.blockSize, Group: f.group, GroupKnown: f.groupKnown, TierRatio: f.tierRatio}
	}
	f.shared.mu.Unlock()
}

// Position returns the progress of a rank's feed. It returns false unless the feed is contiguous
// and has received a message. Blocks read from the index after the call are of that position or
// later.
func (f *Feeds) Position(id worker.ID) (Position, bool) {
	f.mu.Lock()
	fd := f.feeds[id]
	f.mu.Unlock()
	if fd == nil {
		return Position{}, false
	}
	fd.shared.mu.Lock()
	defer fd.shared.mu.Unlock()
	return fd.shared.pos, fd.shared.ok
}

// checkTail asks the engine, once after each burst of messages, whether it has published more than
// was received. A publisher whose queue is full drops messages; the next message shows the gap, but
// if none follows nothing else would.
func (f *feed) checkTail() {
	f.checkAt = time.Time{}
	if f.source.Bind && f.suspect && f.known && f.hasReplay() {
		f.verifyEngine()
		return
	}
	if !f.known || !f.hasReplay() || f.state() != worker.FeedLive {
		return
	}
	f.counts["tail_checks"]++
	f.checking = true
	f.catchUp(true, false)
	f.checking = false
}
