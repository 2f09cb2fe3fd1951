package loop

import (
	"errors"
	"io"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/dataplane/sock"
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
				st.wants(text)
			}
		}
		for i, st := range all {
			switch i % 3 {
			case 0:
				st.send("end$")
				st.wants("end$")
				if e := st.ends(Done); e.Sent != 200_008 || e.Held != nil {
					t.Errorf("%+v", e)
				}
			case 1:
				st.send("last")
				_ = st.engine.Close()
				st.wants("last")
				if e := st.ends(ReadFailed); e.Err != io.EOF || e.Sent != 200_008 {
					t.Errorf("%+v", e)
				}
			default:
				_ = st.engine.SetLinger(0)
				_ = st.engine.Close()
				if e := st.ends(ReadFailed); !errors.Is(e.Err, syscall.ECONNRESET) {
					t.Errorf("%+v", e)
				}
			}
		}
		until(t, "no stream", func() bool { return s.Streams() == 0 })
	}
}

// After the end the descriptors are the caller's again, and what comes is left alone.
func TestAfterTheEnd(t *testing.T) {
	s := begin(t, 1)
	st := open(t, s, nil)
	st.send("x$")
	st.wants("x$")
	st.ends(Done)
	st.send("late")
	buf := make([]byte, 8)
	until(t, "the descriptor is ours again", func() bool {
		n, errno := sock.Recv(st.task.In, buf)
		return errno == 0 && n == 4
	})
}

func TestClientGone(t *testing.T) {
	s := begin(t, 1)
	st, other := open(t, s, nil), open(t, s, nil)
	_ = st.client.SetLinger(0)
	_ = st.client.Close()
	until(t, "the write fails", func() bool {
		_, _ = io.WriteString(st.engine, "x")
		return len(st.h.ends) > 0
	})
	if e := st.ends(SendFailed); !errors.Is(e.Err, syscall.EPIPE) && !errors.Is(e.Err, syscall.ECONNRESET) {
		t.Error(e.Err)
	}
	other.send("on")
	other.wants("on")
}

func TestCut(t *testing.T) {
	s := begin(t, 1)
	st := open(t, s, nil)
	began := time.Now()
	st.task.Cut()
	st.ends(WasCut)
	t.Logf("left %v after the cut", time.Since(began))
	st.task.Cut() // does nothing
	st.task.Cut()

	before := open(t, s, func(t *Task) { t.Cut() })
	before.ends(WasCut)
	if n := before.h.count(); n != 0 {
		t.Errorf("%d bytes taken of a stream cut before it began", n)
	}
}

// Cuts and ends at the same time: Left comes once.
func TestCutAtAnyMoment(t *testing.T) {
	s := begin(t, 2)
	for i := range 60 {
		st := open(t, s, nil)
		go st.task.Cut()
		if i%2 == 0 {
			_, _ = io.WriteString(st.engine, "x$")
		}
		select {
		case <-st.h.ends:
		case <-time.After(patience):
			t.Fatal("not left")
		}
	}
	until(t, "no stream", func() bool { return s.Streams() == 0 })
}

func TestSilence(t *testing.T) {
	s := begin(t, 1)
	// A machine that stands still for idle is silent itself: then with more of it.
	for idle := 150 * time.Millisecond; ; idle *= 2 {
		silent := open(t, s, func(t *Task) { t.Idle = idle })
		talks := open(t, s, func(t *Task) { t.Idle = idle })
		late := open(t, s, func(t *Task) { t.EndBy(time.Now().Add(idle)) })
		began, said, pause := time.Now(), time.Now(), time.Duration(0)
		for time.Since(began) < 3*idle {
			talks.send("x")
			if pause = max(pause, time.Since(said)); pause >= idle/2 {
				break
			}
			said = time.Now()
			talks.wants("x")
			time.Sleep(idle / 10)
		}
		silent.ends(ReadIdle)
		late.ends(ReadLate)
		stays := len(talks.h.ends) == 0
		if pause = max(pause, time.Since(said)); stays && pause < idle/2 {
			return
		}
		if pause < idle/2 || idle > patience/8 {
			t.Fatalf("left after %v at most without a byte, of %v: %v", pause, idle, !stays)
		}
	}
}

// TestUntil: a task's time is over when it says, not when the loop next looks for
// time-outs; a task attached meanwhile is no reason to forget it.
func TestUntil(t *testing.T) {
	s, err := Start(Options{Loops: 1, Tick: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	stays := open(t, s, nil)
	for range 3 {
		soon := time.Now().Add(50 * time.Millisecond)
		late := open(t, s, func(t *Task) { t.EndBy(soon) })
		later := open(t, s, func(t *Task) { t.EndBy(soon.Add(50 * time.Millisecond)) })
		last := open(t, s, func(t *Task) { t.EndBy(time.Now().Add(time.Hour)) })
		late.ends(ReadLate)
		later.ends(ReadLate)
		if now := time.Now(); now.Before(soon.Add(50 * time.Millisecond)) {
			t.Errorf("over %v before its time", soon.Add(50*time.Millisecond).Sub(now))
		}
		last.stays()
		last.task.Cut()
		last.ends(WasCut)
	}
	stays.stays()
}

// A Handler's panic is its own stream's affair.
func TestPanic(t *testing.T) {
	s := begin(t, 1)
	bad, good := open(t, s, nil), open(t, s, nil)
	for range 3 {
		bad.send("!")
		if e := bad.ends(Panicked); e.Err == nil || !strings.Contains(e.Err.Error(), "a Handler's") {
			t.Error(e.Err)
		}
		bad = open(t, s, nil)
		good.send("on")
		good.wants("on")
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
		st.ends(WasCut)
		st.task.Cut()
	}
	open(t, s, nil).ends(WasCut)
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
		st.wants("on")
	}
	s.all[1].stop()
	<-s.all[1].done
	open(t, s, nil).ends(WasCut)
	if n := s.Streams(); n != 0 {
		t.Errorf("%d streams left", n)
	}
}

// A task that is cut while it is attached, while the loops are closed, is told once.
func TestToldOnce(t *testing.T) {
	in, _ := pair(t)
	out, _ := pair(t)
	for range 200 {
		s := begin(t, 1)
		h := &echo{ends: make(chan End, 2)}
		task := &Task{In: in, Out: out, Handler: h, WriteTimeout: time.Minute}
		var wg sync.WaitGroup
		wg.Go(func() { s.Attach(task) })
		wg.Go(task.Cut)
		wg.Go(s.Close)
		wg.Wait()
		if e := <-h.ends; e.Why != WasCut || len(h.ends) > 0 {
			t.Fatalf("%+v, and %d more", e, len(h.ends))
		}
		if n := s.Streams(); n != 0 {
			t.Fatalf("%d streams left", n)
		}
	}
}
