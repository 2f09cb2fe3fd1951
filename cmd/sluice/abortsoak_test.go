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
	"sluice/router/config"
	"sluice/router/worker"
)

// soakLease is how long the soak's prefill engines keep blocks that nobody asks
// for, in the families that have such a time; SGLang's time-outs stay at 300 s.
const soakLease = 6 * time.Second

// soakCut is by when an engine of the soak has admitted a decode, on a machine that
// has other work: later ones leave blocks to the lease.
const soakCut = 150 * time.Millisecond

// TestAbortSoak: clients of every family leave at any moment, and each request's
// blocks are followed on every engine until the last is let go. None is kept for
// more than a second longer than the lease after its client left, and few for a second:
// where the legs follow one another, for the answer that an engine makes and never
// comes to send; everywhere, for a decode that is not streamed and is admitted later
// than soakCut, and for a machine that has other work.
func TestAbortSoak(t *testing.T) {
	for i := range matrixFamilies {
		fam := &matrixFamilies[i]
		t.Run(fam.name, func(t *testing.T) { soakAborts(t, fam) })
	}
}

func soakAborts(t *testing.T, fam *matrixFamily) {
	n := 150
	if testing.Short() {
		n = 60
	}
	if os.Getenv("SLUICE_SOAK") != "" {
		n = 10_000
	}
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
		workers = append(workers, w)
		f.decodes = append(f.decodes, e)
	}
	f.router = startRouter(t, func(c *config.Config) {
		c.PD.Family = fam.name
		c.PD.Lease, c.PD.LeaseMargin, c.PD.CutAfter = soakLease, time.Second, soakCut
		if fam.config != nil {
			fam.config(c)
		}
	}, workers...)

	const idLen = len("soak-000000")
	var mu sync.Mutex
	left := make(map[string]time.Time)
	var wg sync.WaitGroup
	work := make(chan int)
	for range 16 {
		wg.Go(func() {
			for i := range work {
				id := fmt.Sprintf("soak-%06d", i)
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(60*time.Millisecond))))
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
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	if !f.rests(soakLease + time.Second + cutSlack) {
		t.Error("something is left behind")
	}

	// How long after its client left each request's last block was let go.
	var kept []time.Duration
	for _, e := range f.decodes {
		for id, at := range e.Kept() {
			gone, ok := left[id[:min(idLen, len(id))]]
			switch {
			case !ok || !strings.HasPrefix(id, "soak-"):
			case at.IsZero():
				t.Errorf("%s still holds blocks", id)
			default:
				kept = append(kept, max(at.Sub(gone), 0))
			}
		}
		if s := e.Stats().Sum(); s.GarbageReads+s.LateNotifications+s.IncompleteHandles+s.RoomsReused+s.RoomsMismatched != 0 {
			t.Errorf("an engine was misled: %+v", s)
		}
	}
	slices.Sort(kept)
	if len(left) < n/10 || len(kept) == 0 {
		t.Fatalf("%d of %d clients left, %d held blocks: the test shows little", len(left), n, len(kept))
	}
	over := len(kept) - slices.IndexFunc(append(kept, time.Hour), func(d time.Duration) bool { return d > time.Second })
	t.Logf("%d of %d clients left; of %d holds the last block went, after the client: p50 %v, p99 %v, max %v; %d over 1 s",
		len(left), n, len(kept), kept[len(kept)/2].Round(time.Millisecond), kept[len(kept)*99/100].Round(time.Millisecond), kept[len(kept)-1].Round(time.Millisecond), over)
	if over > max(3, len(kept)/200) {
		t.Errorf("%d blocks of %d were kept for more than a second after their client left", over, len(kept))
	}
	if longest := kept[len(kept)-1]; longest > soakLease+time.Second {
		t.Errorf("a block was kept for %v after its client left; the lease is %v", longest, soakLease)
	}
}
