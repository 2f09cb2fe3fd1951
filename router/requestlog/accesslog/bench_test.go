package accesslog

import (
	"net/netip"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"sluice/router/requestlog"
	"sluice/router/requestlog/recent"
)

// logShort logs a completion that is not streamed and that one rank has done.
func logShort(l *requestlog.Log, model []byte) {
	now := time.Now()
	e := l.Begin(requestlog.Request{ID: "0123456789abcdef01234567", Endpoint: "/v1/completions", ModelBytes: model, Client: netip.AddrFrom4([4]byte{10, 1, 2, 3}), Bytes: 345, Received: now})
	e.SetTokenized(now, 64)
	e.SetPlan("whole", "")
	e.AddChoice("whole", "engine-0", 0, now)
	e.EndLeg(e.StartLeg("whole", "engine-0", 0, 16, now), "ok", 3*time.Millisecond)
	e.Finish(requestlog.Outcome{Status: 200, CachedTokens: 16, OutputTokens: 1, Total: 4 * time.Millisecond, ResponseBytes: 300}, 64)
}

// BenchmarkRequest measures what the access log costs a short request, with the line and its part of
// the write to a file, as scripts/bench_accesslog.py has it. The log of requests for the console is on,
// as by default. cpu-ns is the CPU time of the process, the goroutine that writes and the garbage collector included.
func BenchmarkRequest(b *testing.B) {
	w, err := New(Options{Output: "file:" + filepath.Join(b.TempDir(), "access.log"), Sample: 1, MaxFileBytes: 100 << 20, MaxFiles: 1})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	l, model := requestlog.New(w, recent.New(recent.Options{Size: 500})), []byte("llama-3")
	b.ReportAllocs()
	n, before := uint64(0), cpuTime(b)
	for b.Loop() {
		logShort(l, model)
		if n++; n%(queueLength/2) == 0 { // the queue must not overflow
			for s := w.Stats(); s.Written+s.Dropped+queueLength/4 < n; s = w.Stats() {
				time.Sleep(50 * time.Microsecond)
			}
		}
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
	if s := w.Stats(); s.Dropped > 0 || s.Failed > 0 {
		b.Errorf("%+v", s)
	}
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLine measures the line alone.
func BenchmarkLine(b *testing.B) {
	ring := recent.New(recent.Options{Size: 1})
	logShort(requestlog.New(ring), []byte("llama-3"))
	e, line := ring.Entries()[0], []byte(nil)
	b.ReportAllocs()
	for b.Loop() {
		line = appendLine(line[:0], e)
	}
	b.ReportMetric(float64(len(line)), "B/line")
}

// TestRequestAllocations: the log of a short request takes two allocations, one for the names and one
// for everything else.
func TestRequestAllocations(t *testing.T) {
	l, model := requestlog.New(recent.New(recent.Options{Size: 10}), discard{}), []byte("llama-3")
	if n := testing.AllocsPerRun(1000, func() { logShort(l, model) }); n > 2 {
		t.Errorf("%v allocations, want 2 at most", n)
	}
}

// discard is a sink that keeps nothing; with it, the log wants every request.
type discard struct{}

func (discard) Add(*requestlog.Entry) {}
