package eventloop

import (
	"testing"
	"time"
)

// relayer is a Handler that costs nothing.
type relayer struct{ n int }

func (r *relayer) Process(p []byte, _ time.Time) ([]byte, bool) { r.n++; return p, false }
func (r *relayer) Ended(End)                                    {}

// A read, the Handler's look and the write allocate nothing. The loop is turned by the
// test itself.
func TestTurnAllocatesNothing(t *testing.T) {
	l := newLoop(&Options{Tick: time.Hour, OnFail: func(err error) { t.Error(err) }})
	var err error
	if l.poll, err = openEpoll(l); err != nil {
		t.Fatal(err)
	}
	h := &relayer{}
	task := &Task{Handler: h, WriteTimeout: time.Minute}
	in, engine := pair(t)
	out, client := pair(t)
	task.In, task.Out = in, out
	l.admit(task)
	l.turn()
	event := make([]byte, 250)
	step := func() {
		had := h.n
		_, _ = engine.Write(event)
		for h.n == had {
			l.turn()
		}
		for len(l.outbox) > 0 {
			l.turn()
		}
	}
	step()
	got := make([]byte, 1<<20)
	if n := testing.AllocsPerRun(100, step); n != 0 && !raceEnabled {
		t.Errorf("%v allocations for an event", n)
	}
	if n, err := client.Read(got); n == 0 || err != nil {
		t.Error(n, err)
	}
	l.stop()
	for !l.turn() {
	}
}
