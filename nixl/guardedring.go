package nixl

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// guardedRing is a ring that goroutines may use at any time, also while it is unmapped:
// users counts those inside the block, and ended keeps others from entering.
type guardedRing struct {
	*ring
	users atomic.Int64
	ended atomic.Bool
}

// acquire reports whether the block may be used. If so, the caller calls release
// afterwards.
func (g *guardedRing) acquire() bool {
	g.users.Add(1)
	if g.ended.Load() {
		g.users.Add(-1)
		return false
	}
	return true
}

func (g *guardedRing) release() { g.users.Add(-1) }

func (g *guardedRing) push(c *command) error {
	if !g.acquire() {
		return ErrClosed
	}
	err := g.ring.push(c)
	g.release()
	return err
}

func (g *guardedRing) post(peer uint64, message []byte) error {
	c := command{op: opNotify, handle: peer, data: message}
	return g.push(&c)
}

func (g *guardedRing) expect(delta int64) {
	if g.acquire() {
		g.ring.expect(delta)
		g.release()
	}
}

func (g *guardedRing) busy() (uint32, time.Duration) {
	if !g.acquire() {
		return 0, 0
	}
	defer g.release()
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

func (g *guardedRing) counters() Counters {
	if !g.acquire() {
		return Counters{}
	}
	defer g.release()
	return Counters{Unmatched: g.head.foreign.Load(), Unread: g.head.unread.Load(), Signals: g.head.signals.Load(), Stuck: g.head.stuck.Load()}
}

// awaitStopped waits until the owner has ended; it returns false if that takes too
// long.
func (g *guardedRing) awaitStopped(by time.Time) bool {
	for g.head.gone.Load() == 0 {
		if time.Now().After(by) {
			return false
		}
		time.Sleep(200 * time.Microsecond)
	}
	return true
}

// unmap unmaps the block when the last user has released it.
func (g *guardedRing) unmap() {
	g.ended.Store(true)
	for g.users.Load() != 0 {
		runtime.Gosched()
	}
	g.free()
}
