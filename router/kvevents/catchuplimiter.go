package kvevents

import (
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// maxCatchUps is the number of catch-ups that may start concurrently. When a thousand engines
	// return together, each one's answers are then read soon after they arrive, and little memory
	// is needed to buffer them.
	maxCatchUps = 32
	// catchUpSlotTime is the time after which a catch-up gives its slot to another, so that a long
	// one, or an engine that does not answer, delays nobody.
	catchUpSlotTime = 500 * time.Millisecond
	// applyBurst is the number of answers that are applied before other catch-ups get a turn.
	applyBurst = 64
)

// catchUpLimiter bounds the CPU time and memory of catch-ups, so that requests are served
// meanwhile.
type catchUpLimiter struct {
	starting chan struct{}
	applying chan struct{} // to apply answers
}

func newCatchUpLimiter() *catchUpLimiter {
	return &catchUpLimiter{starting: make(chan struct{}, maxCatchUps), applying: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
}

// acquire waits until one more catch-up may start; it returns false if ctx ended first. The caller
// calls done when the catch-up ends.
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

// applyTurn is one catch-up's turn to apply answers.
type applyTurn struct {
	limiter   *catchUpLimiter
	has       bool
	remaining int
}

// acquire waits for a turn unless the current one continues; it returns false if ctx ended first.
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
