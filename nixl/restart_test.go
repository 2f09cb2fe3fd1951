package nixl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// resources is what a process has of what restarts could leave behind.
type resources struct{ descriptors, threads, mappings, children, goroutines, kilobytes int }

func currentResources(t testing.TB) (h resources) {
	t.Helper()
	count := func(dir string) int { return len(must[[]os.DirEntry](t)(os.ReadDir(dir))) }
	h.descriptors, h.threads, h.goroutines = count("/proc/self/fd"), count("/proc/self/task"), runtime.NumGoroutine()
	h.mappings = strings.Count(string(must[[]byte](t)(os.ReadFile("/proc/self/maps"))), "memfd:sluice")
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, s := range stats {
		b, _ := os.ReadFile(s)
		if _, rest, ok := strings.Cut(string(b), ") "); ok && strings.HasPrefix(rest[1:], fmt.Sprintf(" %d ", os.Getpid())) {
			h.children++
		}
	}
	status := string(must[[]byte](t)(os.ReadFile("/proc/self/status")))
	if _, rest, ok := strings.Cut(status, "VmRSS:"); ok {
		fmt.Sscan(rest, &h.kilobytes)
	}
	return h
}

// within says whether h is no more than before and a little, which does not grow with
// the number of restarts: threads and memory are kept by the runtime.
func (h resources) within(before resources) bool {
	return h.descriptors <= before.descriptors && h.mappings <= before.mappings && h.children <= before.children &&
		h.goroutines <= before.goroutines+2 && h.threads <= before.threads+4 && h.kilobytes <= before.kilobytes+16<<10
}

// soakCount is a number of rounds: many where a soak is asked for.
func soakCount(few, many int) int {
	if os.Getenv("SLUICE_SOAK") == "1" {
		return many
	}
	return few
}

// testRestarts kills a tier's process n times, by turns in two ways, and looks for what
// that leaves behind. After each the tier must come back with another process; use is
// called with each agent.
func testRestarts(t *testing.T, tier *AgentTier, n int, use func(*Agent)) {
	t.Helper()
	var before resources
	warm := min(5, n/4)
	for i := range n {
		a := tier.Agent()
		use(a)
		if i == warm {
			before = awaitResources(t, func(h resources) bool { return true })
		}
		if err := hostProcessOf(t, a).Signal([]syscall.Signal{syscall.SIGKILL, syscall.SIGSEGV}[i%2]); err != nil {
			t.Fatal(err)
		}
		awaitNewAgent(t, tier, a, i+1)
	}
	use(tier.Agent())
	after := awaitResources(t, func(h resources) bool { return h.within(before) })
	t.Logf("%d restarts; after %d: %+v, after all: %+v", n, warm, before, after)
	if !after.within(before) {
		t.Errorf("%d restarts left something behind: %+v, before %+v", n-warm, after, before)
	}
}

// awaitNewAgent waits until the tier has another agent; a try that fails costs its timeouts.
func awaitNewAgent(t *testing.T, tier *AgentTier, before *Agent, n int) {
	t.Helper()
	reasons := map[string]bool{}
	began := time.Now()
	back := testwait.Poll(time.Minute, func() bool {
		if state, reason := tier.Status(); state == TierDown && !strings.Contains(reason, "has ended") {
			reasons[reason] = true
		}
		a := tier.Agent()
		return a != nil && a != before
	})
	if !back {
		state, reason := tier.Status()
		t.Fatalf("restart %d: not back after a minute; %s: %s", n, state, reason)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Logf("restart %d took %s: %v", n, took.Round(time.Millisecond), slices.Collect(maps.Keys(reasons)))
	}
}

// awaitResources is what this process holds once ok says so, or after a while.
func awaitResources(t *testing.T, ok func(resources) bool) resources {
	var h resources
	testwait.Poll(10*time.Second, func() bool {
		runtime.GC()
		h = currentResources(t)
		return ok(h)
	})
	return h
}

// boardTier keeps a NIXL agent in a process of its own, with a board as the router has.
func boardTier(t *testing.T, search Search, command []string) (*AgentTier, *atomic.Pointer[CompletionBoard]) {
	var board atomic.Pointer[CompletionBoard]
	tier := StartAgentTier(AgentTierConfig{
		Agent: Config{Name: "router", Search: search}, Isolate: command, CheckInterval: 20 * time.Millisecond, MaxRetryPause: 20 * time.Millisecond,
		Ready: func(ctx context.Context, a *Agent) error {
			b, err := NewCompletionBoard(ctx, a, 1024, nil)
			board.Store(b)
			return err
		},
	})
	t.Cleanup(func() { tier.Close() })
	return tier, &board
}

// With our own libnixl_capi: the agent, its board, and a completion slot that outlives them.
func TestIsolatedRestarts(t *testing.T) {
	lib := fakeLibrary(t)
	tier, board := boardTier(t, Search{Path: lib}, isolateCommand(t))
	wantTier(t, tier, TierUp)
	var older *CompletionBoard
	var slot CompletionSlot
	testRestarts(t, tier, soakCount(20, 1000), func(*Agent) {
		if older != nil { // of the process that is gone
			if err := older.CompleteNotified(slot.Index, slot.Nonce, Completion{}); err != nil {
				t.Errorf("a dead process's completion slot cannot be ended: %v", err)
			}
			older.Release(slot)
		}
		older = board.Load()
		slot, _ = older.Acquire(1, time.Now().Add(time.Minute))
	})
}

func TestRealIsolatedRestarts(t *testing.T) {
	search := realNIXL(t)
	if os.Getenv("SLUICE_SOAK") != "1" {
		t.Skip("SLUICE_SOAK=1 restarts NIXL 200 times and UCX 1,000 times; TestRealIsolated does so once")
	}
	command := isolateCommand(t)
	t.Run("nixl", func(t *testing.T) {
		tier, _ := boardTier(t, search, command)
		wantTier(t, tier, TierUp)
		testRestarts(t, tier, 200, func(*Agent) {})
	})
	t.Run("ucx", func(t *testing.T) {
		tier := StartUCXTier(UCXTierConfig{UCX: UCXConfig{Agent: Config{Name: "router", Search: search}}, Isolate: command, CheckInterval: 20 * time.Millisecond, MaxRetryPause: 20 * time.Millisecond})
		defer tier.Close()
		wantTier(t, tier, TierUp)
		testRestarts(t, tier, 1000, func(*Agent) {})
	})
}

// dieVariable has a process that holds agents die by itself, at a random moment of its
// first so many milliseconds.
const dieVariable = "SLUICE_NIXL_TEST_DIE"

func killSoon() {
	var most int
	if _, err := fmt.Sscan(os.Getenv(dieVariable), &most); err == nil && most > 0 {
		time.AfterFunc(time.Duration(rand.IntN(most))*time.Millisecond, func() { syscall.Kill(os.Getpid(), syscall.SIGKILL) })
	}
}

// countRestarts makes a command that counts how often it was started.
func countRestarts(t *testing.T, command []string) (counting []string, started func() int) {
	file := filepath.Join(t.TempDir(), "started")
	return append([]string{"/bin/sh", "-c", `echo >> "$0"; exec "$@"`, file}, command...), func() int {
		b, _ := os.ReadFile(file)
		return len(b)
	}
}

// The process dies while it loads, opens, tests itself and registers: wherever it is,
// it is started again, and comes up once it is left alone.
func TestRealIsolatedDiesAtAnyMoment(t *testing.T) {
	search := realNIXL(t)
	command, started := countRestarts(t, isolateCommand(t))
	t.Setenv(dieVariable, "600")
	tier, board := boardTier(t, search, command)
	times := 6
	if testing.Short() {
		times = 3
	}
	testwait.Until(t, "some deaths", func() bool { return started() > times })
	os.Unsetenv(dieVariable)
	testwait.Until(t, "the tier is up and stays so", func() bool {
		a := tier.Agent()
		return a != nil && a.CheckPeer(t.Context(), &Peer{handle: noPeer}) != nil && a.Health() == nil && tier.Agent() == a
	})
	testwait.Until(t, "its board", func() bool {
		a := tier.Agent()
		return a != nil && board.Load().agent == a
	})
	t.Logf("up at start %d", started())
}

// The library does not come back from a registration, and then the process dies: who
// waits for it is notified, and the next process has a board.
func TestIsolatedDiesWhileRegistering(t *testing.T) {
	lib := fakeLibrary(t)
	t.Setenv("FAKE_NIXL_HANG", "register_mem")
	var first atomic.Pointer[Agent]
	var notified atomic.Value
	tier := StartAgentTier(AgentTierConfig{
		Agent: Config{Name: "router", Search: Search{Path: lib}}, Isolate: isolateCommand(t), CheckInterval: time.Millisecond, MaxRetryPause: time.Millisecond,
		Ready: func(ctx context.Context, a *Agent) error {
			first.CompareAndSwap(nil, a)
			_, err := NewCompletionBoard(ctx, a, 1024, nil)
			if err != nil {
				notified.CompareAndSwap(nil, err)
			}
			return err
		},
	})
	defer tier.Close()
	testwait.Until(t, "the registration hangs", func() bool {
		a := first.Load()
		if a == nil {
			return false
		}
		op, since := a.driver.busy()
		return op == opRegister && since > 0
	})
	os.Unsetenv("FAKE_NIXL_HANG")
	began := time.Now()
	if err := hostProcessOf(t, first.Load()).Kill(); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the waiter for the registration is notified", func() bool { return notified.Load() != nil })
	if err := notified.Load().(error); !errors.Is(err, ErrDied) || !strings.Contains(err.Error(), "register") {
		t.Errorf("got %v; want ErrDied of the registration", err)
	}
	wantTier(t, tier, TierUp)
	t.Logf("up again %s after the death", time.Since(began).Round(time.Millisecond))
}
