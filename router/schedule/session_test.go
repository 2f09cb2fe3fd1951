package schedule

import (
	"testing"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// A session stays where it is while its rank has no more than its share of the
// load, and comes back when it has so again.
func TestSessionsYieldToLoad(t *testing.T) {
	for _, c := range []struct {
		n           int
		temperature float64
	}{{8, 0}, {100, 0}, {8, 0.5}, {100, 0.5}} {
		n, rs, opt := c.n, ranks(c.n), testOptions
		opt.Temperature = c.temperature
		s := New(opt)
		q := &Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 100, Session: 77}
		home := func() *worker.Rank {
			c, _ := s.Choose(q)
			c.Reservation.Release()
			return c.Rank
		}
		first := home()
		for range 20 {
			if got := home(); got != first {
				t.Fatalf("moved from %v to %v without load", first.ID, got.ID)
			}
		}
		var cached []*Reservation
		at := map[*worker.Rank]int{}
		for range 4 * n {
			c, _ := s.Choose(q)
			cached = append(cached, c.Reservation)
			at[c.Rank]++
		}
		if got := at[first]; got < 4 || got > 7 {
			t.Errorf("%d ranks: of %d requests of one session at once its home has %d, want no more than its share and a quarter", n, 4*n, got)
		}
		for _, r := range cached {
			r.Release()
		}
		if home() != first {
			t.Error("the session did not come back")
		}
		if q.Excluded = []*worker.Rank{first}; home() == first {
			t.Error("chose what is excluded")
		}
		mustZero(t, rs)
	}
}

// Sessions are placed by ids, not by the order of candidates, and only those of a
// rank that leaves move.
func TestSessionsMoveOnlyFromRemovedRanks(t *testing.T) {
	rs := ranks(10)
	opt := testOptions
	opt.Policy = "session"
	s, other := New(opt), New(opt)
	turned := append(append([]*worker.Rank{}, rs[5:]...), rs[:5]...)
	used := map[*worker.Rank]int{}
	for k := range uint64(500) {
		session := mixSeed(k)
		a, _ := s.Choose(&Query{Candidates: rs, Session: session})
		b, _ := other.Choose(&Query{Candidates: turned, Session: session})
		c, _ := s.Choose(&Query{Candidates: rs[1:], Session: session})
		if a.Rank != b.Rank {
			t.Errorf("session %d: two routers place it on %v and %v", k, a.Rank.ID, b.Rank.ID)
		}
		if a.Rank != rs[0] && c.Rank != a.Rank {
			t.Errorf("session %d: moved from %v to %v because %v left", k, a.Rank.ID, c.Rank.ID, rs[0].ID)
		}
		used[a.Rank]++
	}
	for _, r := range rs {
		if n := used[r]; n < 25 || n > 85 {
			t.Errorf("%v has %d of 500 sessions", r.ID, n)
		}
	}
}

// Blocks in slower tiers count for less, each by its weight.
func TestTiersAreWeighed(t *testing.T) {
	for _, n := range []int{3, 60} { // the plain way, and the board
		rs := ranks(n)
		ix := kvindex.New(kvindex.Options{})
		toks := prompt(1600)
		for i, tier := range []kvindex.Tier{kvindex.Device, kvindex.Host, kvindex.Disk} {
			locals := blockhash.Locals(nil, toks, 16)
			engine := make([]kvindex.EngineHash, len(locals))
			for k := range engine {
				engine[k] = kvindex.EngineHash(1000*i + k + 1)
			}
			ix.Store(&kvindex.Stored{Slot: rs[i].Slot, Tier: tier, Salt: blockhash.NewSalt("m", "", ""), Engine: engine, Local: locals})
			rs[i].EventBlockSize.Store(16)
			rs[i].Feed.Store(uint32(worker.FeedLive))
		}
		var o kvindex.Overlap
		find(ix, &o, toks, 16)
		s := New(testOptions)
		q := &Query{Leg: PrefillLeg, Candidates: rs, Overlap: &o, PromptTokens: 1601, Attempt: 1} // the last token is computed
		if n > maxAllRecorded {
			onIndex(t, s, q)
		}
		var cached []*Reservation
		for want := range 3 { // device first; with that excluded by load, host, then disk
			q.RequestID = string(rune('a' + want))
			c, _ := s.Choose(q)
			if c.Rank != rs[want] || c.CachedTokens != 1600 {
				t.Errorf("%d ranks: chose %v with %d cached, want %v", n, c.Rank.ID, c.CachedTokens, rs[want].ID)
			}
			for _, x := range decode(t, s, q.RequestID).Decisions[0].Shown {
				if left := []float64{0.1, 32.1, 80.1}[want]; x.Chosen && (x.Terms.Prefill < left-0.01 || x.Terms.Prefill > left+0.01) {
					t.Errorf("%d ranks: prefill on %s is %v ms, want %v", n, x.Rank, x.Terms.Prefill, left)
				}
			}
			cached = append(cached, c.Reservation, addLoad(s, rs[want], 5000))
		}
		for _, r := range cached {
			r.Release()
		}
		mustZero(t, rs)
	}
}
