package schedule

import (
	"fmt"
	"testing"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// placed are testOptions with the terms that keep a fleet's caches useful.
func placed(eviction, others float64) Options {
	o := testOptions
	o.EvictionWeight, o.OthersWeight = eviction, others
	return o
}

// withCaches makes ranks with room for total blocks, of which some are cached, and live feeds.
func withCaches(n, total int, cached ...int64) []*worker.Rank {
	rs := ranks(n)
	for i, r := range rs {
		r.Worker.SetInfo(&worker.Info{BlockSize: 16, TotalBlocks: total})
		r.Feed.Store(uint32(worker.FeedLive))
		if i < len(cached) {
			r.CachedBlocks.Store(cached[i])
		}
	}
	return rs
}

// holding returns the overlap of a prompt of which one rank has the first blocks.
func holding(r *worker.Rank, tokens []uint32, blocks int) *kvindex.Overlap {
	ix := kvindex.New(kvindex.Options{})
	store(ix, r, tokens, 16, blocks)
	o := new(kvindex.Overlap)
	find(ix, o, tokens, 16)
	return o
}

func chooseOnce(t *testing.T, opt Options, q Query) *worker.Rank {
	t.Helper()
	c, ok := New(opt).Choose(&q)
	if !ok {
		t.Fatal("nothing chosen")
	}
	c.Reservation.Release()
	return c.Rank
}

// An idle rank does not compute what another holds as long as the work that this saves the fleet
// exceeds the wait.
func TestOthersPayForReplication(t *testing.T) {
	for _, n := range []int{2, 64} { // all weighed, and by the index
		rs := ranks(n)
		toks := prompt(1600)
		o := holding(rs[0], toks, 50)   // 800 tokens
		rs[0].PrefillTokens.Store(2000) // 200 ms to wait, against 80 ms of its own that it saves
		q := Query{Leg: PrefillLeg, Candidates: rs, Overlap: o, PromptTokens: 1600}
		choose := func(others float64) *worker.Rank {
			s := New(placed(0, others))
			if n > maxAllRecorded {
				onIndex(t, s, &q).rebuild(s)
				s.load.add(0, 200*nsPerMS, 0)
			}
			c, _ := s.Choose(&q)
			c.Reservation.Release()
			return c.Rank
		}
		if r := choose(0); r == rs[0] {
			t.Errorf("%d ranks: it waits for longer than computing takes", n)
		}
		if r := choose(4); r != rs[0] {
			t.Errorf("%d ranks: %v computes what %v holds", n, r.ID, rs[0].ID)
		}
		if r := choose(1); r == rs[0] {
			t.Errorf("%d ranks: it waits 200 ms to save twice 80", n)
		}
	}
}

// New blocks go where they displace nothing, even if a short shared prefix is elsewhere: otherwise
// the first rank with a system prompt gets every conversation, however full it is.
func TestNewBlocksGoWhereSpaceIsEmpty(t *testing.T) {
	toks := prompt(1600)
	for _, n := range []int{2, 64} {
		rs := withCaches(n, 1000, 1000)
		for _, r := range rs[2:] {
			r.CachedBlocks.Store(1000)
		}
		q := Query{Leg: WholeLeg, Candidates: rs, Overlap: holding(rs[0], toks, 20), PromptTokens: 1600, MaxTokens: 16}
		choose := func(eviction float64) *worker.Rank {
			s := New(placed(eviction, 4))
			if n > maxAllRecorded {
				onIndex(t, s, &q).rebuild(s)
			}
			c, _ := s.Choose(&q)
			c.Reservation.Release()
			return c.Rank
		}
		if r := choose(0); r != rs[0] {
			t.Errorf("%d ranks, no weight: chose %v", n, r.ID)
		}
		if r := choose(0.5); r != rs[1] {
			t.Errorf("%d ranks: chose %v, want the rank with empty space", n, r.ID)
		}
		// A prefix that is worth more than what its rest displaces stays.
		q.Overlap = holding(rs[0], toks, 80)
		if r := choose(0.5); r != rs[0] {
			t.Errorf("%d ranks: chose %v, want the rank with most of the prompt", n, r.ID)
		}
	}
}

// What running requests will fill is not empty, and nothing is known of a cache without events.
func TestEmptyBlocks(t *testing.T) {
	rs := withCaches(1, 1000, 300)
	r := rs[0]
	if n := emptyBlocks(r, 1000); n != 700 {
		t.Errorf("%d empty, want 700", n)
	}
	r.DecodeBlocks.Store(250)
	if n := emptyBlocks(r, 1000); n != 450 {
		t.Errorf("%d empty beside running requests, want 450", n)
	}
	r.UnusedBlocks.Store(100)
	if n := emptyBlocks(r, 1000); n != 550 {
		t.Errorf("%d empty where 100 blocks are those of finished sessions, want 550", n)
	}
	r.SetCachedBlocks(300, 60) // of them 60 have been evicted, and others have come
	if n := emptyBlocks(r, 1000); n != 490 {
		t.Errorf("%d empty after 60 blocks were evicted, want 490", n)
	}
	r.SetCachedBlocks(0, 0)
	if n := r.UnusedBlocks.Load(); n != 0 {
		t.Errorf("%d unused blocks in an empty cache", n)
	}
	r.CachedBlocks.Store(5000) // with a slower tier
	if n := emptyBlocks(r, 1000); n != 0 {
		t.Errorf("%d empty, want 0", n)
	}
	r.Feed.Store(uint32(worker.FeedBroken))
	if n := emptyBlocks(r, 1000); n != 1000 {
		t.Errorf("%d empty without events, want all", n)
	}
}

// A rank is short of blocks by what is reserved there, before the engine reports it; a shared
// prefix, which is reserved once for each request, does not make it so.
func TestBlocksInUse(t *testing.T) {
	for _, c := range []struct {
		name               string
		reported           float64
		running            int64
		requests, reserved int64
		want               int
	}{
		{"nothing known", -1, -1, 0, 0, 0},
		{"reserved, not reported", -1, -1, 2, 600, 600},
		{"reported only", 0.4, 3, 0, 0, 400},
		{"reserved since the report", 0.4, 2, 4, 700, 700},
		{"shared by all", 0.4, 4, 4, 3000, 400},
		{"shared, and more placed since", 0.4, 4, 6, 3000, 600},
	} {
		r := withCaches(1, 1000)[0]
		r.SetKVUsage(c.reported)
		r.Running.Store(c.running)
		r.Requests.Store(c.requests)
		r.DecodeBlocks.Store(c.reserved)
		if n := blocksInUse(r, 1000); n != c.want {
			t.Errorf("%s: %d, want %d", c.name, n, c.want)
		}
	}
	// A request that does not fit beside what was just placed goes elsewhere, although the holder's
	// last report says that it is idle.
	toks := prompt(1600)
	rs := withCaches(2, 150)
	q := Query{Leg: WholeLeg, Candidates: rs, Overlap: holding(rs[0], toks, 40), PromptTokens: 1600, MaxTokens: 16}
	if r := chooseOnce(t, placed(0, 4), q); r != rs[0] {
		t.Errorf("chose %v, want the holder", r.ID)
	}
	rs[0].DecodeBlocks.Store(140)
	if r := chooseOnce(t, placed(0, 4), q); r != rs[1] {
		t.Errorf("chose %v, want the rank with room", r.ID)
	}
}

// The explain record has the new terms and amounts, and the terms make up the cost.
func TestExplainShowsWhatOthersPay(t *testing.T) {
	rs := withCaches(2, 100, 90, 0)
	s := New(placed(0.5, 4))
	s.Choose(&Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 1600, MaxTokens: 16, RequestID: "a", Attempt: 1})
	for _, x := range decode(t, s, "a").Decisions[0].Shown {
		evicted, lacking := 0, 16 // 101 blocks in 100
		if evicted = 16; x.Rank == "w0/0" {
			evicted = 91 * 16
		}
		if x.Evicted != evicted || x.LackingTokens != lacking {
			t.Errorf("%s displaces %d tokens and lacks %d, want %d and %d", x.Rank, x.Evicted, x.LackingTokens, evicted, lacking)
		}
		p := x.Terms
		if want := 0.5 * 0.1 * float64(evicted); p.Eviction < want-1e-9 || p.Eviction > want+1e-9 {
			t.Errorf("%s: eviction %v, want %v", x.Rank, p.Eviction, want)
		}
		if want := 4 * (p.Prefill + p.Eviction + p.Pressure); p.Others < want-0.001 || p.Others > want+0.001 {
			t.Errorf("%s: others %v, want %v", x.Rank, p.Others, want)
		}
		if d := p.sum() - x.Cost; d > 0.001 || d < -0.001 {
			t.Errorf("%s: the terms sum to %v, the cost is %v", x.Rank, p.sum(), x.Cost)
		}
	}
}

// Blocks are in flight for as long as their own request is expected to need, not for what it costs
// others.
func TestOthersDoNotProlongBlocksInFlight(t *testing.T) {
	s := New(placed(0.5, 40))
	rs := ranks(2)
	toks := prompt(1600) // 160 ms, and 6.4 s for others
	q := Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 1600, Keys: blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), toks, 16), KeyTokens: 16}
	c, _ := s.Choose(&q)
	c.Reservation.Release()
	after := func(d time.Duration) int { return len(s.inFlight.find(nil, q.Keys, 16, s.now()+int64(d))) }
	if n := after(eventLag); n != 1 {
		t.Errorf("in flight on %d ranks after %v, want 1", n, eventLag)
	}
	if n := after(eventLag + time.Second); n != 0 {
		t.Errorf("in flight on %d ranks after %v, want none", n, eventLag+time.Second)
	}
}

// The terms do not allocate, and cost the same whatever the number of ranks.
func BenchmarkRoom(b *testing.B) {
	for _, eviction := range []float64{0, 0.5} {
		b.Run(fmt.Sprintf("eviction=%v", eviction), func(b *testing.B) {
			s, rs := New(placed(eviction, 4)), withCaches(16, 1000, 990)
			f := s.newChoiceContext(&Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 1600, MaxTokens: 100})
			var t candidateState
			b.ReportAllocs()
			for b.Loop() {
				for _, r := range rs {
					f.evaluate(r, &t)
				}
			}
		})
	}
}
