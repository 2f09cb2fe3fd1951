package tokenize

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func TestCacheDistinguishesRequests(t *testing.T) {
	e := newEngine(t)
	tk := New(patient)
	bodies := []string{
		`{"model":"a","messages":[{"content":"hello"}]}`,
		`{"model":"b","messages":[{"content":"hello"}]}`,
		`{"model":"a","messages":[{"content":"hello"}],"add_generation_prompt":false}`,
		`{"model":"a","messages":[{"content":"hello"}],"tools":[1]}`,
		`{"model":"a","messages":[{"content":"hellp"}]}`,
	}
	for round, want := range []Source{FromEngine, FromCache} {
		for _, b := range bodies {
			if p := find(t, tk, Chat, b, e.ep); p.Source != want || len(p.Tokens) == 0 {
				t.Errorf("round %d, %s: from %v", round, b, p.Source)
			}
		}
	}
	// Fields that do not change the tokens cause no miss.
	if p := find(t, tk, Chat, `{"stream":true,"max_tokens":3,"messages":[{"content":"hello"}],"model":"a","tools":null}`, nil); p.Source != FromCache {
		t.Errorf("other members: from %v", p.Source)
	}
	if n := len(e.requests()); n != len(bodies) {
		t.Errorf("%d calls for %d prompts", n, len(bodies))
	}
	s := tk.Stats()
	if s.FromEngine != 5 || s.FromCache != 6 || s.CacheEntries != 5 || s.CacheBytes <= 5*entryOverhead {
		t.Errorf("%+v", s)
	}
}

// A failed lookup must not stay, and one without an engine must not begin.
func TestCacheSkipsFailures(t *testing.T) {
	e := newEngine(t)
	tk := New(patient)
	body := `{"prompt":"some prompt"}`
	e.set(400, `{}`, nil)
	find(t, tk, Completion, body, e.ep)
	find(t, tk, Completion, body, nil)
	if s := tk.Stats(); s.CacheEntries != 0 || s.FromText != 2 || s.Refused != 1 {
		t.Errorf("%+v", s)
	}
	e.set(0, "", nil)
	if p := find(t, tk, Completion, body, e.ep); p.Source != FromEngine {
		t.Errorf("from %v", p.Source)
	}
}

func sized(bytes int64) *cache {
	c := newCache()
	c.setLimit(bytes)
	return c
}

// What may change does so for the next prompt; a cache that is made smaller keeps what
// was asked for last.
func TestReload(t *testing.T) {
	e := newEngine(t)
	tk := New(patient)
	body := func(i int) string { return fmt.Sprintf(`{"prompt":"prompt %d"}`, i) }
	for i := range 500 {
		find(t, tk, Completion, body(i), e.ep)
	}
	before := tk.Stats()
	opt := patient
	opt.CacheBytes = before.CacheBytes / 4
	tk.Reload(opt)
	if s := tk.Stats(); s.CacheBytes > opt.CacheBytes || s.CacheEntries == 0 || s.CacheEntries >= before.CacheEntries {
		t.Errorf("%d bytes of %d in %d entries", s.CacheBytes, opt.CacheBytes, s.CacheEntries)
	}
	if p := find(t, tk, Completion, body(499), nil); p.Source != FromCache {
		t.Errorf("the last prompt is %v", p.Source)
	}
	opt.MaxEngineBytes = 4
	tk.Reload(opt)
	if p := find(t, tk, Completion, body(1000), e.ep); p.Source != FromText || p.Err == "" {
		t.Errorf("a prompt that is too long now: %v %q", p.Source, p.Err)
	}
	opt.Mode = ModeIDs
	tk.Reload(opt)
	if p := find(t, tk, Completion, body(499), e.ep); p.Source != None {
		t.Errorf("with ids only: %v", p.Source)
	}
}

func TestNoCache(t *testing.T) {
	e := newEngine(t)
	tk := New(Options{CacheBytes: -1, Timeout: patient.Timeout})
	for range 3 {
		if p := find(t, tk, Completion, `{"prompt":"some prompt"}`, e.ep); p.Source != FromEngine {
			t.Errorf("from %v", p.Source)
		}
	}
	if s := tk.Stats(); s.CacheEntries != 0 || s.CacheBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// finish puts ids of n tokens under k as a lookup would.
func finish(c *cache, k hash, n int) {
	if _, f, leads := c.get(k, true); leads {
		f.ids = packIDs(make([]uint32, n))
		c.finish(k, f)
	}
}

func TestCacheDropsTheLeastRecentlyUsed(t *testing.T) {
	const each = 3*100 + entryOverhead
	c := sized(16 * 3 * each) // three entries a shard
	key := func(i int) hash { return hash{Hi: 16 * uint64(i), Lo: uint64(i)} }
	has := func(i int) bool { _, ok := c.shards[0].entries[key(i)]; return ok }
	for i := range 3 {
		finish(c, key(i), 100)
	}
	c.get(key(0), false) // used again: 1 is now the oldest
	finish(c, key(3), 100)
	if !has(0) || has(1) || !has(2) || !has(3) {
		t.Error("not the least recently used entry went")
	}
	finish(c, key(4), 300) // needs the room of two, and a little more
	if n, bytes := c.size(); has(2) || !has(4) || bytes > 3*each || n > 2 {
		t.Errorf("%d entries, %d bytes", n, bytes)
	}
	finish(c, key(5), 10000)
	if has(5) || !has(4) {
		t.Error("an entry over the bound came in, or pushed others out")
	}
}

// After every operation, the bytes equal the sum of the entries, under the bound, and the
// list holds each entry once.
func TestCacheBookkeeping(t *testing.T) {
	c := sized(64 << 10)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		k := hash{Hi: rng.Uint64N(400), Lo: 1}
		if rng.IntN(3) == 0 {
			c.get(k, false)
		} else {
			finish(c, k, rng.IntN(300))
		}
	}
	for i := range c.shards {
		s := &c.shards[i]
		var sum int64
		n := 0
		for e := s.newest; e != nil; e = e.older {
			if s.entries[e.key] != e || e.older != nil && e.older.newer != e || n > len(s.entries) {
				t.Fatal("the list is broken")
			}
			sum += e.cost()
			n++
		}
		if n != len(s.entries) || sum != s.bytes || sum > s.limit || len(s.lookups) != 0 || n == 0 {
			t.Fatalf("shard %d: %d in list, %d in map, %d bytes counted %d, limit %d, %d flights", i, n, len(s.entries), sum, s.bytes, s.limit, len(s.lookups))
		}
	}
}

func TestKeyCoversEverySegment(t *testing.T) {
	seen := map[hash]string{}
	for _, body := range []string{`{"prompt":"a"}`, `{"prompt":"b"}`, `{"model":"a","prompt":"a"}`, `{"prompt":"a","add_special_tokens":true}`} {
		w := getWork()
		doc := scanned(t, body)
		w.read(Completion, doc)
		w.compose(doc)
		k := w.key()
		if again := w.key(); again != k {
			t.Error("a key differs from itself")
		}
		if other, ok := seen[k]; ok {
			t.Errorf("%s and %s share a key", body, other)
		}
		seen[k] = body
		size := 0
		for _, s := range w.segs {
			size += len(s)
		}
		if size != w.size {
			t.Errorf("size %d, want %d", w.size, size)
		}
		w.put()
	}
}

func BenchmarkPrompt(b *testing.B) {
	e := newEngine(b)
	turn := `{"role":"user","content":"`
	for range 250 {
		turn += `The router reads the body once.\nIt never decodes it. `
	}
	chat := `{"model":"m","messages":[` + turn + `"},` + turn + `"}]}`
	ids := fmt.Sprint("", "")
	for i := range 4000 {
		ids += fmt.Sprintf(",%d", 1000+i*31%120000)
	}
	for _, bm := range []struct {
		name string
		kind Kind
		body string
		opt  Options
		want Source
	}{
		{"cache-27k", Chat, chat, patient, FromCache},
		{"text-27k", Chat, chat, Options{Mode: ModeText}, FromText},
		{"ids-4000", Generate, `{"token_ids":[1` + ids[1:] + `]}`, patient, FromRequest},
	} {
		b.Run(bm.name, func(b *testing.B) {
			tk := New(bm.opt)
			doc := scanned(b, bm.body)
			var p Prompt
			tk.Prompt(&p, bm.kind, doc, e.ep, nil)
			b.ReportAllocs()
			for b.Loop() {
				tk.Prompt(&p, bm.kind, doc, e.ep, nil)
			}
			if p.Source != bm.want {
				b.Fatal(p.Source)
			}
		})
	}
}
