package abort

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
	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// soakLease is the lease of the soak's prefill engines, in the families that have leases.
// SGLang's timeouts stay at 300 s.
const soakLease = 6 * time.Second

// TestAbortSoak: in every family clients leave at random moments, and the test follows each
// request's blocks on every engine until the last is freed. All are freed within a second after
// the client left (two in short runs, because the machine may be busy), and none by a lease that
// expired.
func TestAbortSoak(t *testing.T) {
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		t.Run(fam.Name, func(t *testing.T) { soakAborts(t, fam, abortSoak{finish: 10 * time.Second, within: time.Second}) })
	}
}

// TestAbortSoakReleasing is TestAbortSoak with engines that stall before they admit a decode, so
// that some decodes are cancelled before. The router releases the blocks of those with NIXL
// notifications over the side channel.
//
// An engine that stalls one request answers probes and looks as if it had admitted it. By default
// such a decode may finish, so that prefill is not notified twice, and its blocks are free when the
// stall is over. Without that time (pd.abandoned_decode_timeout 0) they are free within a second.
func TestAbortSoakReleasing(t *testing.T) {
	const stall = 2 * time.Second
	for _, tc := range []struct {
		name string
		abortSoak
	}{
		{"finishing", abortSoak{stall: stall, finish: 10 * time.Second, within: stall + time.Second}},
		{"at once", abortSoak{stall: stall, within: time.Second}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			fam := harness.MatrixFamilies[0]
			harness.WithRealNIXL(t, &fam)
			soakAborts(t, &fam, tc.abortSoak)
		})
	}
}

// processClock is a clock that advances only while this process runs: one second is a hundred
// sleeps of 10 ms. On a busy machine the wall clock would overstate how long blocks were held.
type processClock struct {
	mu    sync.Mutex
	ticks []time.Time // time of each tick
	stop  chan struct{}
}

const clockTick = 10 * time.Millisecond

func startProcessClock(t *testing.T) *processClock {
	p := &processClock{stop: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-p.stop:
				return
			case <-time.After(clockTick):
			}
			p.mu.Lock()
			p.ticks = append(p.ticks, time.Now())
			p.mu.Unlock()
		}
	}()
	t.Cleanup(func() { close(p.stop); <-done })
	return p
}

// between returns the time between two moments, at most that of the wall clock.
func (p *processClock) between(from, to time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	find := func(at time.Time) int {
		i, _ := slices.BinarySearchFunc(p.ticks, at, time.Time.Compare)
		return i
	}
	return max(min(time.Duration(find(to)-find(from))*clockTick, to.Sub(from)), 0)
}

// abortSoak is a variant of the soak.
type abortSoak struct {
	stall  time.Duration // time before a decode engine admits some of its requests; 0: none stall
	finish time.Duration // pd.abandoned_decode_timeout
	within time.Duration // bound on the time from a client's disconnect to the release of its blocks
}

// soakAborts runs one variant with one family. Short runs, which are not alone on the machine, have
// a second more than the bound.
func soakAborts(t *testing.T, fam *harness.MatrixFamily, v abortSoak) {
	n, most := 100, v.within+time.Second
	if testing.Short() {
		n = 40
	}
	if os.Getenv("SLUICE_SOAK") != "" {
		n, most = 10_000, v.within
	}
	clock := startProcessClock(t)
	fam = fam.Prepared(t)
	f := &harness.MatrixFleet{Family: fam}
	var workers []config.Worker
	for i, role := range []worker.Role{worker.Prefill, worker.Prefill, worker.Decode, worker.Decode} {
		e := harness.StartSim(t, func(o *sim.Options) {
			o.Role, o.Records, o.LogBlocks, o.Speed = role.String(), -1, true, 1
			o.Lease, o.AbortTimeout = soakLease, soakLease
			o.Cost = sim.Cost{Step: 2 * time.Millisecond, Handshake: 5 * time.Millisecond, Transfer: time.Millisecond}
			if fam.Engine != nil {
				fam.Engine(o)
			}
		})
		w := harness.SimWorker(e, role, fmt.Sprint(role, "-", i%2))
		if fam.Worker != nil {
			fam.Worker(&w, e)
		}
		if v.stall > 0 && role == worker.Decode {
			e.Fault(sim.Fault{Kind: sim.Stall, Leg: "decode", P: 0.2, Delay: v.stall})
		}
		workers = append(workers, w)
		f.Decodes = append(f.Decodes, e)
	}
	f.Router = harness.StartRouter(t, func(c *config.Config) {
		c.PD.Family = fam.Name
		c.PD.Lease, c.PD.LeaseMargin = soakLease, time.Second
		c.PD.AbortDelay = time.Second // longer than a decode; even a busy machine has admitted it by then
		if fam.Config != nil {
			fam.Config(c)
		}
		c.PD.AbandonedDecodeTimeout = v.finish
	}, workers...)

	if v.stall > 0 {
		testwait.UntilWithin(t, 60*time.Second, "the NIXL tier is up", func() bool { return f.Router.Transfers.Up(nixl.TierNIXL) })
	}

	const idLen = len("soak-000000")
	var mu sync.Mutex
	abortedAt := make(map[string]time.Time)
	var wg sync.WaitGroup
	work := make(chan int)
	span := 2 * unloadedLatency(t, f.Router)
	for range 16 {
		wg.Go(func() {
			for i := range work {
				id := fmt.Sprintf("soak-%06d", i)
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(span))))
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, i%40, harness.Prompt, 5+rand.IntN(30), rand.IntN(2) == 0)
				a, err := harness.TryPost(ctx, f.Router.URL+"/v1/chat/completions", body, "X-Request-Id", id)
				cancel()
				mu.Lock()
				switch {
				case err != nil:
					abortedAt[id] = time.Now()
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
		return len(abortedAt)
	}
	sent := 0
	for ; aborts() < n && sent < 20*n; sent++ {
		work <- sent
	}
	close(work)
	wg.Wait()
	if !f.BecomesIdle(soakLease + 30*time.Second) {
		t.Error("something is left behind")
	}

	// The time between a client's disconnect and the release of its request's last block.
	var leasedTime []time.Duration
	var late []string
	expired, early, unexpected := 0, 0, 0
	for i, e := range f.Decodes {
		if i >= 2 {
			early += e.Stats().AbortedEarly
		}
		for id, at := range e.BlockReleaseTimes() {
			gone, ok := abortedAt[id[:min(idLen, len(id))]]
			switch {
			case !ok || !strings.HasPrefix(id, "soak-"):
			case at.IsZero():
				t.Errorf("%s still holds blocks", id)
			default:
				d := clock.between(gone, at)
				leasedTime = append(leasedTime, d)
				if d >= most {
					late = append(late, fmt.Sprintf("%s: %v by the process's clock, %v by the wall's", id, d, at.Sub(gone).Round(time.Millisecond)))
				}
			}
		}
		sum := e.Stats().Sum()
		expired += sum.LeasesExpired
		unexpected += sum.LateNotifications
		if sum.GarbageReads+sum.IncompleteHandles+sum.RoomsReused+sum.RoomsMismatched != 0 {
			t.Errorf("an engine was misled: %+v", sum)
		}
	}
	slices.Sort(leasedTime)
	if len(abortedAt) < n || len(leasedTime) == 0 {
		t.Fatalf("%d of %d clients left, %d held blocks: the test shows little", len(abortedAt), sent, len(leasedTime))
	}
	_, released, failed := f.Router.SideChannel.Counts()
	t.Logf("%d of %d clients left; of %d holds the last block went, after the client: p50 %v, p99 %v, max %v; %d leases ran out; %d decodes were cut before their engine knew them, %d handles released, %d messages failed, %d were of requests prefill did not know",
		len(abortedAt), sent, len(leasedTime), leasedTime[len(leasedTime)/2], leasedTime[len(leasedTime)*99/100], leasedTime[len(leasedTime)-1], expired, early, released, failed, unexpected)
	if len(late) > 0 {
		t.Errorf("%d of %d were kept for %v after their client left: %v", len(late), len(leasedTime), most, late[:min(len(late), 10)])
	}
	if expired != 0 {
		t.Errorf("%d times prefill's blocks were let run out", expired)
	}
	if int64(unexpected) > released {
		t.Errorf("%d notifications of requests that prefill did not know; the router has released %d", unexpected, released)
	}
	if v.stall > 0 && released == 0 {
		t.Error("nothing was released: the test shows little")
	}
}

// unloadedLatency measures the duration of one request without other load. The clients choose
// the random moments of their disconnects from it.
func unloadedLatency(t *testing.T, r *harness.Router) time.Duration {
	t.Helper()
	var took []time.Duration
	for i := range 5 {
		began := time.Now()
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"calm %d"}],"max_tokens":15,"ignore_eos":true}`, i)), 200)
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return min(max(took[2], 20*time.Millisecond), time.Second)
}
