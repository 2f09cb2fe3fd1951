package schedule

import (
	"slices"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

func prompt(n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(i*31 + 7)
	}
	return t
}

// store places the first blocks of tokens on a rank, and makes its feed live.
func store(ix kvindex.Index, r *worker.Rank, tokens []uint32, size, blocks int) {
	locals := blockhash.Locals(nil, tokens, size)[:blocks]
	engine := make([]kvindex.EngineHash, blocks)
	for i := range engine {
		engine[i] = kvindex.EngineHash(1000*int(r.Slot) + i + 1)
	}
	ix.Store(&kvindex.Stored{Slot: r.Slot, Salt: blockhash.NewSalt("m", "", ""), Engine: engine, Local: locals})
	r.EventBlockSize.Store(int64(size))
	r.Feed.Store(uint32(worker.FeedLive))
}

func find(ix kvindex.Index, o *kvindex.Overlap, tokens []uint32, size int) {
	ix.Find(blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), tokens, size), o)
}

func TestOverlapWinsUntilTheQueueIsLonger(t *testing.T) {
	rs := ranks(4)
	ix := kvindex.New(kvindex.Options{})
	toks := prompt(1600)
	store(ix, rs[2], toks, 16, 50)
	store(ix, rs[1], toks, 16, 20)
	var o kvindex.Overlap
	find(ix, &o, toks, 16)
	s := New(testOptions)
	for _, leg := range []LegKind{WholeLeg, PrefillLeg, DecodeLeg} {
		c, _ := s.Choose(&Query{Leg: leg, Candidates: rs, Overlap: &o, PromptTokens: 1600})
		if c.Rank != rs[2] || c.CachedTokens != 800 || c.OverlapBlocks != 50 {
			t.Errorf("%v: chose %v, %d tokens cached", leg, c.Rank.ID, c.CachedTokens)
		}
		if leg != DecodeLeg && rs[2].PrefillTokens.Load() != 800 {
			t.Errorf("%v: %d tokens booked, want the 800 not cached", leg, rs[2].PrefillTokens.Load())
		}
		c.Reservation.Release()
	}
	rs[2].PrefillTokens.Store(600) // 800 saved against 600 queued: still ahead, but w1 saves 320 for nothing
	c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, Overlap: &o, PromptTokens: 1600})
	if c.Rank != rs[1] {
		t.Errorf("chose %v, want w1", c.Rank.ID)
	}
}

// Engines compute the last token of a prompt in any case, and with it the rest of its block.
func TestFullyCachedPromptReservesItsLastBlock(t *testing.T) {
	for _, size := range []int{1, 16} {
		rs := ranks(1)
		ix := kvindex.New(kvindex.Options{})
		toks := prompt(160)
		store(ix, rs[0], toks, size, 160/size)
		var o kvindex.Overlap
		find(ix, &o, toks, size)
		for tokens, want := range map[int]int{160: 160 - size, 161: 160} {
			c, _ := New(testOptions).Choose(&Query{Leg: PrefillLeg, Candidates: rs, Overlap: &o, PromptTokens: tokens})
			if n := rs[0].PrefillTokens.Load(); c.CachedTokens != want || n != int64(tokens-want) {
				t.Errorf("blocks of %d, %d tokens: booked %d, cached %d, want %d cached", size, tokens, n, c.CachedTokens, want)
			}
			c.Reservation.Release()
		}
	}
}

// An engine caches whole blocks of its own size, which may be larger than those of the keys.
func TestPredictionIsInBlocksOfTheRank(t *testing.T) {
	for size, want := range map[int]int{16: 48, 32: 32, 64: 0} {
		rs := ranks(1)
		rs[0].Feed.Store(uint32(worker.FeedLive))
		rs[0].EventBlockSize.Store(int64(size))
		s := New(testOptions)
		toks := prompt(48)
		var c Choice
		for _, more := range [][]uint32{{1, 2, 3}, {4, 5, 6}} {
			all := append(slices.Clone(toks), more...)
			c, _ = s.Choose(&Query{Leg: WholeLeg, Candidates: rs, PromptTokens: len(all), Keys: keysOf(all), KeyTokens: 16})
		}
		if c.CachedTokens != want {
			t.Errorf("blocks of %d: %d tokens predicted of 48 in flight, want %d", size, c.CachedTokens, want)
		}
	}
}

func TestFeedDecidesWhichOverlapIsBelieved(t *testing.T) {
	rs := ranks(1)
	ix, guess := kvindex.New(kvindex.Options{}), kvindex.New(kvindex.Options{})
	toks := prompt(1600)
	store(ix, rs[0], toks, 16, 10)
	store(guess, rs[0], toks, 16, 30)
	var exact, approx kvindex.Overlap
	find(ix, &exact, toks, 16)
	find(guess, &approx, toks, 16)
	s := New(testOptions)
	for _, c := range []struct {
		feed   worker.FeedState
		tokens bool
		want   int
	}{
		{worker.FeedLive, true, 160}, {worker.FeedSyncing, true, 480}, {worker.FeedBroken, true, 480},
		{worker.FeedNone, true, 480}, {worker.FeedLive, false, 480},
	} {
		rs[0].Feed.Store(uint32(c.feed))
		q := &Query{Candidates: rs, Approx: &approx, ApproxBlockTokens: 16, PromptTokens: 1600}
		if c.tokens {
			q.Overlap = &exact
		}
		ch, _ := s.Choose(q)
		if ch.CachedTokens != c.want {
			t.Errorf("feed %v, tokens %v: %d cached, want %d", c.feed, c.tokens, ch.CachedTokens, c.want)
		}
		ch.Reservation.Release()
	}
}

func TestMixedBlockSizes(t *testing.T) {
	rs := ranks(2)
	ix := kvindex.New(kvindex.Options{})
	toks := prompt(1600)
	store(ix, rs[0], toks, 16, 40) // 640 tokens
	store(ix, rs[1], toks, 64, 20) // 1280 tokens, in fewer blocks
	q := &Query{Candidates: rs, PromptTokens: 1600, Overlaps: []SizedOverlap{{BlockSize: 16}, {BlockSize: 64}}}
	for i := range q.Overlaps {
		find(ix, &q.Overlaps[i].Overlap, toks, q.Overlaps[i].BlockSize)
	}
	c, _ := New(testOptions).Choose(q)
	if c.Rank != rs[1] || c.CachedTokens != 1280 {
		t.Errorf("chose %v with %d cached", c.Rank.ID, c.CachedTokens)
	}
}

func TestOverlapAmongMany(t *testing.T) {
	rs := ranks(300)
	ix := kvindex.New(kvindex.Options{})
	toks := prompt(1600)
	for i := 0; i < 300; i += 10 {
		store(ix, rs[i], toks, 16, 10+i/10)
	}
	var o kvindex.Overlap
	find(ix, &o, toks, 16)
	s := New(testOptions)
	addLoad(s, rs[290], 5000)
	for turn := range 3 {
		c, _ := s.Choose(&Query{Leg: WholeLeg, Candidates: rs, Overlap: &o, PromptTokens: 1600})
		if c.Rank != rs[280] || c.CachedTokens != 38*16 {
			t.Errorf("turn %d: chose %v with %d cached", turn, c.Rank.ID, c.CachedTokens)
		}
		c.Reservation.Release()
	}
}

func BenchmarkSelectOverlap(b *testing.B) {
	rs := ranks(1000)
	ix := kvindex.New(kvindex.Options{})
	toks := prompt(4096)
	for i := range rs {
		rs[i].Feed.Store(uint32(worker.FeedLive))
		rs[i].EventBlockSize.Store(16)
		if i%10 == 0 {
			store(ix, rs[i], toks, 16, 10+i%246)
		}
	}
	var o kvindex.Overlap
	find(ix, &o, toks, 16)
	b.Run("ranks=1000/holders=100/tokens=4096", func(b *testing.B) {
		benchSelect(b, &Query{Candidates: rs, Overlap: &o, PromptTokens: 4096, MaxTokens: 256, RequestID: "r", Attempt: 1})
	})
	b.Run("ranks=1000/holders=100/tokens=4096/unrecorded", func(b *testing.B) {
		benchSelect(b, &Query{Candidates: rs, Overlap: &o, PromptTokens: 4096, MaxTokens: 256, Attempt: 1})
	})
}
