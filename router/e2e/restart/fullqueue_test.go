package restart

import (
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestRestartWithWaitingRequests replaces the process while most requests wait for a rank. The requests that wait in
// the old process are served by it.
func TestRestartWithWaitingRequests(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond})
	dir := t.TempDir()
	config := filepath.Join(dir, "sluice.yaml")
	harness.WriteFile(t, config, fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nlimits: {rank_requests: 1}\nworkers:\n  - {id: a, url: %s}\n", e.URL()))
	r := harness.Launch(t, []string{"XDG_RUNTIME_DIR=" + dir}, "serve", "--config", config, "--drain", "30s")
	r.Ready(t)
	before := harness.RuntimeOf(t, dir)
	pids := []int{before.PID}
	t.Cleanup(func() {
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	load := startTraffic("http://"+r.Addr, 16)
	testwait.UntilWithin(t, 20*time.Second, "requests are served", func() bool { return load.done.Load() > 20 })
	syscall.Kill(before.PID, syscall.SIGUSR2)
	testwait.UntilWithin(t, 60*time.Second, "another process has taken over", func() bool { return harness.RuntimeOf(t, dir).PID != before.PID })
	now := harness.RuntimeOf(t, dir).PID
	pids = append(pids, now)
	testwait.UntilWithin(t, 40*time.Second, "the replaced process has ended", func() bool { return !harness.IsRunning(before.PID) })
	from := load.done.Load()
	testwait.UntilWithin(t, 20*time.Second, "requests are served", func() bool { return load.done.Load() > from+20 })
	load.stop()
	load.work.Wait()
	if n := load.failed.Load(); n > 0 {
		t.Errorf("%d of %d requests failed, the first: %s", n, load.done.Load(), *load.first.Load())
	}
	syscall.Kill(now, syscall.SIGTERM)
	testwait.UntilWithin(t, 20*time.Second, "the last process has ended", func() bool { return !harness.IsRunning(now) })
}
