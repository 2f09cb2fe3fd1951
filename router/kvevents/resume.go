package kvevents

import (
	"sync"
	"time"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Position is how far a rank's feed had come at some moment, and what it had
// learned of the engine: with the rank's blocks at that moment or later, what a
// router that was restarted needs to go on where the last one stopped. LastHash
// proves that the engine is the same: no other life of it can have made the
// message before Next, which bears the time it was made at.
type Position struct {
	Next      uint64                `json:"next"`
	LastHash  uint64                `json:"last_hash"` // XXH3-64 of message Next-1
	BlockSize int                   `json:"block_size"`
	Group     int                   `json:"group,omitempty"`
	GroupTold bool                  `json:"group_told,omitempty"`
	Coarse    [kvindex.NumTiers]int `json:"coarse,omitempty"`
}

// resumption is what a feed was told of a life before the router's own.
type resumption struct {
	pending bool
	by      time.Time // what is not proven by then is dropped
}

// resume takes up a position whose blocks are in the index already. They are
// believed as those of a feed that is syncing until the engine has proven itself
// (begin), or the rank is cleared.
func (f *feed) resume(p *Position) {
	f.position = position{next: p.Next, lastHash: p.LastHash, hasLast: p.Next > 0}
	f.blockSize, f.group, f.groupTold, f.coarse = p.BlockSize, p.Group, p.GroupTold, p.Coarse
	if p.BlockSize > 0 {
		f.src.Rank.EventBlockSize.Store(int64(p.BlockSize))
	}
	f.resuming = resumption{pending: true, by: time.Now().Add(f.opt.waits / 2 * f.opt.ReplayTimeout)}
	f.src.Rank.Held.Store(int64(f.Index.Held(f.src.Rank.Slot)))
}

// unresumed drops what could not be proven.
func (f *feed) unresumed() {
	f.resuming = resumption{}
	f.distrust("resets")
	f.position = position{}
	f.forget()
	if !f.connected {
		f.unheard()
	}
}

// published is a feed's position for others to read.
type published struct {
	mu  sync.Mutex
	pos Position
	ok  bool
}

// publish is called between bursts. The index may be ahead of the position when
// it is read, never behind: applying the same messages once more leads to the
// same blocks.
func (f *feed) publish() {
	ok := f.known && f.hasLast && f.state() == worker.FeedLive
	f.shown.mu.Lock()
	f.shown.ok = ok
	if ok {
		f.shown.pos = Position{Next: f.next, LastHash: f.lastHash, BlockSize: f.blockSize, Group: f.group, GroupTold: f.groupTold, Coarse: f.coarse}
	}
	f.shown.mu.Unlock()
}

// Position is how far a rank's feed has come; false unless it is contiguous and
// has had a message. Blocks read from the index after the call are of that
// position or later.
func (f *Feeds) Position(id worker.ID) (Position, bool) {
	f.mu.Lock()
	fd := f.feeds[id]
	f.mu.Unlock()
	if fd == nil {
		return Position{}, false
	}
	fd.shown.mu.Lock()
	defer fd.shown.mu.Unlock()
	return fd.shown.pos, fd.shown.ok
}

// checkTail asks the engine, once after each burst of messages, whether it has
// published more than came. A publisher whose queue is full drops messages, and
// the next one that comes shows it; when none comes, nobody would ever know.
func (f *feed) checkTail() {
	f.checkAt = time.Time{}
	if f.src.Bind && f.suspect && f.known && f.canAsk() {
		f.stillThere()
		return
	}
	if !f.known || !f.canAsk() || f.state() != worker.FeedLive {
		return
	}
	f.counts["tail_checks"]++
	f.checking = true
	f.catchUp(true, false)
	f.checking = false
}
