package restart

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestKilledRouterRestoresIndex: after a router was killed, the new one knows the engines' cached
// blocks from its first request on, except those of an engine that restarted meanwhile. The
// engines keep few batches for replay, so that without a snapshot the first prompts are unknown.
func TestKilledRouterRestoresIndex(t *testing.T) {
	t.Parallel()
	few := func(o *sim.Options) { o.BufferSteps = 8 }
	a, b := harness.StartSim(t, few), harness.StartSim(t, few)
	dir := t.TempDir()
	snap := filepath.Join(dir, "index.snap")
	start := func(snap string) *harness.Process {
		p := harness.Launch(t, nil, "serve", "--listen", "127.0.0.1:0", "--admin", "off",
			"--engine", a.URL()+",id=a", "--engine", b.URL()+",id=b", "--set", "index.snapshot="+snap, "--set", "index.snapshot_interval=1s", "--set", "health.interval=50ms")
		testwait.UntilWithin(t, 20*time.Second, "both engines are ready", func() bool {
			m := string(harness.Get(t, "http://"+p.Addr+"/metrics").Body)
			return strings.Count(m, "sluice_rank_feed_live{") == 2 && strings.Count(m, `state="ready"`) == 2
		})
		return p
	}
	converse := func(i int) string {
		return harness.ChatOf(fmt.Sprintf("talk number %d of many: %s", i, strings.Repeat(harness.Prompt, 3)))
	}
	ask := func(p *harness.Process, i int) (names string, cached int) {
		got := harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", converse(i))
		harness.WantStatus(t, got, 200)
		cached, _ = strconv.Atoi(got.Header.Get("X-Sluice-Cached-Tokens"))
		return got.Header.Get("X-Sluice-Worker"), cached
	}
	const conversations = 24
	home := make([]string, conversations)
	p := start(snap)
	testwait.UntilWithin(t, 20*time.Second, "both feeds are live", func() bool { return metricSum(t, "http://"+p.Addr, "sluice_rank_feed_live") == 2 })
	for i := range conversations {
		home[i], _ = ask(p, i)
	}
	last := time.Now()
	testwait.UntilWithin(t, 20*time.Second, "a snapshot of all that", func() bool {
		info, err := os.Stat(snap)
		return err == nil && info.ModTime().After(last.Add(1500*time.Millisecond))
	})
	for i := range 2 {
		ask(p, conversations+i) // after the snapshot: replay fills this gap
	}
	p.Cmd.Process.Kill()
	p.Wait(t, 10*time.Second)

	// Without the snapshot, prompts that are no longer replayed are unknown: the first
	// conversation of the engine that had the most of them, at least twelve.
	count := map[string]int{}
	for _, names := range home {
		count[names]++
	}
	old := slices.IndexFunc(home, func(names string) bool { return 2*count[names] >= conversations })
	p = start(filepath.Join(dir, "another.snap"))
	if _, cached := ask(p, old); cached != 0 {
		t.Fatalf("%d cached tokens predicted without a snapshot: this test shows nothing", cached)
	}
	p.Cmd.Process.Kill()
	p.Wait(t, 10*time.Second)

	p = start(snap)
	for _, i := range []int{0, 1, 2, 9, 17} {
		if names, cached := ask(p, i); names != home[i] && i != old || cached < 64 {
			t.Errorf("after the restart, talk %d went to %s with %d cached tokens predicted, its home is %s", i, names, cached, home[i])
		}
	}
	p.Cmd.Process.Kill()
	p.Wait(t, 10*time.Second)

	// Both engines have restarted: the router must predict nothing from before.
	for _, e := range []*sim.Engine{a, b} {
		e.Crash()
		if err := e.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	p = start(snap)
	for i := range conversations {
		if i == 3 { // the first requests at once; the others only once the feeds are live, so that no event is lost
			testwait.UntilWithin(t, 20*time.Second, "both feeds are live", func() bool {
				return metricSum(t, "http://"+p.Addr, "sluice_rank_feed_live") == 2
			})
		}
		if names, cached := ask(p, i); cached > 40 { // more than the common beginning of the conversations
			t.Errorf("of engines that were restarted, %d cached tokens predicted for talk %d on %s", cached, i, names)
		}
	}
	// All events must have arrived, because the engines replay only a few to the next router.
	testwait.UntilWithin(t, 20*time.Second, "the index knows what the engines hold", func() bool {
		return metricSum(t, "http://"+p.Addr, "sluice_rank_cached_blocks") >= (conversations-3)*10
	})
	// A regular shutdown writes a snapshot; the next router uses it at once.
	if err := p.Cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	p.Wait(t, 20*time.Second)
	p = start(snap)
	if _, cached := ask(p, 3); cached < 64 {
		t.Errorf("after a clean end, %d cached tokens predicted", cached)
	}

	// The router rejects a damaged file, names it in the log and starts without it.
	p.Cmd.Process.Kill()
	p.Wait(t, 10*time.Second)
	whole, err := os.ReadFile(snap)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(snap, whole[:len(whole)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	p = start(snap)
	if log := p.Stderr.String(); !strings.Contains(log, snap) || !strings.Contains(log, "truncated") {
		t.Errorf("the log does not name the damaged file and what is wrong: %s", log)
	}
}

// metricSum returns the sum of a metric over all labels.
func metricSum(t *testing.T, base, name string) (sum float64) {
	t.Helper()
	for line := range strings.Lines(string(harness.Get(t, base+"/metrics").Body)) {
		if strings.HasPrefix(line, name+"{") {
			v, err := strconv.ParseFloat(strings.Fields(line)[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

// TestRanksAreProvenInParallel: the router verifies the ranks of a worker concurrently. If their
// replay endpoint does not answer, the worker is delayed by one timeout only.
func TestRanksAreProvenInParallel(t *testing.T) {
	t.Parallel()
	const ranks = 4
	e := harness.StartSim(t, func(o *sim.Options) { o.Ranks = ranks })
	snap := filepath.Join(t.TempDir(), "index.snap")
	start := func(proof time.Duration, replay ...string) *harness.Router {
		w := harness.SimWorker(e, worker.Aggregated, "w")
		w.Ranks, w.KVEvents, w.KVReplay = []uint16{0, 1, 2, 3}, e.KVEndpoints(), replay
		r := harness.LaunchOptions(t, app.Options{SnapshotProof: proof}, func(c *config.Config) { c.Index.Snapshot = snap }, w)
		r.AwaitReady(t)
		return r
	}
	first := start(0, e.ReplayEndpoints()...)
	for i := range ranks {
		harness.WantStatus(t, harness.Post(t, first.URL+"/v1/chat/completions", harness.ChatOf(strings.Repeat(harness.Prompt, 3)), "X-Sluice-Worker", fmt.Sprint("w/", i)), 200)
	}
	testwait.UntilWithin(t, 20*time.Second, "each rank holds something", func() bool {
		return !slices.ContainsFunc(first.AllRanks(), func(k *worker.Rank) bool { return k.CachedBlocks.Load() == 0 })
	})
	first.Stop()
	if err := <-first.Done; err != nil {
		t.Fatal(err)
	}
	first.Done <- nil

	ln, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var arrived atomic.Int64
	gone := make(chan int64, 100) // the number of connections accepted when one of them closed
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			arrived.Add(1)
			go func() {
				io.Copy(io.Discard, c)
				c.Close()
				gone <- arrived.Load()
			}()
		}
	}()
	unreachable := "tcp://" + ln.Addr().String()
	start(4*time.Second, unreachable, unreachable, unreachable, unreachable)
	// More than the ranks if the feed of a rejected rank connected before the close was seen.
	if n := <-gone; n < ranks {
		t.Errorf("%d ranks had been asked when the first was given up, want all %d", n, ranks)
	}
}
