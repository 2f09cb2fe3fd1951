package compression

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"
)

// Bodies take turns at decoding. At most half of the cores decode at the same time, so that
// other requests find a core. A turn lasts for timeSlice bytes of output; then waiting bodies
// go first, so that a short body does not wait for long ones to end. Bodies that have started
// hold memory, which the budget counts; their number and the time that each waits are
// bounded.
//
// Bodies that need more than largeOutput bytes also take large turns. A body that waits for
// one has little memory and no decoding turn. Without large turns many bodies would take the
// budget step by step and none could finish. A body with a large turn waits for the memory
// of earlier bodies.
const (
	timeSlice           = 1 << 20 // bytes of output
	largeOutput         = 1 << 20 // bytes of output or of window
	maxLarge            = 4       // large turns
	memoryRetryInterval = 10 * time.Millisecond
	maxConcurrent       = 64 // bodies that have started or wait to start
	maxWaiting          = 5 * time.Second
)

// ErrBusy is the error of Decode if too many bodies are being decoded, or a body has waited
// too long for its turns.
var ErrBusy = errors.New("compression: too many bodies are being decoded")

// scheduler bounds concurrent decoding in the process.
type scheduler struct {
	slots      chan struct{} // one element for each body that has a turn
	large      chan struct{} // one element for each body that has a large turn
	maxPending int32
	maxWait    time.Duration
	pending    atomic.Int32 // bodies that have started or wait to start
	waiting    atomic.Int32 // bodies that wait for a turn
}

var decoding = newScheduler(max(1, runtime.GOMAXPROCS(0)/2), maxConcurrent, maxWaiting)

func newScheduler(slots, maxPending int, maxWait time.Duration) *scheduler {
	return &scheduler{slots: make(chan struct{}, slots), large: make(chan struct{}, min(slots, maxLarge)), maxPending: int32(maxPending), maxWait: maxWait}
}

// slot is the state of one body in a scheduler.
type slot struct {
	sched     *scheduler    // nil: the body has no turn
	waited    time.Duration // so far
	sliceLeft int           // bytes of output until the turn ends
	large     bool          // the body has a large turn
}

// acquire waits for the first turn. If it succeeds the caller must call release.
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

// waitSlot waits for a place in c, at most for the rest of the body's waiting time.
func (t *slot) waitSlot(c chan struct{}) error {
	began := time.Now()
	timer := time.NewTimer(max(0, t.sched.maxWait-t.waited))
	defer timer.Stop()
	select {
	case c <- struct{}{}: // channels serve waiting senders in order
		t.waited += time.Since(began)
		return nil
	case <-timer.C:
		return ErrBusy
	}
}

// addDecoded counts n bytes of output. At the end of its time slice the body lets waiting
// bodies go first. After an error the body has no turn and must not be released.
func (t *slot) addDecoded(n int) error {
	if t.sliceLeft -= n; t.sliceLeft > 0 || t.sched.waiting.Load() == 0 {
		return nil
	}
	<-t.sched.slots
	return t.reacquireFailed(t.tryAcquire())
}

// reacquireFailed ends the body's part in the scheduler if err is not nil, and returns err.
func (t *slot) reacquireFailed(err error) error {
	if err != nil {
		t.releaseLarge()
	}
	return err
}

// acquireLarge waits for a large turn, which the body keeps until release, and then until
// memory returns true. Other bodies decode in the meantime. After an error the body has no
// turn.
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

// release ends the body's turn if it has one.
func (t *slot) release() {
	if t.sched != nil {
		<-t.sched.slots
		t.releaseLarge()
	}
}

// releaseLarge ends the body's large turn and its part in the scheduler.
func (t *slot) releaseLarge() {
	if t.large {
		<-t.sched.large
	}
	t.sched.pending.Add(-1)
	t.sched = nil
}
