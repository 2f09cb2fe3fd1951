package kvevents

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// churner is one rank's engine in a fleet that is never at rest.
type churner struct {
	*feedHarness
	e       *engine
	events  *eventWriter
	lives   uint64
	joined  bool
	delayed []uint64 // numbers kept back, to be sent in another order
}

// churnTime is how long TestChurn lets the fleet change. Each run takes another seed, so that many short
// runs try as much as a long one; make fuzz and make soak set the longer times.
func churnTime() time.Duration {
	switch {
	case os.Getenv("SLUICE_SOAK") == "1":
		return 15 * time.Minute
	case os.Getenv("SLUICE_LONG") == "1":
		return 2 * time.Minute
	case testing.Short():
		return 5 * time.Second
	}
	return 15 * time.Second
}

// TestChurn lets ranks join, leave and restart while their feeds lose, damage,
// reorder and hold up messages, over real sockets and one index. When it is over,
// the index holds of each rank what its engine holds, and nothing is left of those
// that went: no slot, no block, no goroutine, no descriptor.
func TestChurn(t *testing.T) {
	runtime.GC()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Run("fleet", func(t *testing.T) { churn(t, churnTime()) })
	testwait.Until(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines })
	testwait.Until(t, "descriptors are closed", func() bool { return openFiles(t) <= files+2 })
}

func churn(t *testing.T, lasts time.Duration) {
	const ranks, slots = 6, 9
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	ix := kvindex.New(kvindex.Options{})
	counts := &counterMap{}
	// The waits between retries must be able to grow beyond what an answer takes: an
	// engine answers one question after the other, those given up long ago too, and
	// on a machine that has little time for it would have ever more of them to answer.
	feeds := NewFeeds(Options{Index: ix, Counters: counts, ReplayTimeout: 300 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 5 * time.Second,
		TailCheck: 20 * time.Millisecond})
	defer feeds.Close()
	var free []worker.Slot
	for s := range slots {
		free = append(free, worker.Slot(60+s))
	}
	var all []*churner
	for i := range ranks {
		c := &churner{e: newEngine(t, true), lives: 1}
		c.e.withTopic = i%2 == 0
		c.events = newEventWriter(seed+uint64(i), c.lives)
		c.feedHarness = &feedHarness{t: t, feeds: feeds, index: ix}
		all = append(all, c)
	}
	join := func(i int) {
		c := all[i]
		c.rank = worker.New(worker.Spec{ID: fmt.Sprint("w", i), URL: "http://127.0.0.1:1"}).Ranks[0]
		n := rng.IntN(len(free))
		c.rank.Slot = free[n]
		free = append(free[:n], free[n+1:]...)
		if cached := ix.CachedBlocks(c.rank.Slot); cached != 0 {
			t.Fatalf("a slot was given out with %d blocks in it", cached)
		}
		c.src = Source{Rank: c.rank, Model: "m", Engine: []string{"vllm", ""}[i%2], Endpoint: c.e.Endpoint, ReplayEndpoint: c.e.Replay}
		c.start()
		c.joined = true
	}
	leave := func(i int) {
		c := all[i]
		feeds.Stop(c.rank.ID)
		if cached := ix.CachedBlocks(c.rank.Slot); cached != 0 {
			t.Fatalf("%d blocks stay of a rank that left", cached)
		}
		free = append(free, c.rank.Slot)
		c.joined = false
	}
	for i := range all {
		join(i)
	}
	steps := 0
	for end := time.Now().Add(lasts); time.Now().Before(end); steps++ {
		i := rng.IntN(ranks)
		c := all[i]
		c.step(rng, func() {
			if c.joined {
				leave(i)
			} else {
				join(i)
			}
		})
		if steps%8 == 0 {
			testwait.Pace(2 * time.Millisecond)
		}
		if c.e.next > 2000 {
			c.restart(rng, false)
		}
	}
	for i, c := range all {
		c.release()
		c.e.set(func() { c.e.unresponsive, c.e.pause = false, 0 })
		if !c.joined {
			join(i)
		}
	}
	for _, c := range all {
		c.isSettled()
	}
	counts.mu.Lock()
	t.Logf("%d steps, %v", steps, counts.n)
	for _, name := range []string{"gaps", "replays", "restarts", "malformed", "replay_failures", "resyncs", "tail_checks"} {
		if counts.n[name] == 0 {
			t.Errorf("no %s: the churn did not try that", name)
		}
	}
	counts.mu.Unlock()
	for i := range all {
		leave(i)
	}
	if ix.Len() != 0 || len(free) != slots {
		t.Errorf("%d blocks and %d of %d slots are left when all have gone", ix.Len(), len(free), slots)
	}
}

// isSettled waits until the index holds of the rank what its engine's batches of
// this life leave behind. The engine goes on to publish while it waits, now and
// then, as one that lives does: that the last message before a silence was lost,
// only the next can tell, if it was lost later than the feed asks for a tail.
func (c *churner) isSettled() {
	c.t.Helper()
	var incarnation [][]byte
	var got, want string
	for n := range 6 {
		c.e.publish(c.events.batch())
		if n > 0 {
			c.t.Logf("%s: one more batch, as it did not settle within %d s", c.rank.ID, 10*n)
		}
		incarnation = incarnation[:0]
		c.e.set(func() {
			for seq := range c.e.next {
				incarnation = append(incarnation, c.e.stored[seq])
			}
		})
		want = c.describe(c.oracle(incarnation...))
		if testwait.Poll(10*time.Second, func() bool { got = c.describe(c.index); return got == want && c.state() == worker.FeedLive }) {
			return
		}
	}
	c.t.Fatalf("%s, %v after %d batches\n got %s\nwant %s", c.rank.ID, c.state(), len(incarnation), got, want)
}

func (c *churner) step(rng *rand.Rand, comeOrGo func()) {
	e := c.e
	switch n := rng.IntN(1000); {
	case n < 700:
		e.publish(c.events.batch())
	case n < 760: // lost on its way
		e.store(c.events.batch())
	case n < 800: // kept back, comes after later ones
		c.delayed = append(c.delayed, e.store(c.events.batch()))
	case n < 850:
		c.release()
	case n < 870: // damaged on its way
		b := c.events.batch()
		e.send(e.store(b), b[:1+rng.IntN(len(b)-1)])
	case n < 880:
		e.frames([]byte("nonsense"))
	case n < 900: // comes twice
		b := c.events.batch()
		seq := e.store(b)
		e.send(seq, b)
		e.send(seq, b)
	case n < 925: // replay stalls, or is quick again
		deaf := rng.IntN(2) == 0
		e.set(func() { e.unresponsive = deaf })
	case n < 940:
		pause := time.Duration(rng.IntN(2)) * time.Millisecond
		e.set(func() { e.pause = pause })
	case n < 955: // the replay itself loses messages
		e.set(func() {
			for range 3 {
				if e.next > 0 {
					// Once each: what is asked for twice and not there counts as gone.
					if seq := rng.Uint64N(e.next); !has(e.dropOnce, seq) {
						e.dropOnce[seq] = true
					}
				}
			}
		})
	case n < 965: // the connection breaks, and something is published meanwhile
		e.reopen(func() {
			for range rng.IntN(3) {
				e.store(c.events.batch())
			}
		})
	case n < 980:
		c.restart(rng, true)
	case n < 994:
		comeOrGo()
	default:
		testwait.Pace(time.Duration(rng.IntN(60)) * time.Millisecond)
	}
}

// release sends what was kept back, the last one first.
func (c *churner) release() {
	for i := len(c.delayed) - 1; i >= 0; i-- {
		c.e.mu.Lock()
		payload, ok := c.e.stored[c.delayed[i]]
		c.e.mu.Unlock()
		if ok {
			c.e.send(c.delayed[i], payload)
		}
	}
	c.delayed = c.delayed[:0]
}

// restart begins a new life of the engine, as a new process would: its connections
// are gone, its caches empty, its numbers begin at 0.
func (c *churner) restart(rng *rand.Rand, busy bool) {
	c.delayed = c.delayed[:0] // of the old process
	c.lives++
	c.e.reopen(func() {
		c.e.restart()
		c.e.set(func() { clear(c.e.dropOnce); c.e.unresponsive = false })
		c.events = newEventWriter(rng.Uint64(), c.lives)
		if busy {
			for range rng.IntN(20) {
				c.e.store(c.events.batch())
			}
		}
	})
}

func has(m map[uint64]bool, seq uint64) bool { _, ok := m[seq]; return ok }
