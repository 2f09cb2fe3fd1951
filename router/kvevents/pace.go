package kvevents

import (
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// questions is how many catch-ups begin at the same time. When a thousand engines come
	// back together, each has its answers read soon after it gives them, and what is kept
	// for all of them stays small.
	questions = 32
	// questionTime is after how long a catch-up no longer counts among them: one that is
	// long, or whose engine does not answer, keeps nobody waiting.
	questionTime = 500 * time.Millisecond
	// burst is how many answers are applied before others have their turn.
	burst = 64
)

// pace bounds what catch-ups take of the machine: requests are served meanwhile.
type pace struct {
	asking chan struct{}
	turn   chan struct{} // to apply what was answered
}

func newPace() *pace {
	return &pace{asking: make(chan struct{}, questions), turn: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
}

// ask waits until one more catch-up may begin; false when ctx ended before. done is to be
// called at its end.
func (p *pace) ask(ctx context.Context) (done func(), ok bool) {
	select {
	case p.asking <- struct{}{}:
	case <-ctx.Done():
		return nil, false
	}
	once := sync.OnceFunc(func() { <-p.asking })
	timer := time.AfterFunc(questionTime, once)
	return func() { timer.Stop(); once() }, true
}

// turns is one catch-up's share of the processors.
type turns struct {
	pace *pace
	has  bool
	left int
}

// take waits for a turn, unless there is one that is not over; false when ctx ended before.
func (t *turns) take(ctx context.Context) bool {
	if t.has && t.left > 0 {
		t.left--
		return true
	}
	if t.has {
		t.give()
		runtime.Gosched()
	}
	select {
	case t.pace.turn <- struct{}{}:
		t.has, t.left = true, burst
		return true
	case <-ctx.Done():
		return false
	}
}

// give ends the turn.
func (t *turns) give() {
	if t.has {
		t.has = false
		<-t.pace.turn
	}
}
