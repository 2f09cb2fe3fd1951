package placement

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// checkCache compares a cache's counters and its list with its cells.
func checkCache(t *testing.T, c *cache) {
	t.Helper()
	used, listed := 0, 0
	for _, n := range c.index {
		if n != 0 && c.cells[n].refs > 0 {
			used++
		}
	}
	for n := c.cells[0].next; n != 0; n = c.cells[n].next {
		listed++
	}
	if used != c.used || used+listed != c.cached {
		t.Fatalf("%d blocks in use and %d counted, %d listed, %d in all", used, c.used, listed, c.cached)
	}
	if c.cached+c.reserved > c.capacity && listed > 0 {
		t.Fatalf("%d blocks and %d reserved, capacity %d, although %d could be evicted", c.cached, c.reserved, c.capacity, listed)
	}
}

func blocksFrom(first, n int) (s []int32) {
	for i := range n {
		s = append(s, int32(first+i))
	}
	return s
}

// use runs one request on a cache and returns how many blocks it found.
func use(t *testing.T, c *cache, blocks []int32) int {
	t.Helper()
	depth := c.depth(blocks)
	if !c.reserve(blocks[:depth], len(blocks)-depth) {
		t.Fatal("it does not fit")
	}
	checkCache(t, c)
	n := c.store(blocks, depth, len(blocks))
	c.release(blocks, len(blocks)-depth-n)
	checkCache(t, c)
	return depth
}

func TestCacheEvictsTheLeastRecentlyUsedEndFirst(t *testing.T) {
	c := newCache(400, 1, 10)
	use(t, c, blocksFrom(100, 4))
	use(t, c, blocksFrom(200, 4))
	if got := use(t, c, blocksFrom(100, 4)); got != 4 {
		t.Errorf("found %d blocks, want 4", got)
	}
	c.changes = nil
	use(t, c, blocksFrom(300, 4)) // two are free; of 200… the end goes
	if got := c.depth(blocksFrom(200, 4)); got != 2 {
		t.Errorf("%d of the oldest prompt are left, want 2", got)
	}
	if got := c.depth(blocksFrom(100, 4)); got != 4 {
		t.Errorf("%d of the younger prompt are left, want 4", got)
	}
	if x := c.changes[0]; !x.removed || !slices.Equal(x.blocks, []int32{203, 202}) {
		t.Errorf("first change %+v", x)
	}
	if x := c.changes[1]; x.removed || x.hasParent || !slices.Equal(x.blocks, blocksFrom(300, 4)) {
		t.Errorf("second change %+v", x)
	}
}

func TestCacheKeepsWhatRunningRequestsUse(t *testing.T) {
	c := newCache(400, 1, 10)
	if !c.reserve(nil, 8) {
		t.Fatal("8 of 10 blocks do not fit")
	}
	if c.reserve(nil, 4) {
		t.Error("12 of 10 blocks fit")
	}
	if u := c.usage(); u != 0.8 {
		t.Errorf("usage %v, want 0.8", u)
	}
	// Both compute the same blocks: the second keeps a copy of its own.
	if n := c.store(blocksFrom(1, 4), 0, 4); n != 4 {
		t.Errorf("%d stored", n)
	}
	if n := c.store(blocksFrom(1, 4), 0, 4); n != 0 || c.reserved != 4 {
		t.Errorf("%d stored again, %d reserved", n, c.reserved)
	}
	c.release(blocksFrom(1, 4), 0)
	checkCache(t, c)
	if c.used != 4 {
		t.Errorf("%d blocks in use after the first request, want 4", c.used)
	}
	c.release(blocksFrom(1, 4), 4)
	checkCache(t, c)
	if c.used != 0 || c.reserved != 0 || c.depth(blocksFrom(1, 4)) != 4 {
		t.Errorf("after both: %d in use, %d reserved, %d cached", c.used, c.reserved, c.depth(blocksFrom(1, 4)))
	}
}

// TestRunStaysWithinItsBounds plays a small trace: no policy exceeds the ideal, the same run has the
// same result, and what the router predicts is what engines find.
func TestRunStaysWithinItsBounds(t *testing.T) {
	for _, s := range Shapes {
		tr := s.Generate(400, 3)
		o := Options{Engines: 4, KVTokens: 60_000, Engine: DefaultEngine, Speed: 0.2}
		b := Bound(tr, o)
		kv := simulate(t, tr, o, Variant{Options: newOptions("kv")})
		robin := simulate(t, tr, o, Variant{Options: newOptions("round_robin")})
		if kv.Hit > b.Infinite+1e-9 || robin.Hit > b.Infinite+1e-9 || b.Pooled > b.Infinite+1e-9 {
			t.Errorf("%s: cached %.3f, round robin %.3f, pooled %.3f exceed the ideal %.3f", s.Name, kv.Hit, robin.Hit, b.Pooled, b.Infinite)
		}
		if kv.Hit < robin.Hit {
			t.Errorf("%s: cached %.3f, less than round robin's %.3f", s.Name, kv.Hit, robin.Hit)
		}
		if d := kv.Predicted - kv.Hit; d > 0.05 || d < -0.05 {
			t.Errorf("%s: predicted %.3f, found %.3f", s.Name, kv.Predicted, kv.Hit)
		}
		if again := simulate(t, tr, o, Variant{Options: newOptions("kv")}); again != kv {
			t.Errorf("%s: the second run has another result: %+v, %+v", s.Name, kv, again)
		}
	}
}

func TestReadTrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	read := func(text string) (*Trace, error) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return ReadTrace(path)
	}
	tr, err := read(`{"timestamp": 500, "input_length": 1100, "output_length": 600, "hash_ids": [7, 8, 9]}
{"timestamp": 1500, "input_length": 1030, "output_length": 0, "hash_ids": [7, 8, 10]}
`)
	if err != nil {
		t.Fatal(err)
	}
	a, b := tr.Requests[0], tr.Requests[1]
	if len(tr.Requests) != 2 || len(a.Blocks) != 2 || !slices.Equal(a.Blocks, b.Blocks) || len(a.Generated) != 1 || b.At.Seconds() != 1 || b.Output != 1 || len(b.Generated) != 0 {
		t.Errorf("read %+v", tr.Requests)
	}
	for text, want := range map[string]string{
		"":  "no request",
		"x": "line 1",
		`{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}`:     "input_length 0",
		`{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1]}`: "1 hash_ids",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", text, err, want)
		}
	}
	if _, err := ReadTrace(path + "x"); err == nil {
		t.Error("no error for a file that does not exist")
	}
}

// TestOnePrefixDoesNotFillOneEngine: two engines and one request at a time, conversations under one
// system prompt. The first engine with it used to get every request, however much it evicted.
func TestOnePrefixDoesNotFillOneEngine(t *testing.T) {
	b := newBuilder("one", 1)
	system := b.grow(prompt{}, 1024)
	open := make([]prompt, 14)
	for i := range 600 {
		p := &open[b.rng.IntN(len(open))]
		if p.tokens == 0 || p.tokens > 5000 {
			*p = system
		}
		*p = b.add(float64(10*i), b.grow(*p, 700), 100)
	}
	tr := b.finish(400)
	o := Options{Engines: 2, Engine: DefaultEngine, KVTokens: 25_000, Speed: 1}
	with := simulate(t, tr, o, Variant{Options: newOptions("kv")})
	opt := newOptions("kv")
	opt.EvictionWeight = 0
	without := simulate(t, tr, o, Variant{Options: opt})
	if with.Busiest > 1.25 || with.Hit < without.Hit+0.1 {
		t.Errorf("the busier engine has %.2f times its share, cached %.3f; without the eviction term %.2f and %.3f", with.Busiest, with.Hit, without.Busiest, without.Hit)
	}
}

// TestOthersKeepPrefixesTogether: at nearly full load the fleet computes less, and first tokens come
// no later, than if each request minimised its own time.
func TestOthersKeepPrefixesTogether(t *testing.T) {
	tr := families(1500, 2)
	o := Options{Engines: 4, Engine: DefaultEngine, KVTokens: 100_000}
	o.Speed = 16 * tr.span().Seconds() / float64(len(tr.Requests))
	ideal := Bound(tr, o).Infinite
	with := simulate(t, tr, o, Variant{Options: newOptions("kv")})
	opt := newOptions("kv")
	opt.OthersWeight = 0
	own := simulate(t, tr, o, Variant{Options: opt, CountInFull: true})
	if with.Hit < (own.Hit+ideal)/2 || with.Mean > own.Mean {
		t.Errorf("cached %.3f, mean %v; own time only %.3f, %v; ideal %.3f", with.Hit, with.Mean, own.Hit, own.Mean, ideal)
	}
}
