package nixl

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"sluice/native"
)

// ucxSender compiles the C sender that is none of our agents.
func ucxSender(t testing.TB) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil || native.ABI() == 0 {
		t.Skip("no C compiler, or built without cgo")
	}
	sources, _ := filepath.Glob("../native/*.c")
	out := filepath.Join(t.TempDir(), "ucx_sender")
	cmd := exec.Command(cc, append([]string{"-O2", "-std=gnu11", "-I../native", "-o", out, "../native/testdata/ucx_sender.c"}, append(sources, "-ldl", "-lpthread")...)...)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return out
}

// measureUCX has count messages sent to an agent of ours, one a millisecond, and
// answers the times from the call in the sender to the handler in Go, and the share
// of a core that this process took.
func measureUCX(t testing.TB, count int) (times []time.Duration, cpu float64) {
	t.Helper()
	var mu sync.Mutex
	done := make(chan struct{})
	// As the router opens it: TCP, on the devices of the allowed networks.
	a := ucxWorld().open(t, Config{Parameters: map[string]string{"TLS": "tcp", "NET_DEVICES": "lo"}, OnNotification: func(n Notification) {
		now := time.Now().UnixNano()
		sent, err := strconv.ParseInt(string(n.Message), 10, 64)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			times = append(times, time.Duration(now-sent))
		}
		if len(times) == count {
			close(done)
		}
	}})
	md := must[[]byte](t)(a.Metadata(t.Context()))
	cmd := exec.Command(ucxSender(t), a.Library().Path, hexOf(md), strconv.Itoa(count))
	before, began := cpuTime(), time.Now()
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("the sender: %v: %s", err, b)
	}
	cpu = 100 * float64(cpuTime()-before) / float64(time.Since(began))
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatalf("%d of %d messages came", len(times), count)
	}
	slices.Sort(times)
	return times, cpu
}

// A sender that knows no more than UCP reaches us: the wire is UCX's own.
func TestRealUCXForeignSender(t *testing.T) {
	times, cpu := measureUCX(t, 500)
	t.Logf("%d messages: p50 %s, p99 %s, %.1f %% of a core", len(times), times[len(times)/2], times[len(times)*99/100], cpu)
}

// BenchmarkRealUCXNotification: from UCX's call in another process to the handler
// in Go, one a millisecond; CPU of this process.
func BenchmarkRealUCXNotification(b *testing.B) {
	for b.Loop() {
		times, cpu := measureUCX(b, 3000)
		b.ReportMetric(cpu, "%cpu")
		quantiles(b, times)
	}
}
