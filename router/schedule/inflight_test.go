package schedule

import (
	"fmt"
	"testing"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

func keysOf(tokens []uint32) []blockhash.Seq {
	return blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), tokens, 16)
}

func TestNextDepth(t *testing.T) {
	var got []int
	for d := nextDepth(101); d > 0; d = nextDepth(d) {
		got = append(got, d)
	}
	if want := "[96 64 48 32 24 16 12 8 6 4 3 2 1]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %v", got, want)
	}
	if nextDepth(97) != 96 || nextDepth(96) != 64 || nextDepth(1) != 0 || nextDepth(0) != 0 {
		t.Error("wrong at the edges")
	}
}

// TestInFlightRemoveOfUnusedSlotIsCheap: an engine that clears its cache again and again costs
// no scan of the table, which has 32,768 cells, per clear.
func TestInFlightRemoveOfUnusedSlotIsCheap(t *testing.T) {
	s := newInFlightTable()
	now := int64(time.Second)
	s.add(7, keysOf(prompt(160)), 0, now, time.Second)
	scan := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			s.used[7].Store(true)
			s.remove(7)
		}
	}).NsPerOp()
	again := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			s.remove(7)
		}
	}).NsPerOp()
	if again > scan/20 {
		t.Errorf("a remove with nothing to remove takes %d ns, a scan %d ns; want less than a twentieth", again, scan)
	}
}

// A prompt is known again by what it shares with one just sent, at least two
// thirds of it, until it ends.
func TestInFlightIsFound(t *testing.T) {
	s := newInFlightTable()
	shared := prompt(100 * 16)
	a := append(append([]uint32{}, shared...), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
	b := append(append([]uint32{}, shared...), prompt(320)...)
	now := int64(time.Second)
	s.add(7, keysOf(a), 0, now, time.Second)
	s.add(9, keysOf(a[:40*16]), 0, now, time.Second)
	got := s.find(nil, keysOf(b), 16, now)
	if len(got) != 2 || got[0] != (inFlightBlocks{7, 96, 96 * 16}) || got[1] != (inFlightBlocks{9, 32, 32 * 16}) {
		t.Errorf("found %+v", got)
	}
	if got := s.find(nil, keysOf(prompt(4000)[1:]), 16, now); len(got) != 0 {
		t.Errorf("another prompt found %+v", got)
	}
	s.remove(7)
	if got := s.find(nil, keysOf(b), 16, now); len(got) != 1 || got[0].slot != 9 {
		t.Errorf("after forget: %+v", got)
	}
	if got := s.find(nil, keysOf(b), 16, now+int64(2*time.Second)); len(got) != 0 {
		t.Errorf("after its end: %+v", got)
	}
	// The clock of the cells goes round.
	s.remove(9)
	round := int64(tick) << endBits
	s.add(3, keysOf(b), 0, round-int64(tick), time.Second)
	if got := s.find(nil, keysOf(b), 16, round+int64(tick)); len(got) != 1 || got[0].slot != 3 {
		t.Errorf("across the round: %+v", got)
	}
	// Bounded: whatever is entered, the newest is found.
	for i := range 200_000 {
		s.add(worker.Slot(i%500), []blockhash.Seq{blockhash.Seq(mixSeed(uint64(i)))}, 0, now, time.Second)
	}
	s.add(11, keysOf(b), 0, now, 5*time.Second)
	if got := s.find(nil, keysOf(b), 16, now); len(got) == 0 || got[0].slot != 11 {
		t.Errorf("in a full table: %+v", got)
	}
}

// A burst of one long new prefix: without what is awaited every request computes
// it; with it, every rank at most once.
func TestBurstOfOnePrefixStaysTogether(t *testing.T) {
	const n = 24
	run := func(weight float64) (ranksUsed int, computed int64) {
		rs := ranks(8)
		for _, r := range rs {
			r.Feed.Store(uint32(worker.FeedLive))
		}
		opt := testOptions
		opt.InFlightWeight = weight
		s := New(opt)
		used := map[*worker.Rank]bool{}
		for i := range n {
			toks := append(prompt(8000), uint32(i), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
			c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: len(toks), Keys: keysOf(toks), KeyTokens: 16})
			used[c.Rank] = true
		}
		for _, r := range rs {
			computed += r.PrefillTokens.Load()
		}
		return len(used), computed
	}
	without, all := run(0)
	with, less := run(0.9)
	t.Logf("24 requests of one prefix of 8,000 tokens over 8 ranks: on %d ranks, %d tokens to compute; with what is awaited on %d, %d tokens", without, all, with, less)
	if without != 8 || all != n*8016 {
		t.Errorf("without: on %d ranks, %d tokens", without, all)
	}
	// Eight idle ranks may well compute it side by side, once each.
	if less > 8*8016+16*(8016/2) {
		t.Errorf("with: on %d ranks, %d tokens of %d", with, less, all)
	}
}

func TestInFlightIsExplainedAndRemoved(t *testing.T) {
	for _, n := range []int{4, 100} { // the plain way, and the board
		rs := ranks(n)
		for _, r := range rs {
			r.Feed.Store(uint32(worker.FeedLive))
		}
		s := New(testOptions)
		toks := prompt(3200)
		q := &Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 3200, Keys: keysOf(toks), KeyTokens: 16, Attempt: 1}
		if n > maxAllRecorded {
			q.Keys = nil
			onIndex(t, s, q)
			q.Keys = keysOf(toks)
		}
		a, _ := s.Choose(q)
		a.Reservation.Release()
		q.RequestID = "b"
		b, _ := s.Choose(q)
		if b.Rank != a.Rank || b.CachedTokens < 2048 {
			t.Errorf("%d ranks: went to %v, then to %v with %d tokens predicted", n, a.Rank.ID, b.Rank.ID, b.CachedTokens)
		}
		for _, c := range decode(t, s, "b").Decisions[0].Shown {
			if c.InFlight != c.Chosen {
				t.Errorf("%d ranks: %+v", n, c)
			}
		}
		s.Forget(a.Rank.Slot)
		c, _ := s.Choose(q)
		if c.CachedTokens != 0 && c.Rank == a.Rank {
			t.Errorf("%d ranks: %d tokens predicted after Forget", n, c.CachedTokens)
		}
	}
}

// Of what a rank is known to hold nothing is awaited there: only what lies beyond.
func TestOnlyUncachedBlocksAreInFlight(t *testing.T) {
	rs := ranks(1)
	rs[0].Feed.Store(uint32(worker.FeedLive))
	rs[0].EventBlockSize.Store(16)
	s, ix := New(testOptions), kvindex.New(kvindex.Options{})
	toks := prompt(64 * 16)
	store(ix, rs[0], toks, 16, 20)
	var o kvindex.Overlap
	ix.Find(keysOf(toks), &o)
	s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: len(toks), Overlap: &o, Keys: keysOf(toks), KeyTokens: 16})
	if got := s.inFlight.find(nil, keysOf(toks), 16, s.now()); len(got) != 1 || got[0].blocks != 64 {
		t.Errorf("of the whole prompt: %+v", got)
	}
	if got := s.inFlight.find(nil, keysOf(toks[:20*16]), 16, s.now()); len(got) != 0 {
		t.Errorf("of what it holds: %+v", got)
	}
}
