package schedule

import (
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/worker"
)

// newBacklogRank returns a scheduler with a fixed rate of 1 ms per prompt token, and a rank.
func newBacklogRank() (*Scheduler, *worker.Rank) {
	s := New(Options{QueueWeight: 1, PrefillWeight: 1, DecodeWeight: 1, OverlapWeight: 1, Rates: Rates{Prefill: 1, Transfer: 0.5, Block: 0.1}, Explain: -1})
	r := worker.New(worker.Spec{ID: "w", URL: "http://h"}).Ranks[0]
	r.Waiting.Store(-1)
	r.QueuedTokens.Store(-1)
	r.SetKVUsage(-1)
	return s, r
}

func TestBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newBacklogRank()
		want := func(what string, backlog time.Duration) {
			t.Helper()
			if got := s.Backlog(r); got < backlog-time.Millisecond || got > backlog+time.Millisecond {
				t.Errorf("%s: the backlog is %v; want %v", what, got, backlog)
			}
		}
		choose := func(leg LegKind, tokens int, unseen bool) *Reservation {
			c, ok := s.Choose(&Query{Leg: leg, Candidates: []*worker.Rank{r}, PromptTokens: tokens, Unseen: unseen})
			if !ok {
				t.Fatal("no choice")
			}
			return c.Reservation
		}
		want("an idle rank", 0)
		a := choose(WholeLeg, 100, false)
		b := choose(PrefillLeg, 300, false)
		want("two prompts", 400*time.Millisecond)
		time.Sleep(80 * time.Millisecond)
		want("after 80 ms", 320*time.Millisecond)
		time.Sleep(time.Second) // the engine has fallen behind: only the first is taken to shrink, by the mean
		want("an engine that has fallen behind", 200*time.Millisecond)
		a.PrefillDone()
		want("after the first token of one", 300*time.Millisecond)
		b.Release()
		want("after the end of the other", 0)
		a.Release()

		d := choose(DecodeLeg, 200, false)
		want("a decode leg that pulls 200 tokens", 100*time.Millisecond)
		d.Release()

		u := choose(WholeLeg, 500, true)
		want("a response that is not streamed", 500*time.Millisecond)
		time.Sleep(200 * time.Millisecond)
		want("after 200 ms", 300*time.Millisecond)
		v := choose(WholeLeg, 100_000, true)
		v.Release() // it failed at once
		want("after a long one has failed", 300*time.Millisecond)
		time.Sleep(time.Second)
		want("while it decodes", 0)
		u.Release()
		r.Waiting.Store(3) // another router's requests
		want("requests of another router", 3*waitingTokens*time.Millisecond)
		if n := r.Pending.Load() + r.PendingWork.Load() + r.Unseen.Load(); n != 0 {
			t.Errorf("the counters add up to %d after all have ended; want 0", n)
		}
	})
}

// The time until the first token of long prompts says nothing about that of a short one.
func TestFirstTokenTimeAfterLongPrompts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newBacklogRank()
		for range 50 {
			c, ok := s.Choose(&Query{Leg: WholeLeg, Candidates: []*worker.Rank{r}, PromptTokens: 3000})
			if !ok {
				t.Fatal("no choice")
			}
			time.Sleep(3040 * time.Millisecond)
			c.Reservation.PrefillDone()
			c.Reservation.Release()
		}
		for tokens, want := range map[int]time.Duration{20: 60 * time.Millisecond, 2000: 2040 * time.Millisecond} {
			if whole, delay := s.FirstTokenTime(r, tokens); whole != want || delay != 40*time.Millisecond {
				t.Errorf("%d tokens take %v until the first token, of which %v are not their own; want %v and 40ms", tokens, whole, delay, want)
			}
		}
	})
}

// Without a known rate, responses that are not streamed make no request wait: an engine faster than
// the assumption would be left idle, and nothing would show it.
func TestUnseenWorkWithoutRate(t *testing.T) {
	_, r := newBacklogRank()
	s := New(Options{QueueWeight: 1, PrefillWeight: 1, DecodeWeight: 1, OverlapWeight: 1, Explain: -1})
	for range 50 {
		s.Choose(&Query{Leg: WholeLeg, Candidates: []*worker.Rank{r}, PromptTokens: 10_000, Unseen: true})
	}
	if got := s.Backlog(r); got != 0 {
		t.Errorf("the backlog is %v before any rate is known; want 0", got)
	}
}

// What an engine reports as waiting is not taken for the work of other routers after this router's requests, which it
// included, have ended: else the rank would get nothing until the next report.
func TestBacklogOfOthers(t *testing.T) {
	s, r := newBacklogRank()
	for _, c := range []struct {
		what             string
		reported, now    int64 // requests of this router
		waiting, tokens  int64 // in the report
		wantsMoreThanOwn bool
	}{
		{"its own, which wait", 3, 3, 2, -1, false},
		{"its own, which have ended since", 3, 0, 2, -1, false},
		{"others'", 0, 0, 2, -1, true},
		{"more than its own", 1, 3, 5, -1, true},
		{"tokens of its own, which have ended since", 3, 0, 2, 300, false},
		{"tokens of others", 1, 1, 2, 300, true},
	} {
		r.Waiting.Store(c.waiting)
		r.QueuedTokens.Store(c.tokens)
		r.Requests.Store(c.reported)
		r.PrefillTokens.Store(100 * c.reported)
		r.CountReport()
		r.Requests.Store(c.now)
		r.PrefillTokens.Store(100 * c.now)
		if got := s.Backlog(r); got > 0 != c.wantsMoreThanOwn {
			t.Errorf("the report has %s: the backlog of others is %v", c.what, got)
		}
	}
}

func TestPressureAndKV(t *testing.T) {
	_, r := newBacklogRank()
	r.Worker.SetInfo(&worker.Info{TotalBlocks: 100, BlockSize: 16})
	r.Running.Store(4)
	r.Requests.Store(6)
	for _, c := range []struct {
		waiting, unseen int64
		usage           float64
		pressure, fits  bool
	}{
		{0, 1, 0.5, false, true}, {2, 0, 0.5, false, true}, {2, 1, 0.5, true, true}, {2, 0, 0.97, true, false}, {3, 1, 0.97, false, false}, {-1, 1, -1, false, true},
	} {
		r.Waiting.Store(c.waiting)
		r.Unseen.Store(c.unseen)
		r.SetKVUsage(c.usage)
		if got, fits := UnderPressure(r), FitsKV(r, 200, 100); got != c.pressure || fits != c.fits {
			t.Errorf("%+v: under pressure %v, fits %v", c, got, fits)
		}
	}
	r.Requests.Store(0)
	r.SetKVUsage(1)
	if !FitsKV(r, 1e6, 1) {
		t.Error("a rank without requests takes no request that is larger than its free KV; its engine must refuse it")
	}
	if n := KVHeadroom(r, 100*16, 1); n != 1 {
		t.Errorf("a rank without requests has room for %d; want 1, since its engine decides itself", n)
	}
	for tokens, want := range map[int]bool{100 * 16: false, 100*16 + 1: true} {
		if ExceedsKV(r, tokens) != want {
			t.Errorf("a prompt of %d tokens exceeds 100 blocks of 16: %v; want %v", tokens, !want, want)
		}
	}
}

// A full batch is given more requests while these are expected to get a place within half of the time that
// a request may wait in the engine: without them each place would stay empty until one arrives.
func TestBatchFull(t *testing.T) {
	type spell struct{ interval, backlogged time.Duration }
	for c, ahead := range map[spell]int64{
		{5 * time.Millisecond, 0}: 20, {45 * time.Millisecond, 0}: 2, {150 * time.Millisecond, 0}: 1, {250 * time.Millisecond, 0}: 0,
		{45 * time.Millisecond, 2 * time.Second}: 2, {5 * time.Millisecond, 3 * time.Second}: 5, {45 * time.Millisecond, 3 * time.Second}: 0, {250 * time.Millisecond, time.Hour}: 0,
	} {
		interval, queue := c.interval, EngineQueue{200 * time.Millisecond, c.backlogged}
		s, r := newBacklogRank()
		for range 50 {
			r.Pace.FirstToken(interval, interval, 0, false, false)
		}
		r.Requests.Store(1000)
		if s.IsBatchFull(r, queue) {
			t.Errorf("%v: the batch is full before the engine has reported any", c)
		}
		for range 2 {
			r.Pace.Report(0, 16, 4, 20, true)
		}
		r.Requests.Store(16 + ahead - 1)
		if headroom := BatchHeadroom(r, queue); s.IsBatchFull(r, queue) || headroom != 1 {
			t.Errorf("%v: the engine is not given %d requests beyond its batch; headroom %d, want 1", c, ahead, headroom)
		}
		r.Requests.Add(1)
		if !s.IsBatchFull(r, queue) {
			t.Errorf("%v: the engine is given more than %d requests beyond its batch", c, ahead)
		}
	}
}

func TestPreview(t *testing.T) {
	s, r := newBacklogRank()
	other := worker.New(worker.Spec{ID: "x", URL: "http://x"}).Ranks[0]
	other.PrefillTokens.Store(1000)
	c, ok := s.Preview(&Query{Leg: WholeLeg, Candidates: []*worker.Rank{other, r}, PromptTokens: 100, RequestID: "a"})
	if !ok || c.Rank != r || c.Reservation != nil || r.Requests.Load() != 0 {
		t.Errorf("Preview returned %+v, %v with %d requests on the rank; want the idle rank and no reservation", c, ok, r.Requests.Load())
	}
	if got := s.PrefillTime(r, 100); got != 100*time.Millisecond {
		t.Errorf("100 tokens take %v; want 100ms", got)
	}
}

// A preview has the cost of a choice at any load of the fleet.
func TestPreviewCostsAsChoice(t *testing.T) {
	s, r := newBacklogRank()
	s.Reload(Options{QueueWeight: 1, PrefillWeight: 1, OthersWeight: 4, Rates: Rates{Prefill: 1}, Explain: -1})
	query := &Query{Leg: WholeLeg, Candidates: []*worker.Rank{r}, PromptTokens: 1000}
	for _, busy := range []float64{0, 0.6, 0.9} {
		s.busy.approach(busy, 1)
		p, _ := s.Preview(query)
		c, _ := s.Choose(query)
		c.Reservation.Release()
		if p.Cost != c.Cost {
			t.Errorf("with a busy share of %v a preview costs %v, a choice %v; want the same", busy, p.Cost, c.Cost)
		}
	}
}

// An engine that computes any number of short prompts in a step that takes longer than the queue that it
// may have is given more in each step, although no request starts within that queue.
func TestQueueOfEngineWithLongSteps(t *testing.T) {
	const requests = 300
	queue := EngineQueue{Time: 200 * time.Millisecond}
	for _, step := range []time.Duration{100 * time.Millisecond, 400 * time.Millisecond, time.Second, 3 * time.Second} {
		t.Run(step.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := New(Options{QueueWeight: 1, PrefillWeight: 1, DecodeWeight: 1, OverlapWeight: 1, Explain: -1})
				_, r := newBacklogRank()
				var sent, computing []*Reservation
				dispatch := func() {
					q := Query{Leg: WholeLeg, Candidates: []*worker.Rank{r}, PromptTokens: 64, MaxTokens: 2}
					if c, ok := s.Choose(&q); ok {
						sent = append(sent, c.Reservation)
					}
				}
				endStep := func() (done int) { // the next begins with what was sent meanwhile
					time.Sleep(step)
					for _, res := range computing {
						res.PrefillDone()
						res.Report("", 0, 1)
						res.Release()
					}
					done, computing, sent = len(computing), sent, nil
					return done
				}
				for range 20 { // requests that meet no other, then a few at once
					dispatch()
					endStep()
					endStep()
				}
				for range 3 {
					dispatch()
				}
				endStep()
				endStep()
				steps := 0
				for left := requests; left > 0; steps++ {
					if steps > 60 {
						t.Fatalf("%d of %d requests have been started in %d steps", requests-left, requests, steps)
					}
					for len(sent) < left && s.CanStart(r, WholeLeg, queue, 64, 2) {
						dispatch()
					}
					left -= len(sent)
					endStep()
				}
				t.Logf("%d requests have been started in %d steps of %v", requests, steps, step)
				if steps > 20 {
					t.Errorf("%d steps of %v were needed to start %d requests; want at most 20", steps, step, requests)
				}
			})
		})
	}
}
