package nixl

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// guarded is a ring that may be entered from anywhere at any time, also while it is
// being given back: users are inside of the block; ended keeps more from entering.
type guarded struct {
	*ring
	users atomic.Int64
	ended atomic.Bool
}

// enter answers whether the block may be touched; leave when it did.
func (g *guarded) enter() bool {
	g.users.Add(1)
	if g.ended.Load() {
		g.users.Add(-1)
		return false
	}
	return true
}

func (g *guarded) leave() { g.users.Add(-1) }

func (g *guarded) push(c *command) error {
	if !g.enter() {
		return ErrClosed
	}
	err := g.ring.push(c)
	g.leave()
	return err
}

func (g *guarded) post(peer uint64, message []byte) error {
	c := command{op: opNotify, handle: peer, data: message}
	return g.push(&c)
}

func (g *guarded) expect(delta int64) {
	if g.enter() {
		g.ring.expect(delta)
		g.leave()
	}
}

func (g *guarded) busy() (uint32, time.Duration) {
	if !g.enter() {
		return 0, 0
	}
	defer g.leave()
	since := g.head.busySince.Load()
	if since == 0 {
		return 0, 0
	}
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return 0, 0
	}
	return uint32(g.head.busyOp.Load()), max(0, time.Duration(uint64(now.Nano())-since))
}

func (g *guarded) counters() Counters {
	if !g.enter() {
		return Counters{}
	}
	defer g.leave()
	return Counters{Unmatched: g.head.foreign.Load(), Unread: g.head.unread.Load(), Signals: g.head.signals.Load(), Stuck: g.head.stuck.Load()}
}

// gone waits until the owner has ended; false when it has not by then.
func (g *guarded) gone(by time.Time) bool {
	for g.head.gone.Load() == 0 {
		if time.Now().After(by) {
			return false
		}
		time.Sleep(200 * time.Microsecond)
	}
	return true
}

// giveBack unmaps the block when the last user has left it.
func (g *guarded) giveBack() {
	g.ended.Store(true)
	for g.users.Load() != 0 {
		runtime.Gosched()
	}
	g.free()
}
