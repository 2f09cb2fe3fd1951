package nixl

import (
	"bytes"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"sluice/native/dl"
)

// buildSender compiles a C program that sends notifications without an agent of this
// package: ucx_sender or nixl_sender.
func buildSender(t testing.TB, name string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil || dl.ABI() == 0 {
		t.Skip("no C compiler, or built without cgo")
	}
	var sources []string
	for _, folder := range []string{"dl", "rings", "nixl", "ucx", "cuda"} {
		files, _ := filepath.Glob("../native/" + folder + "/*.c")
		sources = append(sources, files...)
	}
	out := filepath.Join(t.TempDir(), name)
	cmd := exec.Command(cc, append([]string{"-O2", "-std=gnu11", "-I../native", "-o", out, "../native/testdata/" + name + ".c"}, append(sources, "-ldl", "-lpthread")...)...)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return out
}

// latencies are the times from a call in a sender to the handler in Go, and the share of
// a core that this process took meanwhile.
type latencies struct {
	times         []time.Duration // sorted
	cpu           float64         // percent
	cpuPerMessage time.Duration   // of CPU, for one message
}

// measure has a sender, a program, send count messages to an agent of this package, one per millisecond.
func measure(t testing.TB, sender string, count int, open func(func(Notification)) *Agent) (m latencies) {
	t.Helper()
	var mu sync.Mutex
	done := make(chan struct{})
	var began time.Time
	var before time.Duration
	a := open(func(n Notification) {
		now := time.Now()
		sent, err := strconv.ParseInt(string(n.Message), 10, 64)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			m.times = append(m.times, now.Sub(time.Unix(0, sent)))
		}
		switch len(m.times) {
		case 1:
			began, before = now, cpuTime()
		case count:
			took := cpuTime() - before
			m.cpu, m.cpuPerMessage = 100*float64(took)/float64(now.Sub(began)), took/time.Duration(count-1)
			close(done)
		}
	})
	md := must[[]byte](t)(a.Metadata(t.Context()))
	cmd := exec.Command(sender, a.Library().Path, hexOf(md), strconv.Itoa(count))
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	input := must[io.WriteCloser](t)(cmd.StdinPipe())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	came := true
	select {
	case <-done:
	case <-time.After(40 * time.Second): // longer than a sender lives that only waits for its input to end
		came = false
	}
	input.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the sender: %v: %s", err, output.Bytes())
	}
	if !came {
		mu.Lock()
		defer mu.Unlock()
		t.Fatalf("%d of %d messages came: %s", len(m.times), count, output.Bytes())
	}
	slices.Sort(m.times)
	return m
}

// measureUCX is measure over UCX alone, as the router opens it: TCP, on the devices of
// the allowed networks.
func measureUCX(t testing.TB, count int) latencies {
	return measure(t, buildSender(t, "ucx_sender"), count, func(on func(Notification)) *Agent {
		return ucxNetwork().open(t, Config{Parameters: map[string]string{"TLS": "tcp", "NET_DEVICES": "lo"}, OnNotification: on})
	})
}

// A sender that knows no more than UCP reaches us: the wire is UCX's own.
func TestRealUCXForeignSender(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles its sender")
	}
	m := measureUCX(t, 500)
	t.Logf("%d messages: p50 %s, p99 %s, %.1f %% of a core", len(m.times), m.times[len(m.times)/2], m.times[len(m.times)*99/100], m.cpu)
}

// BenchmarkRealUCXNotification: from UCX's call in another process to the handler
// in Go, one a millisecond; CPU of this process.
func BenchmarkRealUCXNotification(b *testing.B) {
	for b.Loop() {
		measureUCX(b, 3000).report(b)
	}
}

// measureNIXL is measure over NIXL, while something is outstanding.
func measureNIXL(t testing.TB, sender string, count int, cfg Config) latencies {
	return measure(t, sender, count, func(on func(Notification)) *Agent {
		cfg.OnNotification = on
		a := realNetwork().open(t, cfg)
		a.driver.expect(1)
		t.Cleanup(func() { a.driver.expect(-1) })
		return a
	})
}

// progress is who moves NIXL on: the agent's thread, woken by UCX's descriptors, or a
// thread of NIXL's, beside which ours looks every 40 µs.
var progress = map[string]Config{"descriptors": {}, "progress-thread": {Progress: true}}

// A sender that uses only NIXL reaches this agent, whichever thread makes the progress.
func TestRealForeignSender(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles its sender")
	}
	program := buildSender(t, "nixl_sender")
	for name, cfg := range progress {
		m := measureNIXL(t, program, 200, cfg)
		t.Logf("%s: %d notifications: p50 %s, p99 %s, %.1f %% of a core", name, len(m.times), m.times[len(m.times)/2], m.times[len(m.times)*99/100], m.cpu)
	}
}

// BenchmarkRealNotification: from NIXL's call in another process to the handler in Go, one
// a millisecond; CPU of this process.
func BenchmarkRealNotification(b *testing.B) {
	program := buildSender(b, "nixl_sender")
	for name, cfg := range progress {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				measureNIXL(b, program, 3000, cfg).report(b)
			}
		})
	}
}

func (m latencies) report(b *testing.B) {
	b.ReportMetric(m.cpu, "%cpu")
	b.ReportMetric(float64(m.cpuPerMessage)/1e3, "µs-cpu/msg")
	quantiles(b, m.times)
}
