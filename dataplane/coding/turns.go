package coding

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
// Memory has turns as well: a body that needs more than largeRoom waits, with little memory
// and no decoding turn, until few others do. Else all of many take the budget step by step
// and none of them finds enough to end. Who has such a turn waits for memory that bodies
// before it still hold.
const (
	slice       = 1 << 20
	largeRoom   = 1 << 20 // what decodes to more, or has such a window, needs a large turn
	mostLarge   = 4
	memoryPause = 10 * time.Millisecond // between two tries of who waits for memory
	mostAtOnce  = 64                    // bodies that have begun, or wait to begin
	mostWaiting = 5 * time.Second
)

// ErrBusy is what Decode fails with when too many bodies are being decoded, or one has
// waited too long for its turns.
var ErrBusy = errors.New("coding: too many bodies are being decoded")

// turns bounds decoding in one process.
type turns struct {
	slots   chan struct{} // one element for each body that has its turn
	large   chan struct{} // likewise, of large ones
	most    int32
	patient time.Duration
	under   atomic.Int32 // way: bodies that have begun or wait to begin
	waiting atomic.Int32 // bodies
}

var decoding = newTurns(max(1, runtime.GOMAXPROCS(0)/2), mostAtOnce, mostWaiting)

func newTurns(slots, most int, patient time.Duration) *turns {
	return &turns{slots: make(chan struct{}, slots), large: make(chan struct{}, min(slots, mostLarge)), most: int32(most), patient: patient}
}

// turn is one body's.
type turn struct {
	of     *turns
	waited time.Duration
	left   int // of slice
	large  bool
}

// begin waits for the first turn; the caller must end it when err is nil.
func (t *turns) begin() (turn, error) {
	if t.under.Add(1) > t.most {
		t.under.Add(-1)
		return turn{}, ErrBusy
	}
	own := turn{of: t}
	if err := own.take(); err != nil {
		t.under.Add(-1)
		return turn{}, err
	}
	return own, nil
}

func (t *turn) take() error {
	t.left = slice
	select {
	case t.of.slots <- struct{}{}:
		return nil
	default:
	}
	t.of.waiting.Add(1)
	defer t.of.waiting.Add(-1)
	return t.await(t.of.slots)
}

// await takes a place in c within the time that the body may still wait.
func (t *turn) await(c chan struct{}) error {
	began := time.Now()
	timer := time.NewTimer(max(0, t.of.patient-t.waited))
	defer timer.Stop()
	select {
	case c <- struct{}{}: // those that wait longest come first
		t.waited += time.Since(began)
		return nil
	case <-timer.C:
		return ErrBusy
	}
}

// decoded notes n bytes more, and lets those that wait go first when it is their turn. On
// an error the turn has ended.
func (t *turn) decoded(n int) error {
	if t.left -= n; t.left > 0 || t.of.waiting.Load() == 0 {
		return nil
	}
	<-t.of.slots
	return t.back(t.take())
}

// back is the end of the body's turn where err, that of taking its place again, is not nil.
func (t *turn) back(err error) error {
	if err != nil {
		t.leave()
	}
	return err
}

// grows waits for the body's large turn, which it keeps to its end, and then until memory
// takes what it needs; others decode meanwhile. On an error the turn has ended.
func (t *turn) grows(memory func() bool) error {
	if t.large && memory() {
		return nil
	}
	<-t.of.slots
	if !t.large {
		if err := t.await(t.of.large); err != nil {
			return t.back(err)
		}
		t.large = true
	}
	for !memory() {
		if t.waited >= t.of.patient {
			return t.back(ErrBudget)
		}
		time.Sleep(memoryPause)
		t.waited += memoryPause
	}
	return t.back(t.take())
}

// end ends the body's turn, where it has not ended.
func (t *turn) end() {
	if t.of != nil {
		<-t.of.slots
		t.leave()
	}
}

// leave gives up what the body has beside its decoding turn.
func (t *turn) leave() {
	if t.large {
		<-t.of.large
	}
	t.of.under.Add(-1)
	t.of = nil
}
