package replay

import (
	"errors"
	"io/fs"
	"math"
	"slices"
	"testing"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

const ms = time.Millisecond

// traceOf builds a trace by hand: ranks with the given capacity in blocks, all in one pool.
func traceOf(capacity, ranks int, requests ...Request) *Trace {
	t := &Trace{pools: [][]int{nil}}
	for i := range ranks {
		t.Ranks = append(t.Ranks, Rank{ID: worker.ID{Worker: string(rune('a' + i))}, Role: worker.Aggregated, Capacity: capacity})
		t.pools[0] = append(t.pools[0], i)
	}
	for i := range requests {
		q := &requests[i]
		if q.Leg = schedule.WholeLeg; q.BlockSize == 0 {
			q.BlockSize = 10
		}
		if q.DecodePool == 0 {
			q.DecodePool, q.DecodeChosen = -1, -1
		}
	}
	t.Requests = requests
	return t
}

func seqs(v ...blockhash.Seq) []blockhash.Seq { return v }

func approxEqual(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

// TestArithmetic replays five requests with their recorded choices on two ranks of four blocks
// of ten tokens, at 1 ms per token plus 5 ms. The expected values by hand:
//
//	at 0    rank a, 40 tokens 1 2 3 4: nothing cached, 40 ms to compute; first token after 45
//	at 10   rank a, the same: 39 cached (the last token is always computed); a is busy until 40, then 1: 41 - 10 + 5 = 36
//	at 20   rank b, 25 tokens 1 2: nothing cached, 25; first token after 30
//	at 100  rank a, 20 tokens 9 8: nothing cached, 20; after 25; evicts 4 and 3, the end of the first prompt
//	at 200  rank a, 1 2 3 4 again: 1 and 2 remain, 20 cached, 20 to compute; after 25
func TestArithmetic(t *testing.T) {
	four := seqs(1, 2, 3, 4)
	tr := traceOf(4, 2,
		Request{At: 0, Chosen: 0, Prompt: 40, Seqs: four, Cached: -1},
		Request{At: 10 * ms, Chosen: 0, Prompt: 40, Seqs: four, Cached: 40},
		Request{At: 20 * ms, Chosen: 1, Prompt: 25, Seqs: seqs(1, 2), Cached: 20},
		Request{At: 100 * ms, Chosen: 0, Prompt: 20, Seqs: seqs(9, 8), Cached: -1},
		Request{At: 200 * ms, Chosen: 0, Prompt: 40, Seqs: four, Cached: -1},
	)
	got := tr.Run(Variant{Name: "as it was", Recorded: true}, Rates{PerToken: ms, Base: 5 * ms})
	if got.Requests != 5 || !approxEqual(got.HitRate, (39.+20)/(40+40+25+20+40)) || got.P50 != 30*ms || got.P99 != 45*ms {
		t.Errorf("%+v", got)
	}
	if !approxEqual(got.Imbalance, (40.+1+20+20)*2/(40+1+20+20+25)) {
		t.Errorf("imbalance %v", got.Imbalance)
	}
	// Two requests have a report: 39 for 40 is off by one token; 0 for 20 by more than a block.
	if got.Fidelity != (Fidelity{Requests: 2, Modelled: 39, Reported: 60, WithinOneBlock: 1, MeanError: 10.5}) {
		t.Errorf("fidelity %+v", got.Fidelity)
	}
	if again := tr.Run(Variant{Name: "as it was", Recorded: true}, Rates{PerToken: ms, Base: 5 * ms}); again.HitRate != got.HitRate || again.P99 != got.P99 {
		t.Errorf("played again %+v", again)
	}
}

// TestHandOver: a decode rank holds a prompt from its first token on, not before.
func TestHandOver(t *testing.T) {
	two := seqs(1, 2)
	tr := traceOf(10, 2,
		Request{At: 0, Chosen: 0, Prompt: 20, Seqs: two, Cached: -1, DecodePool: 1, DecodeChosen: 1}, // first token at 20
		Request{At: 10 * ms, Chosen: 1, Prompt: 20, Seqs: seqs(5, 6), Cached: -1},                    // busy until 30
		Request{At: 50 * ms, Chosen: 1, Prompt: 20, Seqs: two, Cached: -1},                           // 19 cached: 1
	)
	tr.pools = append(tr.pools, []int{1})
	tr.Requests[0].Leg = schedule.PrefillLeg
	got := tr.Run(Variant{Recorded: true}, Rates{PerToken: ms})
	if got.P50 != 20*ms || got.P99 != 20*ms || !approxEqual(got.HitRate, 19./60) {
		t.Errorf("%+v", got)
	}
	tr.Requests[2].At = 15 * ms // before the hand-over: 20 more behind the 30
	if got = tr.Run(Variant{Recorded: true}, Rates{PerToken: ms}); got.P99 != 35*ms || got.HitRate != 0 {
		t.Errorf("before the hand-over %+v", got)
	}
}

// TestInitialBlocks: the caches contain the initial blocks, preferring the beginning of a chain
// when not all of it fits.
func TestInitialBlocks(t *testing.T) {
	q := Request{Chosen: 0, Prompt: 40, Seqs: seqs(1, 2, 3, 4), Cached: -1}
	for capacity, cached := range map[int]float64{8: 30, 2: 20} {
		tr := traceOf(capacity, 1, q)
		tr.initialChains = []initialChain{{rank: 0, seqs: seqs(1, 2, 3)}}
		if got := tr.Run(Variant{Recorded: true}, Rates{PerToken: ms}); !approxEqual(got.HitRate, cached/40) {
			t.Errorf("%d blocks: hit rate %v, want %v", capacity, got.HitRate, cached/40)
		}
	}
}

// TestPolicies: six requests with the same prompt go alternately to two idle ranks, and each
// rank computes the prompt once. With KV-aware choices it is computed once in total.
func TestPolicies(t *testing.T) {
	var list []Request
	for i := range 6 {
		list = append(list, Request{At: time.Duration(i) * time.Second, Chosen: i % 2, Prompt: 40, Seqs: seqs(1, 2, 3, 4), Cached: -1, Decode: ms})
	}
	tr := traceOf(100, 2, list...)
	weights := map[string]float64{"overlap_weight": 1, "prefill_weight": 1, "decode_weight": 1, "queue_weight": 1}
	for _, c := range []struct {
		v     Variant
		first int // times that all of it is computed
	}{
		{Variant{Recorded: true}, 2}, {Variant{Policy: "round_robin", Weights: weights}, 2}, {Variant{Policy: "kv", Weights: weights}, 1},
	} {
		got := tr.Run(c.v, Rates{PerToken: ms})
		if want := float64(6-c.first) * 39 / 240; !approxEqual(got.HitRate, want) || got.Requests != 6 {
			t.Errorf("%+v: hit rate %v, want %v", c.v, got.HitRate, want)
		}
	}
}

// TestCalibrate: one token took 10 ms and a hundred took 110, which makes 1 ms per token.
func TestCalibrate(t *testing.T) {
	var list []Request
	for i := range 9 {
		q := Request{At: time.Duration(i) * time.Second, Prompt: 100, Seqs: seqs(blockhash.Seq(10 * i)), TTFT: 110 * ms, Cached: -1}
		if i == 0 {
			q.Prompt, q.TTFT = 1, 10*ms
		}
		list = append(list, q)
	}
	rates, ok := traceOf(1000, 1, list...).Calibrate()
	if !ok || rates.Base != 10*ms || rates.PerToken < ms || rates.PerToken > ms+time.Microsecond {
		t.Errorf("%+v, %v", rates, ok)
	}
	if rates, ok := traceOf(1, 1).Calibrate(); ok || rates != DefaultRates {
		t.Errorf("of nothing: %+v, %v", rates, ok)
	}
}

func TestMeasured(t *testing.T) {
	tr := traceOf(10, 2,
		Request{Chosen: 0, Prompt: 100, Cached: 60, TTFT: 30 * ms},
		Request{Chosen: 1, Prompt: 50, Cached: 50, TTFT: 10 * ms},
		Request{Chosen: 1, Prompt: 50, Cached: -1, TTFT: 20 * ms},
	)
	got, ok := tr.Measured()
	if !ok || got.Requests != 2 || !approxEqual(got.HitRate, 110./150) || got.P50 != 20*ms || got.P99 != 30*ms || !approxEqual(got.Imbalance, 40.*2/41) {
		t.Errorf("%+v, %v", got, ok)
	}
	if _, ok := traceOf(10, 1).Measured(); ok {
		t.Error("nothing was measured")
	}
}

func TestCache(t *testing.T) {
	c := newCache(3)
	if gone := c.insert(seqs(1, 2)); len(gone) != 0 || c.matchLength(seqs(1, 2, 3)) != 2 || c.matchLength(seqs(2)) != 1 || c.matchLength(seqs(3)) != 0 {
		t.Errorf("%v, %d", gone, c.matchLength(seqs(1, 2, 3)))
	}
	if gone := c.insert(seqs(7, 8)); !slices.Equal(gone, []kvindex.EngineHash{2}) { // the end is evicted first
		t.Errorf("%v went", gone)
	}
	c.insert(seqs(1)) // makes it the newest again
	if gone := c.insert(seqs(9)); !slices.Equal(gone, []kvindex.EngineHash{8}) {
		t.Errorf("%v went", gone)
	}
	if gone := c.insert(seqs(20, 21, 22, 23)); len(gone) != 3 || c.matchLength(seqs(20, 21, 22, 23)) != 3 {
		t.Errorf("a prompt longer than the cache: %v went, %d left", gone, c.matchLength(seqs(20, 21, 22, 23)))
	}
	if len(c.cells) > 8 {
		t.Errorf("%d cells for three blocks", len(c.cells))
	}
}

func TestQuantile(t *testing.T) {
	d := []time.Duration{5, 1, 4, 2, 3}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.99: 5, 1: 5} {
		if got := Quantile(d, q); got != want {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
	if Quantile(nil, 0.5) != 0 {
		t.Error("of nothing")
	}
}

func TestLoadEmpty(t *testing.T) {
	if _, err := Load([]string{t.TempDir() + "/none"}, func(error) {}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if tr, err := Load(nil, nil); err != nil || len(tr.Requests) != 0 || tr.Span != 0 {
		t.Errorf("%v, %v", tr, err)
	}
}
