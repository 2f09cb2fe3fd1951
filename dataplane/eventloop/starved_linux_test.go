package eventloop

import (
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// blockingHandler is an echo that holds its loop up, once.
type blockingHandler struct {
	*echo
	once sync.Once
	time time.Duration
}

func (s *blockingHandler) Process(p []byte, now time.Time) ([]byte, bool) {
	s.once.Do(func() { testwait.Pace(s.time) })
	return s.echo.Process(p, now)
}

// An engine's silence while the loop was stopped, as by a stopped process, is not
// its silence; what it does not say from then on is.
func TestStarvedLoop(t *testing.T) {
	t.Parallel()
	const idle, held = 1500 * time.Millisecond, 2500 * time.Millisecond
	notified := make(chan time.Duration, 10)
	s, err := Start(Options{Loops: 1, Tick: 10 * time.Millisecond, OnStarved: func(d time.Duration) { notified <- d }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	silent := open(t, s, func(t *Task) { t.Idle = idle })
	busy := open(t, s, func(t *Task) { t.Handler = &blockingHandler{echo: t.Handler.(*echo), time: held} })
	busy.send("x")
	busy.expectReceived("x")
	select {
	case d := <-notified:
		if d < held-time.Second || d > testTimeout {
			t.Errorf("notified of %v, want about %v", d, held)
		}
	case <-time.After(testTimeout):
		t.Fatal("OnStarved was not called")
	}
	silent.send("y")
	silent.expectReceived("y")
	silent.expectOpen()
	silent.expectEnd(ReadIdle)
}
