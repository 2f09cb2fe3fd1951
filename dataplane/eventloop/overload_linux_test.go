package eventloop

import (
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
)

// TestOverloadPause: a loop pauses only after it has had work for behindAfter without a break, once
// for each sweep, and only while its reads get larger by that and are still small.
func TestOverloadPause(t *testing.T) {
	const tasks, turn, sweep = 1000, time.Millisecond, 4 * time.Millisecond
	begin := time.Now()
	for name, c := range map[string]struct {
		size, paused int           // bytes of a read, without and with a pause before the sweep
		idle         time.Duration // the loop finds nothing ready this often; 0: never
		pauses       int           // in a second
	}{
		"behind":                     {200, 300, 0, 150}, // (1 s - behindAfter) / (sweep + pause)
		"reads get no larger":        {200, 200, 0, 9},   // one for each behindAfter
		"large reads":                {smallReads, 2 * smallReads, 0, 0},
		"bursts":                     {200, 300, behindAfter, 0},
		"nothing is ready each turn": {200, 300, turn, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var o overload
			pauses, idle, size := 0, begin, c.size
			for now := begin; now.Sub(begin) < time.Second; now = now.Add(turn) {
				if c.idle > 0 && now.Sub(idle) >= c.idle {
					o.reset()
					idle = now
				}
				sweepEnds := o.reads+tasks/4 >= tasks
				for range tasks / 4 {
					o.read(size)
				}
				d := o.pause(now, tasks)
				switch {
				case d > 0 && now.Sub(begin) < behindAfter:
					t.Fatalf("a pause %v after the loop began to have work", now.Sub(begin))
				case d > 0:
					pauses++
					size = c.paused
					now = now.Add(d)
					o.begin(now)
				case sweepEnds:
					size = c.size
				}
				if d > sweep/2 {
					t.Fatalf("a pause of %v in sweeps of %v", d, sweep)
				}
			}
			if pauses < c.pauses-c.pauses/20 || pauses > c.pauses+c.pauses/20 {
				t.Errorf("%d pauses in a second, want about %d", pauses, c.pauses)
			}
		})
	}
	o := overload{since: begin, from: begin, reads: tasks, nbytes: tasks}
	if d := o.pause(begin.Add(time.Second), tasks); d != maxPause {
		t.Errorf("a pause of %v after a sweep of a second, want %v", d, maxPause)
	}
}

// refilling is a Handler whose stream is ready again as soon as it has been read, with the more
// bytes the longer that was ago. It counts how often it is called and how often its thread waits.
type refilling struct {
	from         int // the far end of In
	last         time.Time
	calls, waits *atomic.Int64
	ends         chan End
}

func (r *refilling) Process([]byte, time.Time) (out []byte, done bool) {
	begin := time.Now()
	for time.Since(begin) < 20*time.Microsecond {
	}
	var events [smallReads - 1]byte
	_, _ = unix.Write(r.from, events[:min(1+begin.Sub(r.last)/(10*time.Microsecond), smallReads-1)])
	r.last = begin
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &u)
	r.waits.Store(u.Nvcsw)
	r.calls.Add(1)
	return nil, false
}

func (r *refilling) Ended(e End) { r.ends <- e }

// TestBehindLoopPauses: a loop whose streams are always ready pauses about once for each sweep of
// 1 ms. Otherwise its thread waits only when Go's scheduler makes it, which is every 10 ms at most,
// whatever else runs on the machine.
func TestBehindLoopPauses(t *testing.T) {
	const tasks = 32
	s := begin(t, 1)
	var calls, waits atomic.Int64
	ends := make(chan End, tasks)
	for range tasks {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(pair[0]); _ = unix.Close(pair[1]) })
		s.Attach(&Task{In: pair[0], Out: pair[0], WriteTimeout: time.Minute, Handler: &refilling{from: pair[1], last: time.Now(), calls: &calls, waits: &waits, ends: ends}})
		_, _ = unix.Write(pair[1], []byte("x"))
	}
	time.Sleep(2 * behindAfter)
	testwait.Until(t, "a pause in two of three sweeps", func() bool {
		c, w := calls.Load(), waits.Load()
		time.Sleep(behindAfter)
		sweeps, pauses := (calls.Load()-c)/tasks, waits.Load()-w
		t.Logf("%d waits in %d sweeps", pauses, sweeps)
		return sweeps >= 10 && pauses*3 >= sweeps*2
	})
	s.Close()
	for range tasks {
		<-ends
	}
}
