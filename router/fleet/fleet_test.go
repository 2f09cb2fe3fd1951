package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

func TestJoinLearnsTheEngine(t *testing.T) {
	e := newEngine(t)
	f, l := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url() + "/", Role: worker.Decode})
	p := waitRanks(t, f, "tiny", 1)
	if len(p.Decode) != 1 || p.Members != [3]int{worker.Decode: 1} {
		t.Fatalf("pool: %+v", p)
	}
	w := p.Decode[0].Worker
	info := w.Info()
	if info.Engine != VLLM || info.Version != "0.33.0" || info.BlockSize != 32 || info.TotalBlocks != 400 || info.MaxModelLen != 4096 {
		t.Errorf("info: %+v", info)
	}
	if got := fmt.Sprint(f.View().Models); got != "[tiny tiny-lora]" {
		t.Errorf("models: %s", got)
	}
	if lora, ok := f.View().Pool("tiny-lora"); !ok || len(lora.Decode) != 1 {
		t.Error("an adapter's name has no pool")
	}
	if sole, ok := f.View().Pool(""); !ok || sole.Model != "tiny" {
		t.Errorf("unnamed model: %v", sole)
	}
	if _, ok := f.View().Pool("other"); ok {
		t.Error("an unknown model has a pool")
	}
	if f.Endpoint(p.Decode[0]).URL() != e.url() {
		t.Error("endpoint of another URL")
	}
	testwait.Until(t, "the load is scraped", func() bool { return p.Decode[0].Running.Load() == 7 && p.Decode[0].Waiting.Load() == 1 })
	if p.Decode[0].KVUsage() != 0.25 {
		t.Errorf("usage: %v", p.Decode[0].KVUsage())
	}
	testwait.Until(t, "callbacks", func() bool { return l.String() == "join:d joining>ready" })
	if e.count("/v1/completions") != 0 {
		t.Error("an inference endpoint was called without being configured")
	}
}

func TestAdaptersComeAndGo(t *testing.T) {
	e := newEngine(t)
	f, l := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	waitRanks(t, f, "tiny-lora", 1)
	e.setModels(&e.models, `{"data":[{"id":"other-lora","owned_by":"vllm","parent":"tiny"},{"id":"tiny","owned_by":"vllm"}]}`)
	waitRanks(t, f, "other-lora", 1)
	if _, ok := f.View().Pool("tiny-lora"); ok {
		t.Error("an adapter that was unloaded is still known")
	}
	if sole, _ := f.View().Pool(""); sole.Model != "tiny" {
		t.Errorf("the base model is %s", sole.Model)
	}
	testwait.Until(t, "callbacks", func() bool { return l.String() == "join:d joining>ready" })
}

// Events of an adapter's blocks carry its name: which models are adapters is
// learned again when they come and go, also where the configuration names the models.
func TestAdaptersAreIdentified(t *testing.T) {
	for _, named := range [][]string{nil, {"tiny", "other-lora"}} {
		e := newEngine(t)
		f, _ := newFleet(t, Options{})
		mustAdd(t, f, worker.Spec{ID: "d", URL: e.url(), Models: named})
		waitRanks(t, f, "tiny", 1)
		adapters := func(want string) func() bool {
			return func() bool { return slices.Equal(f.View().Workers[0].Info().Adapters, []string{want}) }
		}
		testwait.Until(t, "the adapter is known", adapters("tiny-lora"))
		e.setModels(&e.models, `{"data":[{"id":"other-lora","owned_by":"vllm","parent":"tiny"},{"id":"tiny","owned_by":"vllm"}]}`)
		testwait.Until(t, "the other is known", adapters("other-lora"))
	}
}

func TestProbeInference(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInference: true})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	waitRanks(t, f, "tiny", 1)
	if n := e.count("/v1/completions"); n != 1 {
		t.Errorf("%d completions at admission; want 1", n)
	}
}

func TestDetectWithinTwoSecondsByDefault(t *testing.T) {
	if d := (Options{}).DetectWithin(); d >= 2*time.Second {
		t.Errorf("a dead worker may stay %s; want under 2s", d)
	}
	for _, c := range []struct {
		opt  Options
		want time.Duration
	}{
		{Options{}, 1500 * time.Millisecond},
		{Options{ProbeInterval: time.Second, ProbeTimeout: time.Second, UnhealthyThreshold: 3}, 4 * time.Second},
		{Options{ProbeInterval: time.Second, ProbeTimeout: 100 * time.Millisecond, UnhealthyThreshold: 2}, 2100 * time.Millisecond},
	} {
		if got := c.opt.DetectWithin(); got != c.want {
			t.Errorf("%+v: %s; want %s", c.opt, got, c.want)
		}
	}
}

// A worker with the default figures that dies or hangs is out in under 2 s; the
// bound here leaves a loaded machine its slack, the arithmetic is tested above.
func TestDeadWorkerLeaves(t *testing.T) {
	for _, how := range []string{"killed", "hangs", "sick"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			e := newEngine(t)
			f := New(Options{})
			defer f.Close()
			mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
			rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
			began := time.Now()
			switch how {
			case "killed":
				e.kill()
			case "hangs":
				e.hang.Store(true)
			case "sick":
				e.unhealthy.Store(true)
			}
			p := waitRanks(t, f, "tiny", 0)
			t.Logf("out after %s", time.Since(began))
			if p.Members != [3]int{1} {
				t.Errorf("members of an unhealthy pool: %v", p.Members)
			}
			if s, why := rank.Worker.State(); s != worker.Unhealthy || why == "" {
				t.Errorf("state %s, %q", s, why)
			}
			if rank.Running.Load() != -1 || rank.Waiting.Load() != -1 {
				t.Error("load of a dead engine is still shown")
			}
			if got := fmt.Sprint(f.View().Models); got != "[tiny tiny-lora]" {
				t.Errorf("models known before are forgotten: %s", got)
			}
			e.hang.Store(false)
			e.unhealthy.Store(false)
			if how == "killed" {
				e.start()
			}
			waitRanks(t, f, "tiny", 1)
			if most := e.maxInflight.Load(); most > 1 {
				t.Errorf("%d probes at once", most)
			}
		})
	}
}

func TestRestartLeavesAndJoins(t *testing.T) {
	e := newEngine(t)
	f, l := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]

	// An outage of the same process is none.
	e.unhealthy.Store(true)
	waitRanks(t, f, "tiny", 0)
	e.unhealthy.Store(false)
	waitRanks(t, f, "tiny", 1)
	testwait.Until(t, "states", func() bool { return l.String() == "join:d joining>ready ready>unhealthy unhealthy>ready" })

	// A new process behind the same address, too quick for a probe to fail.
	e.setIncarnation(2000)
	testwait.Until(t, "restart", func() bool {
		return strings.HasSuffix(l.String(), "ready>unhealthy leave:d join:d unhealthy>ready")
	})
	// One that was seen to be down.
	e.kill()
	waitRanks(t, f, "tiny", 0)
	e.setIncarnation(3000)
	e.start()
	if again := waitRanks(t, f, "tiny", 1).Aggregated[0]; again != rank {
		t.Error("the rank is another after a restart; the reservations on it would be lost")
	}
	testwait.Until(t, "second restart", func() bool { return strings.Count(l.String(), "leave:d join:d") == 2 })
	// The clock of a second server process behind one address is not a restart.
	e.setIncarnation(2500)
	scrapes := e.count("/metrics")
	testwait.Until(t, "more scrapes", func() bool { return e.count("/metrics") > scrapes+3 })
	if n := strings.Count(l.String(), "leave:d"); n != 2 {
		t.Errorf("%d leaves; want 2: %s", n, l)
	}
}

func TestRestartWithoutStartTimeIsDetectedByRefusal(t *testing.T) {
	e := newEngine(t)
	e.metrics.Store(nil)
	f, l := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	waitRanks(t, f, "tiny", 1)
	e.kill()
	waitRanks(t, f, "tiny", 0)
	e.start()
	waitRanks(t, f, "tiny", 1)
	testwait.Until(t, "leave and join", func() bool { return strings.Contains(l.String(), "leave:d join:d") })
}

func TestRankServersAreIndependent(t *testing.T) {
	a, b := newEngine(t), newEngine(t)
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: a.url(), Ranks: []uint16{0, 1}, RankURLs: []string{a.url(), b.url()}})
	waitRanks(t, f, "tiny", 2)
	b.kill()
	p := waitRanks(t, f, "tiny", 1)
	if p.Aggregated[0].ID.Rank != 0 {
		t.Errorf("the rank left is %s", p.Aggregated[0].ID)
	}
	testwait.Until(t, "the state says that a rank is out", func() bool {
		s, why := stateOf(f, "d")
		return s == worker.Ready && strings.Contains(why, "1 of 2 rank servers")
	})
	b.start()
	waitRanks(t, f, "tiny", 2)
	if s, why := stateOf(f, "d"); s != worker.Ready || why != "" {
		t.Errorf("state %s, %q", s, why)
	}
}

func TestRanksOfOneServerHaveTheirOwnLoad(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url(), Ranks: []uint16{0, 1}})
	p := waitRanks(t, f, "tiny", 2)
	testwait.Until(t, "load by rank", func() bool { return p.Aggregated[0].Running.Load() == 3 && p.Aggregated[1].Running.Load() == 4 })
	if p.Aggregated[1].Waiting.Load() != -1 {
		t.Error("rank 1 reported no waiting requests, yet they are known")
	}
	if !p.Aggregated[1].SendRank {
		t.Error("rank 1 is not addressed")
	}
	e.metrics.Store(nil)
	testwait.Until(t, "stale load expires", func() bool { return p.Aggregated[0].Running.Load() == -1 && p.Aggregated[0].KVUsage() == -1 })
}

func TestTrafficFailureRemovesARank(t *testing.T) {
	e := newEngine(t)
	// Probes so rare that only traffic can tell.
	f, _ := newFleet(t, Options{ProbeInterval: 300 * time.Millisecond, ProbeTimeout: time.Second, ScrapeInterval: -1})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	f.ReportFailure(rank, errReset)
	f.ReportStatus(rank, 200)
	f.ReportFailure(rank, errReset)
	f.ReportFailure(rank, fmt.Errorf("leg: %w", upstream.ErrCancelled))
	f.ReportFailure(rank, fmt.Errorf("leg: %w", upstream.ErrTooManyConns))
	if p, _ := f.View().Pool("tiny"); len(p.Aggregated) != 1 {
		t.Fatal("out though failures were not in a row, or were the router's own")
	}
	f.ReportFailure(rank, errReset)
	if p, _ := f.View().Pool("tiny"); len(p.Aggregated) != 0 {
		t.Fatal("still in the pool after two failures in a row")
	}
	if s, why := rank.Worker.State(); s != worker.Unhealthy || !strings.Contains(why, "reset") {
		t.Errorf("state %s, %q", s, why)
	}
	waitRanks(t, f, "tiny", 1) // a probe brings it back
}

// SGLang's /health takes longer than a probe has. Until it is known to be SGLang, and
// asked something else, that is waited for.
func TestFirstProbeWaitsForSGLang(t *testing.T) {
	e := newEngine(t)
	e.slow.Store(int64(300 * time.Millisecond))
	e.setModels(&e.models, `{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"sglang"}]}`)
	e.setModels(&e.info, `{"disaggregation_mode":"null","dp_size":1,"page_size":16}`)
	logLines := make(chan string, 100)
	f, _ := newFleet(t, Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: -1, Log: slog.New(slog.NewTextHandler(lines(logLines), nil))})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	waitRanks(t, f, "tiny", 1)
	testwait.Until(t, "it is asked /ping", func() bool { return e.count("/ping") > 2 })
	f.Close()
	for len(logLines) > 0 {
		// Its other requests (GET …) have a shorter timeout, which a stopped machine can miss.
		if line := <-logLines; strings.Contains(line, "level=WARN") && !strings.Contains(line, "GET /") {
			t.Errorf("the router warned: %s", line)
		}
	}
}

// lines gives what is written to it to a channel, and drops what does not fit there.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}

func TestHungProbeOfABusyEngine(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 60 * time.Millisecond, ScrapeInterval: -1})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	// Traffic is answered during each probe that hangs, however slowly this machine runs, and in the
	// time between two of them.
	answer := func() { f.ReportStatus(rank, 200) }
	e.onHang.Store(&answer)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				answer()
				testwait.Pace(time.Millisecond)
			}
		}
	}()
	answer()
	e.hang.Store(true)
	asked := e.count("/health")
	testwait.Until(t, "some probes hang", func() bool { return e.count("/health") > asked+4 })
	s, why := rank.Worker.State()
	e.onHang.Store(nil)
	close(stop)
	<-done
	if s != worker.Ready {
		t.Errorf("out though traffic was answered: %s", why)
	}
	waitRanks(t, f, "tiny", 0) // without traffic it is
}

func TestDrainAndRemove(t *testing.T) {
	e := newEngine(t)
	f, l := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	if err := f.Drain("d", true); err != nil {
		t.Fatal(err)
	}
	if p, _ := f.View().Pool("tiny"); len(p.Aggregated) != 0 || p.Members[0] != 1 {
		t.Fatalf("a draining worker is chosen: %+v", p)
	}
	if err := f.Drain("d", false); err != nil {
		t.Fatal(err)
	}
	waitRanks(t, f, "tiny", 1)
	if err := f.Remove("d"); err != nil {
		t.Fatal(err)
	}
	v := f.View()
	if _, ok := v.Pool("tiny"); ok || len(v.Workers) != 0 {
		t.Fatal("a removed worker is still in the view")
	}
	testwait.Until(t, "leave", func() bool { return strings.HasSuffix(l.String(), ">gone leave:d") })
	if ep := f.Endpoint(rank); ep == nil || ep.URL() != e.url() {
		t.Error("no endpoint for a rank of an older view")
	} else if status, _, err := ep.Get("/health", time.Second, 1000); err != nil || status != 200 {
		t.Errorf("a request that was placed before the removal: %d, %v", status, err)
	} else if s := ep.Stats(); s.Open != 0 {
		t.Errorf("it leaves %d connections", s.Open)
	}
	f.ReportFailure(rank, errReset)
	f.ReportStatus(rank, 200)
	for _, err := range []error{f.Remove("d"), f.Drain("nobody", true), f.Add(worker.Spec{ID: "x", URL: "ftp://x"}), f.Add(worker.Spec{ID: "a/b", URL: e.url()}), f.Add(worker.Spec{ID: "r", URL: e.url(), Ranks: []uint16{1, 1}})} {
		if err == nil || !strings.HasPrefix(err.Error(), "fleet: cannot ") {
			t.Errorf("error: %v", err)
		}
	}
}

func TestSlotsAreRecycledAfterOnLeave(t *testing.T) {
	e := newEngine(t)
	hold := make(chan struct{})
	var once sync.Once
	free := func() { once.Do(func() { close(hold) }) }
	f, _ := newFleet(t, Options{OnLeave: func(*worker.Worker) { <-hold }})
	defer free()
	mustAdd(t, f, worker.Spec{ID: "a", URL: e.url()})
	first := waitRanks(t, f, "tiny", 1).Aggregated[0]
	if err := f.Remove("a"); err != nil {
		t.Fatal(err)
	}
	// The same id may come back at once, but waits for the old one to leave.
	mustAdd(t, f, worker.Spec{ID: "a", URL: e.url()})
	if w := f.View().Workers[0]; w.Ranks[0].Slot == first.Slot {
		t.Fatal("a slot was given out before OnLeave returned")
	} else if s, _ := w.State(); s == worker.Ready {
		t.Fatal("ready before the former holder of the id left")
	}
	free()
	waitRanks(t, f, "tiny", 1)
	mustAdd(t, f, worker.Spec{ID: "b", URL: e.url()})
	for _, w := range f.View().Workers {
		if w.Spec.ID == "b" && w.Ranks[0].Slot != first.Slot {
			t.Errorf("slot %d; want the one given back, %d", w.Ranks[0].Slot, first.Slot)
		}
	}
	if err := f.Add(worker.Spec{ID: "c", URL: e.url(), Ranks: make([]uint16, 0, 1)}); err != nil {
		t.Error(err)
	}
	many := make([]uint16, worker.MaxSlots)
	for i := range many {
		many[i] = uint16(i)
	}
	if err := f.Add(worker.Spec{ID: "d", URL: e.url(), Ranks: many}); err == nil || !strings.Contains(err.Error(), "slots") {
		t.Errorf("more ranks than slots: %v", err)
	}
	if err := f.Add(worker.Spec{ID: "b", URL: e.url()}); err == nil || !strings.Contains(err.Error(), "with this id exists") {
		t.Errorf("an id twice: %v", err)
	}
}

func TestModelsOfTheSpec(t *testing.T) {
	e := newEngine(t)
	e.models.Store(nil)
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "asked", URL: e.url()})
	mustAdd(t, f, worker.Spec{ID: "configured", URL: e.url(), Models: []string{"m"}})
	if p, ok := f.View().Pool("m"); !ok || p.Members[0] != 1 {
		t.Error("a model named by the config is unknown until its engine answers")
	}
	waitRanks(t, f, "m", 1)
	testwait.Until(t, "a reason", func() bool {
		s, why := stateOf(f, "asked")
		return s == worker.Joining && strings.Contains(why, "/v1/models")
	})
	if f.View().WithoutModels != 1 {
		t.Errorf("unasked: %d", f.View().WithoutModels)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	f, _ := newFleet(t, Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if v, ok := f.Wait(ctx, func(*View) bool { return false }); ok || v == nil {
		t.Error("Wait said yes")
	}
}

func TestRequestPathAllocatesNothing(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ScrapeInterval: -1, ProbeInterval: time.Hour})
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	if n := testing.AllocsPerRun(100, func() {
		p, _ := f.View().Pool("tiny")
		f.Endpoint(p.Aggregated[0])
		f.ReportStatus(rank, 200)
		f.ReportFailure(rank, upstream.ErrCancelled)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Membership changes, traffic and engines that die at random, under the race
// detector: the view must stay in order throughout.
func TestChurn(t *testing.T) {
	engines := []*testEngine{newEngine(t), newEngine(t), newEngine(t)}
	f, _ := newFleet(t, Options{ProbeInterval: 2 * time.Millisecond, ProbeTimeout: 100 * time.Millisecond, ScrapeInterval: 2 * time.Millisecond})
	var wg sync.WaitGroup
	for i, e := range engines {
		wg.Go(func() {
			for round := range 15 {
				id := fmt.Sprintf("w%d", i)
				if err := f.Add(worker.Spec{ID: id, URL: e.url(), Ranks: []uint16{0, 1}}); err != nil {
					t.Error(err)
				}
				switch round % 3 {
				case 0:
					e.unhealthy.Store(!e.unhealthy.Load())
				case 1:
					_ = f.Drain(id, true)
					_ = f.Drain(id, false)
				}
				for range 20 {
					v := f.View()
					if p, ok := v.Pool("tiny"); ok {
						for _, r := range p.Aggregated {
							if f.Endpoint(r) == nil {
								t.Error("no endpoint")
							}
							f.ReportFailure(r, errReset)
							f.ReportStatus(r, 200)
						}
					}
					testwait.Pace(time.Millisecond)
				}
				if err := f.Remove(id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	testwait.Until(t, "all slots come back", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.freeRanks) == f.next && len(f.removing) == 0
	})
}

// TestDrainedBeforeAdded: a worker that was drained in the process before is drained when it is added, once, unless
// that was ended before it came.
func TestDrainedBeforeAdded(t *testing.T) {
	f := New(Options{Drained: []string{"a", "b"}})
	defer f.Close()
	if err := f.Drain("b", false); err != nil {
		t.Fatal(err)
	}
	if got := f.Drained(); !slices.Equal(got, []string{"a"}) {
		t.Errorf("drained are %v; want a", got)
	}
	for id, want := range map[string]worker.State{"a": worker.Draining, "b": worker.Joining} {
		if err := f.Add(worker.Spec{ID: id, URL: "http://127.0.0.1:1"}); err != nil {
			t.Fatal(err)
		}
		for _, w := range f.View().Workers {
			if s, _ := w.State(); w.Spec.ID == id && s != want {
				t.Errorf("worker %s is %v; want %v", id, s, want)
			}
		}
	}
	if err := f.Remove("a"); err != nil {
		t.Fatal(err)
	}
	if got := f.Drained(); len(got) != 0 {
		t.Errorf("drained are %v after the worker was removed; want none", got)
	}
}
