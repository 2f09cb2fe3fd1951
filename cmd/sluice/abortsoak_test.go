package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/worker"
)

// soakLease is how long the soak's prefill engines keep blocks that nobody asks
// for, in the families that have such a time; SGLang's time-outs stay at 300 s.
const soakLease = 6 * time.Second

// TestAbortSoak: clients of every family leave at any moment, and each request's
// blocks are followed on every engine until the last is let go. None is kept for a
// second after its client left (two in short runs, whose machine may have other work),
// and none is let run out.
func TestAbortSoak(t *testing.T) {
	for i := range matrixFamilies {
		fam := &matrixFamilies[i]
		t.Run(fam.name, func(t *testing.T) { soakAborts(t, fam, 0) })
	}
}

// TestAbortSoakReleasing: the same over engines that stand still for a while before
// they take a decode in, so that some are cut before; the router has those released,
// by NIXL, on the side channel.
func TestAbortSoakReleasing(t *testing.T) {
	fam := matrixFamilies[0]
	withRealNIXL(t, &fam)
	soakAborts(t, &fam, 2*time.Second)
}

// pulse is a clock that goes on only while this process does: a second of it is a
// hundred sleeps of 10 ms, so that blocks do not look long kept on a machine that has
// other work.
type pulse struct {
	mu   sync.Mutex
	at   []time.Time // of each beat
	stop chan struct{}
}

const beat = 10 * time.Millisecond

func startPulse(t *testing.T) *pulse {
	p := &pulse{stop: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-p.stop:
				return
			case <-time.After(beat):
			}
			p.mu.Lock()
			p.at = append(p.at, time.Now())
			p.mu.Unlock()
		}
	}()
	t.Cleanup(func() { close(p.stop); <-done })
	return p
}

// between is the time from one moment to another, never more than the wall clock's.
func (p *pulse) between(from, to time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	find := func(at time.Time) int {
		i, _ := slices.BinarySearchFunc(p.at, at, time.Time.Compare)
		return i
	}
	return max(min(time.Duration(find(to)-find(from))*beat, to.Sub(from)), 0)
}

// soakAborts runs one family. stall: now and then a decode engine takes a request in
// only after that time, and its decodes may be cut before.
func soakAborts(t *testing.T, fam *matrixFamily, stall time.Duration) {
	n := 100
	if testing.Short() {
		n = 40
	}
	most := 2 * time.Second
	if os.Getenv("SLUICE_SOAK") != "" {
		n, most = 10_000, time.Second
	}
	clock := startPulse(t)
	fam = fam.prepared(t)
	f := &matrixFleet{family: fam}
	var workers []config.Worker
	for i, role := range []worker.Role{worker.Prefill, worker.Prefill, worker.Decode, worker.Decode} {
		e := startSim(t, func(o *sim.Options) {
			o.Role, o.Records, o.LogKept, o.Speed = role.String(), -1, true, 1
			o.Lease, o.AbortTimeout = soakLease, soakLease
			o.Cost = sim.Cost{Step: 2 * time.Millisecond, Handshake: 5 * time.Millisecond, Transfer: time.Millisecond}
			if fam.engine != nil {
				fam.engine(o)
			}
		})
		w := at(e, role, fmt.Sprint(role, "-", i%2))
		if fam.worker != nil {
			fam.worker(&w, e)
		}
		if stall > 0 && role == worker.Decode {
			e.Fault(sim.Fault{Kind: sim.Stall, Leg: "decode", P: 0.2, Delay: stall})
		}
		workers = append(workers, w)
		f.decodes = append(f.decodes, e)
	}
	f.router = startRouter(t, func(c *config.Config) {
		c.PD.Family = fam.name
		c.PD.Lease, c.PD.LeaseMargin = soakLease, time.Second
		c.PD.CutAfter = time.Second // decodes end sooner; a busy machine admits them by then
		if fam.config != nil {
			fam.config(c)
		}
	}, workers...)

	if stall > 0 {
		eventually(t, 60*time.Second, "the NIXL tier is up", func() bool { return f.router.transfers.Up(nixl.TierNIXL) })
	}

	const idLen = len("soak-000000")
	var mu sync.Mutex
	left := make(map[string]time.Time)
	var wg sync.WaitGroup
	work := make(chan int)
	span := 2 * calm(t, f.router)
	for range 16 {
		wg.Go(func() {
			for i := range work {
				id := fmt.Sprintf("soak-%06d", i)
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(span))))
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, i%40, prompt, 5+rand.IntN(30), rand.IntN(2) == 0)
				a, err := tryPost(ctx, f.router.URL+"/v1/chat/completions", body, "X-Request-Id", id)
				cancel()
				mu.Lock()
				switch {
				case err != nil:
					left[id] = time.Now()
				case a.Status != 200:
					t.Errorf("%s: status %d: %s", id, a.Status, a.Body)
				}
				mu.Unlock()
			}
		})
	}
	aborts := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(left)
	}
	sent := 0
	for ; aborts() < n && sent < 20*n; sent++ {
		work <- sent
	}
	close(work)
	wg.Wait()
	if !f.rests(soakLease + 30*time.Second) {
		t.Error("something is left behind")
	}

	// How long after its client left each request's last block was let go.
	var kept []time.Duration
	var late []string
	expired, early, strange := 0, 0, 0
	for i, e := range f.decodes {
		if i >= 2 {
			early += e.Stats().GoneEarly
		}
		for id, at := range e.Kept() {
			gone, ok := left[id[:min(idLen, len(id))]]
			switch {
			case !ok || !strings.HasPrefix(id, "soak-"):
			case at.IsZero():
				t.Errorf("%s still holds blocks", id)
			default:
				d := clock.between(gone, at)
				kept = append(kept, d)
				if d >= most {
					late = append(late, fmt.Sprintf("%s: %v by the process's clock, %v by the wall's", id, d, at.Sub(gone).Round(time.Millisecond)))
				}
			}
		}
		sum := e.Stats().Sum()
		expired += sum.LeasesExpired
		strange += sum.LateNotifications
		if sum.GarbageReads+sum.IncompleteHandles+sum.RoomsReused+sum.RoomsMismatched != 0 {
			t.Errorf("an engine was misled: %+v", sum)
		}
	}
	slices.Sort(kept)
	if len(left) < n || len(kept) == 0 {
		t.Fatalf("%d of %d clients left, %d held blocks: the test shows little", len(left), sent, len(kept))
	}
	_, released, failed := f.router.sideChannel.Counts()
	t.Logf("%d of %d clients left; of %d holds the last block went, after the client: p50 %v, p99 %v, max %v; %d leases ran out; %d decodes were cut before their engine knew them, %d handles released, %d messages failed, %d were of requests prefill did not know",
		len(left), sent, len(kept), kept[len(kept)/2], kept[len(kept)*99/100], kept[len(kept)-1], expired, early, released, failed, strange)
	if len(late) > 0 {
		t.Errorf("%d of %d were kept for %v after their client left: %v", len(late), len(kept), most, late[:min(len(late), 10)])
	}
	if expired != 0 {
		t.Errorf("%d times prefill's blocks were let run out", expired)
	}
	if int64(strange) > released {
		t.Errorf("%d notifications of requests that prefill did not know; the router has released %d", strange, released)
	}
	if stall > 0 && released == 0 {
		t.Error("nothing was released: the test shows little")
	}
}

// calm is what one request takes when there is no other, on this machine now: clients
// that are to leave at any moment of it must know.
func calm(t *testing.T, r *testRouter) time.Duration {
	t.Helper()
	var took []time.Duration
	for i := range 5 {
		began := time.Now()
		wantStatus(t, post(t, r.URL+"/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"calm %d"}],"max_tokens":15,"ignore_eos":true}`, i)), 200)
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return min(max(took[2], 20*time.Millisecond), time.Second)
}
