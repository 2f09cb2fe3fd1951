package eventloop

import (
	"errors"
	"io"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/rawsocket"
)

func TestStreams(t *testing.T) {
	s := begin(t, 1)
	// Several, some after others, so that slots are used again.
	for range 3 {
		var all []*stream
		for range 20 {
			all = append(all, open(t, s, nil))
		}
		for _, text := range []string{"a", "bc", strings.Repeat("d", 200_000), "e"} {
			for _, st := range all {
				st.send(text)
			}
			for _, st := range all {
				st.expectReceived(text)
			}
		}
		for i, st := range all {
			switch i % 3 {
			case 0:
				st.send("end$")
				st.expectReceived("end$")
				if e := st.expectEnd(Done); e.Sent != 200_008 || e.Unsent != nil {
					t.Errorf("%+v", e)
				}
			case 1:
				st.send("last")
				_ = st.engine.Close()
				st.expectReceived("last")
				if e := st.expectEnd(ReadFailed); e.Err != io.EOF || e.Sent != 200_008 {
					t.Errorf("%+v", e)
				}
			default:
				_ = st.engine.SetLinger(0)
				_ = st.engine.Close()
				if e := st.expectEnd(ReadFailed); !errors.Is(e.Err, syscall.ECONNRESET) {
					t.Errorf("%+v", e)
				}
			}
		}
		testwait.Until(t, "no stream", func() bool { return s.Streams() == 0 })
	}
}

// After the end the descriptors are the caller's again, and what comes is left alone.
func TestAfterTheEnd(t *testing.T) {
	s := begin(t, 1)
	st := open(t, s, nil)
	st.send("x$")
	st.expectReceived("x$")
	st.expectEnd(Done)
	st.send("late")
	buf := make([]byte, 8)
	testwait.Until(t, "the descriptor is ours again", func() bool {
		n, errno := rawsocket.Recv(st.task.In, buf)
		return errno == 0 && n == 4
	})
}

func TestClientGone(t *testing.T) {
	s := begin(t, 1)
	st, other := open(t, s, nil), open(t, s, nil)
	_ = st.client.SetLinger(0)
	_ = st.client.Close()
	testwait.Until(t, "the write fails", func() bool {
		_, _ = io.WriteString(st.engine, "x")
		return len(st.h.ends) > 0
	})
	if e := st.expectEnd(SendFailed); !errors.Is(e.Err, syscall.EPIPE) && !errors.Is(e.Err, syscall.ECONNRESET) {
		t.Error(e.Err)
	}
	other.send("on")
	other.expectReceived("on")
}

func TestCancel(t *testing.T) {
	s := begin(t, 1)
	st := open(t, s, nil)
	began := time.Now()
	st.task.Cancel()
	st.expectEnd(Cancelled)
	t.Logf("left %v after the cut", time.Since(began))
	st.task.Cancel() // does nothing
	st.task.Cancel()

	before := open(t, s, func(t *Task) { t.Cancel() })
	before.expectEnd(Cancelled)
	if n := before.h.count(); n != 0 {
		t.Errorf("%d bytes taken of a stream cut before it began", n)
	}
}

// Cuts and ends at the same time: Left comes once.
func TestCancelAtAnyTime(t *testing.T) {
	s := begin(t, 2)
	for i := range 60 {
		st := open(t, s, nil)
		go st.task.Cancel()
		if i%2 == 0 {
			_, _ = io.WriteString(st.engine, "x$")
		}
		select {
		case <-st.h.ends:
		case <-time.After(testTimeout):
			t.Fatal("not left")
		}
	}
	testwait.Until(t, "no stream", func() bool { return s.Streams() == 0 })
}

func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	s := begin(t, 1)
	// A machine that stands still for idle is silent itself: then with more of it.
	for idle := 150 * time.Millisecond; ; idle *= 2 {
		silent := open(t, s, func(t *Task) { t.Idle = idle })
		talks := open(t, s, func(t *Task) { t.Idle = idle })
		late := open(t, s, func(t *Task) { t.SetDeadline(time.Now().Add(idle)) })
		began, lastEvent, pause := time.Now(), time.Now(), time.Duration(0)
		for time.Since(began) < 3*idle {
			talks.send("x")
			if pause = max(pause, time.Since(lastEvent)); pause >= idle/2 {
				break
			}
			lastEvent = time.Now()
			talks.expectReceived("x")
			testwait.Pace(idle / 10)
		}
		silent.expectEnd(ReadIdle)
		late.expectEnd(DeadlineExceeded)
		stays := len(talks.h.ends) == 0
		if pause = max(pause, time.Since(lastEvent)); stays && pause < idle/2 {
			return
		}
		if pause < idle/2 || idle > testTimeout/8 {
			t.Fatalf("left after %v at most without a byte, of %v: %v", pause, idle, !stays)
		}
	}
}

// TestDeadline: a task's time is over when it says, not when the loop next looks for
// timeouts; a task attached meanwhile does not delay it.
func TestDeadline(t *testing.T) {
	s, err := Start(Options{Loops: 1, Tick: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	stays := open(t, s, nil)
	for range 3 {
		soon := time.Now().Add(50 * time.Millisecond)
		late := open(t, s, func(t *Task) { t.SetDeadline(soon) })
		later := open(t, s, func(t *Task) { t.SetDeadline(soon.Add(50 * time.Millisecond)) })
		last := open(t, s, func(t *Task) { t.SetDeadline(time.Now().Add(time.Hour)) })
		late.expectEnd(DeadlineExceeded)
		later.expectEnd(DeadlineExceeded)
		if now := time.Now(); now.Before(soon.Add(50 * time.Millisecond)) {
			t.Errorf("over %v before its time", soon.Add(50*time.Millisecond).Sub(now))
		}
		last.expectOpen()
		last.task.Cancel()
		last.expectEnd(Cancelled)
	}
	stays.expectOpen()
}

// A Handler's panic is its own stream's affair.
func TestPanic(t *testing.T) {
	s := begin(t, 1)
	bad, good := open(t, s, nil), open(t, s, nil)
	for range 3 {
		bad.send("!")
		if e := bad.expectEnd(Panicked); e.Err == nil || !strings.Contains(e.Err.Error(), "a Handler's") {
			t.Error(e.Err)
		}
		bad = open(t, s, nil)
		good.send("on")
		good.expectReceived("on")
	}
}

func TestClose(t *testing.T) {
	s := begin(t, 2)
	var all []*stream
	for range 10 {
		all = append(all, open(t, s, nil))
	}
	s.Close()
	for _, st := range all {
		st.expectEnd(Cancelled)
		st.task.Cancel()
	}
	open(t, s, nil).expectEnd(Cancelled)
	if n := s.Streams(); n != 0 {
		t.Errorf("%d streams left", n)
	}
}

// A loop that has ended by itself gets no more streams.
func TestEndedLoop(t *testing.T) {
	s := begin(t, 2)
	s.all[0].stop()
	<-s.all[0].done
	for range 4 {
		st := open(t, s, nil)
		st.send("on")
		st.expectReceived("on")
	}
	s.all[1].stop()
	<-s.all[1].done
	open(t, s, nil).expectEnd(Cancelled)
	if n := s.Streams(); n != 0 {
		t.Errorf("%d streams left", n)
	}
}

// A task that is cut while it is attached, while the loops are closed, is notified once.
func TestEndedOnce(t *testing.T) {
	in, _ := pair(t)
	out, _ := pair(t)
	for range 200 {
		s := begin(t, 1)
		h := &echo{ends: make(chan End, 2)}
		task := &Task{In: in, Out: out, Handler: h, WriteTimeout: time.Minute}
		var wg sync.WaitGroup
		wg.Go(func() { s.Attach(task) })
		wg.Go(task.Cancel)
		wg.Go(s.Close)
		wg.Wait()
		if e := <-h.ends; e.Reason != Cancelled || len(h.ends) > 0 {
			t.Fatalf("%+v, and %d more", e, len(h.ends))
		}
		if n := s.Streams(); n != 0 {
			t.Fatalf("%d streams left", n)
		}
	}
}
