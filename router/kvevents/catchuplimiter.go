package kvevents

import (
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// maxCatchUps is how many catch-ups begin at the same time. When a thousand engines come
	// back together, each has its answers read soon after it gives them, and what is kept
	// for all of them stays small.
	maxCatchUps = 32
	// catchUpSlotTime is after how long a catch-up no longer counts among them: one that is
	// long, or whose engine does not answer, keeps nobody waiting.
	catchUpSlotTime = 500 * time.Millisecond
	// applyBurst is how many answers are applied before others have their turn.
	applyBurst = 64
)

// catchUpLimiter bounds what catch-ups take of the machine: requests are served meanwhile.
type catchUpLimiter struct {
	starting chan struct{}
	applying chan struct{} // to apply what was answered
}

func newCatchUpLimiter() *catchUpLimiter {
	return &catchUpLimiter{starting: make(chan struct{}, maxCatchUps), applying: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
}

// acquire waits until one more catch-up may begin; false when ctx ended before. done is to be
// called at its end.
func (p *catchUpLimiter) acquire(ctx context.Context) (done func(), ok bool) {
	select {
	case p.starting <- struct{}{}:
	case <-ctx.Done():
		return nil, false
	}
	once := sync.OnceFunc(func() { <-p.starting })
	timer := time.AfterFunc(catchUpSlotTime, once)
	return func() { timer.Stop(); once() }, true
}

// applyTurn is one catch-up's share of the processors.
type applyTurn struct {
	limiter   *catchUpLimiter
	has       bool
	remaining int
}

// acquire waits for a turn, unless there is one that is not over; false when ctx ended before.
func (t *applyTurn) acquire(ctx context.Context) bool {
	if t.has && t.remaining > 0 {
		t.remaining--
		return true
	}
	if t.has {
		t.release()
		runtime.Gosched()
	}
	select {
	case t.limiter.applying <- struct{}{}:
		t.has, t.remaining = true, applyBurst
		return true
	case <-ctx.Done():
		return false
	}
}

// release ends the turn.
func (t *applyTurn) release() {
	if t.has {
		t.has = false
		<-t.limiter.applying
	}
}
