package compression

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"
)

// Decoding takes turns: half of the cores decode at once, so that however many bodies are
// decoded, other requests find a core. A body has its turn for slice bytes of what it
// decodes to, then those that wait have theirs: a short one does not wait for long ones to
// end. Those that have begun hold memory, which the budget counts; how many there are is
// bounded, as is the time that each waits.
//
// Memory has turns as well: a body that needs more than largeOutput waits, with little memory
// and no decoding turn, until few others do. Else all of many take the budget step by step
// and none of them finds enough to end. Who has such a turn waits for memory that bodies
// before it still hold.
const (
	timeSlice           = 1 << 20
	largeOutput         = 1 << 20 // what decodes to more, or has such a window, needs a large turn
	maxLarge            = 4
	memoryRetryInterval = 10 * time.Millisecond // between two tries of who waits for memory
	maxConcurrent       = 64                    // bodies that have begun, or wait to begin
	maxWaiting          = 5 * time.Second
)

// ErrBusy is what Decode fails with when too many bodies are being decoded, or one has
// waited too long for its turns.
var ErrBusy = errors.New("coding: too many bodies are being decoded")

// scheduler bounds decoding in one process.
type scheduler struct {
	slots      chan struct{} // one element for each body that has its turn
	large      chan struct{} // likewise, of large ones
	maxPending int32
	maxWait    time.Duration
	pending    atomic.Int32 // way: bodies that have begun or wait to begin
	waiting    atomic.Int32 // bodies
}

var decoding = newScheduler(max(1, runtime.GOMAXPROCS(0)/2), maxConcurrent, maxWaiting)

func newScheduler(slots, maxPending int, patient time.Duration) *scheduler {
	return &scheduler{slots: make(chan struct{}, slots), large: make(chan struct{}, min(slots, maxLarge)), maxPending: int32(maxPending), maxWait: patient}
}

// slot is one body's.
type slot struct {
	sched     *scheduler
	waited    time.Duration
	sliceLeft int // of slice
	large     bool
}

// acquire waits for the first turn; the caller must end it when err is nil.
func (t *scheduler) acquire() (slot, error) {
	if t.pending.Add(1) > t.maxPending {
		t.pending.Add(-1)
		return slot{}, ErrBusy
	}
	own := slot{sched: t}
	if err := own.tryAcquire(); err != nil {
		t.pending.Add(-1)
		return slot{}, err
	}
	return own, nil
}

func (t *slot) tryAcquire() error {
	t.sliceLeft = timeSlice
	select {
	case t.sched.slots <- struct{}{}:
		return nil
	default:
	}
	t.sched.waiting.Add(1)
	defer t.sched.waiting.Add(-1)
	return t.waitSlot(t.sched.slots)
}

// waitSlot takes a place in c within the time that the body may still wait.
func (t *slot) waitSlot(c chan struct{}) error {
	began := time.Now()
	timer := time.NewTimer(max(0, t.sched.maxWait-t.waited))
	defer timer.Stop()
	select {
	case c <- struct{}{}: // those that wait longest come first
		t.waited += time.Since(began)
		return nil
	case <-timer.C:
		return ErrBusy
	}
}

// addDecoded notes n bytes more, and lets those that wait go first when it is their turn. On
// an error the turn has ended.
func (t *slot) addDecoded(n int) error {
	if t.sliceLeft -= n; t.sliceLeft > 0 || t.sched.waiting.Load() == 0 {
		return nil
	}
	<-t.sched.slots
	return t.reacquireFailed(t.tryAcquire())
}

// reacquireFailed is the end of the body's turn where err, that of taking its place again, is not nil.
func (t *slot) reacquireFailed(err error) error {
	if err != nil {
		t.releaseLarge()
	}
	return err
}

// acquireLarge waits for the body's large turn, which it keeps to its end, and then until memory
// takes what it needs; others decode meanwhile. On an error the turn has ended.
func (t *slot) acquireLarge(memory func() bool) error {
	if t.large && memory() {
		return nil
	}
	<-t.sched.slots
	if !t.large {
		if err := t.waitSlot(t.sched.large); err != nil {
			return t.reacquireFailed(err)
		}
		t.large = true
	}
	for !memory() {
		if t.waited >= t.sched.maxWait {
			return t.reacquireFailed(ErrBudget)
		}
		time.Sleep(memoryRetryInterval)
		t.waited += memoryRetryInterval
	}
	return t.reacquireFailed(t.tryAcquire())
}

// release ends the body's turn, where it has not ended.
func (t *slot) release() {
	if t.sched != nil {
		<-t.sched.slots
		t.releaseLarge()
	}
}

// releaseLarge gives up what the body has beside its decoding turn.
func (t *slot) releaseLarge() {
	if t.large {
		<-t.sched.large
	}
	t.sched.pending.Add(-1)
	t.sched = nil
}
