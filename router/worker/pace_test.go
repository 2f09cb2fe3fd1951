package worker

import (
	"testing"
	"time"
)

const ms = time.Millisecond

// An engine that starts a request whenever another ends, every 40 ms: what a request waits follows from
// how many wait already.
func TestPaceOfFullBatch(t *testing.T) {
	var p Pace
	if p.Wait(100, time.Hour) != 0 || p.Batch() != 0 {
		t.Error("a Pace that has learned nothing knows a wait or a batch")
	}
	for range 20 {
		p.FirstToken(30*ms, 30*ms, 20*ms, true, true)
	}
	if one, two := p.Wait(1, 0), p.Wait(2, 0); one != 0 || two != 60*ms {
		t.Errorf("beside one request the next waits %v, beside two %v; want 0, because two may start together, and 60ms", one, two)
	}
	for range 100 {
		p.FirstToken(40*ms, 240*ms, 20*ms, false, false)
	}
	if wait := p.Wait(5, 0); wait < 200*ms || wait > 215*ms {
		t.Errorf("five requests wait for 40 ms each, and one takes 30 ms alone; the next waits %v, want about 210ms", wait)
	}
	if wait := p.Wait(1, time.Minute); wait < 50*time.Second {
		t.Errorf("an engine has been silent for a minute; the next request waits %v, want about as long", wait)
	}
	if delay := p.Delay(); delay < 200*ms || delay > 225*ms {
		t.Errorf("first tokens come %v later than for the prompt alone; want about 220ms", delay)
	}
	for range 100 {
		p.FirstToken(40*ms, 240*ms, 300*ms, false, false) // faster than was expected
	}
	if delay := p.Delay(); delay < 0 || delay > ms {
		t.Errorf("first tokens come %v later than for the prompt alone; want next to nothing", delay)
	}
}

// Requests that start together leave room for more: an engine that is slow, but takes all at once, is not
// taken to be full.
func TestPaceOfSlowEngine(t *testing.T) {
	var p Pace
	for range 20 {
		p.FirstToken(300*ms, 300*ms, 0, true, true)
	}
	n := int64(1)
	for range 40 { // whenever there is room, one more is given to it
		if p.Wait(n, 0) < 200*ms {
			n++
		}
		p.FirstToken(300*ms, 300*ms, 0, false, false)
		for range n - 1 {
			p.FirstToken(0, 300*ms, 0, false, false)
		}
	}
	if n < 15 {
		t.Errorf("the engine starts all that it has within 300 ms, but is given only %d requests at a time", n)
	}
}

func TestBatchFromReports(t *testing.T) {
	var p Pace
	now := time.Duration(0)
	report := func(running, waiting, inFlight int64, congested bool, want int64) {
		t.Helper()
		now += time.Second
		if p.Report(now, running, waiting, inFlight, congested); p.Batch() != want {
			t.Errorf("after %d running and %d waiting at %v the batch is %d; want %d", running, waiting, now, p.Batch(), want)
		}
	}
	report(9, 1, 10, false, 0) // it has arrived within the step
	report(15, 4, 20, true, 0)
	report(16, 4, 20, true, 16)
	report(14, 1, 16, false, 16) // two have just ended
	for range 8 {
		report(16, 0, 16, false, 16)
	}
	report(16, 0, 16, false, 17) // after ten seconds it is tried whether one more runs
	report(16, 1, 17, false, 16)
	for range 18 {
		report(16, 0, 16, false, 16)
	}
	report(16, 0, 16, false, 16) // the second time is later
	report(16, 0, 16, false, 17)
	report(18, 0, 18, false, 0) // more than that run: it was not a bound
	report(-1, -1, 18, true, 0)
}

// TestPaceForget: after Forget an engine is as one of which nothing is known, and is learned again.
func TestPaceForget(t *testing.T) {
	learn := func(p *Pace) {
		p.FirstToken(time.Second, time.Second, 0, true, true)
		for range 4 {
			p.FirstToken(time.Second, 2*time.Second, 0, false, false)
			p.Report(0, 4, 2, 6, true)
		}
	}
	state := func(p *Pace) [4]int64 {
		return [4]int64{int64(p.Interval()), int64(p.Alone()), int64(p.Delay()), p.Batch()}
	}
	var p, fresh Pace
	learn(&p)
	learned := state(&p)
	for i, v := range learned {
		if v == 0 {
			t.Errorf("value %d was not learned", i)
		}
	}
	p.Forget()
	if got := state(&p); got != state(&fresh) {
		t.Errorf("after Forget %v", got)
	}
	learn(&p)
	if got := state(&p); got != learned {
		t.Errorf("learned again: %v, at first %v", got, learned)
	}
}
