package session

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/router/blockhash"
	"sluice/router/schedule"
	"sluice/router/worker"
)

type headers map[string]string

func (h headers) Header(name string) []byte {
	for n, v := range h {
		if strings.EqualFold(n, name) {
			return []byte(v)
		}
	}
	return nil
}

// Of any two headers, the one that the order of the origins names first decides.
func TestPrecedenceOfHeaders(t *testing.T) {
	if id, from := FromHeaders(headers{"Content-Type": "application/json", "X-Session": "a"}); id != nil || from != None {
		t.Errorf("no session header: got %q from %q", id, from)
	}
	for a := SluiceSession; a < PromptCacheKey; a++ {
		if !a.IsHeader() {
			t.Errorf("%s is a header", a)
		}
		for b := a; b < PromptCacheKey; b++ {
			id, from := FromHeaders(headers{b.String(): "b", a.String(): "a"})
			if string(id) != "a" || from != a {
				t.Errorf("%s and %s: got %q from %s", a, b, id, from)
			}
		}
	}
	if PromptCacheKey.IsHeader() || None.IsHeader() {
		t.Error("a member of the body counts as a header")
	}
}

func TestFromBody(t *testing.T) {
	long := strings.Repeat("k", MaxID+1)
	for _, c := range []struct {
		body       string
		userMember bool
		id         string
		from       Origin
	}{
		{`{"model":"m"}`, true, "", None},
		{`{"prompt_cache_key":"k1","user":"u"}`, true, "k1", PromptCacheKey},
		{`{"user":"u"}`, true, "u", User},
		{`{"user":"u"}`, false, "", None},
		{`{"prompt_cache_key":"a\u0062\"c"}`, false, `ab"c`, PromptCacheKey},
		{`{"prompt_cache_key":7,"user":{"id":"x"}}`, true, "", None},
		{`{"prompt_cache_key":null,"user":"u"}`, true, "u", User},
		{`{"prompt_cache_key":"` + long + `","user":"u"}`, true, "u", User},
		{`{"prompt_cache_key":"a\u0000b"}`, true, "", None},
		{`{"prompt_cache_key":""}`, true, "", None},
		{`{"metadata":{"prompt_cache_key":"inner"}}`, true, "", None},
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(c.body), jsonscan.Limits{MaxDepth: 8}); err != nil {
			t.Fatalf("%s: %v", c.body, err)
		}
		if id, from := FromBody(&doc, c.userMember); string(id) != c.id || from != c.from {
			t.Errorf("%s: got %q from %q, want %q from %q", c.body, id, from, c.id, c.from)
		}
	}
}

func TestIsFinal(t *testing.T) {
	for _, name := range Final {
		if !IsFinal(headers{name: "true"}) || !IsFinal(headers{name: "1"}) || IsFinal(headers{name: "false"}) {
			t.Errorf("%s: want true for true and 1 alone", name)
		}
	}
}

func TestCheckID(t *testing.T) {
	for id, want := range map[string]string{
		"a": "", strings.Repeat("é", MaxID/2): "", "a/b?c": "",
		"": "empty", strings.Repeat("x", MaxID+1): "257 bytes", "a\x00": "control", "a\x7f": "control", "\n": "control",
	} {
		if got := CheckID([]byte(id)); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%.10q: got %q, want %q", id, got, want)
		}
	}
}

// The key depends on tenant and id, and where one ends and the other begins.
func TestKeysAreScopedAndSalted(t *testing.T) {
	a, b := NewTable(Options{}), NewTable(Options{})
	seen := map[Key]string{}
	for _, c := range [][2]string{{"", "s"}, {"t", "s"}, {"ts", ""}, {"u", "s"}, {"", "ts"}, {strings.Repeat("t", 1000), "s"}} {
		k := a.KeyOf(c[0], []byte(c[1]))
		if k.IsZero() || seen[k] != "" || k.Short() == 0 {
			t.Errorf("%.10q: the key is that of %q", c, seen[k])
		}
		seen[k] = fmt.Sprint(c)
		if k != a.KeyOf(c[0], []byte(c[1])) {
			t.Errorf("%.10q: the key changes", c)
		}
		if k == b.KeyOf(c[0], []byte(c[1])) {
			t.Errorf("%.10q: two processes have one key", c)
		}
	}
}

// turn runs a turn of a session without limits: its prompt is blocks of 16 tokens.
func turn(t *Table, tenant, id string, blocks []blockhash.Seq, r *worker.Rank) Turn {
	u := t.Begin(t.KeyOf(tenant, []byte(id)), tenant, SluiceSession, false)
	if w := t.Start(&u, Request{Pool: "m", Tokens: 16 * len(blocks)}); w != nil {
		panic("it waits")
	}
	t.Observe(&u, blocks, 16, 16*len(blocks), true)
	if r != nil {
		t.Placed(&u, schedule.WholeLeg, r)
	}
	return u
}

func blocksOf(prefix, own, n int) (blocks []blockhash.Seq) {
	for i := range n {
		b := blockhash.Seq(1000 + i)
		if i >= prefix {
			b = blockhash.Seq(own*1_000_000 + i)
		}
		blocks = append(blocks, b)
	}
	return blocks
}

func newRank(id string) *worker.Rank { return worker.New(worker.Spec{ID: id}).Ranks[0] }

func TestFinishForgetsWhatNobodyElseUses(t *testing.T) {
	tb, rank := NewTable(Options{}), newRank("w")
	a, b := blocksOf(40, 1, 100), blocksOf(40, 2, 90)
	for id, blocks := range map[string][]blockhash.Seq{"a": a, "b": b} {
		u := turn(tb, "", id, blocks, rank)
		tb.End(&u, Result{OK: true, Cached: -1, Prompt: 16 * len(blocks)})
	}
	f := tb.Finish(tb.KeyOf("", []byte("a")))
	// 40 shared blocks are all kept; up to markBlocks of its own may be, because only marks are compared.
	if !slices.Equal(f.Keys, a) || f.Keep < 40 || f.Keep >= 40+markBlocks || !slices.Equal(f.Ranks, []*worker.Rank{rank}) {
		t.Errorf("of 100 blocks, 40 of them shared, %d are kept, on %v", f.Keep, f.Ranks)
	}
	if f.Blocks != 100-f.Keep {
		t.Errorf("%d of 100 blocks are unused, and %d kept", f.Blocks, f.Keep)
	}
	if f := tb.Finish(tb.KeyOf("", []byte("a"))); f.Keys != nil {
		t.Error("a finished session has blocks")
	}
	if f := tb.Finish(tb.KeyOf("other", []byte("b"))); f.Keys != nil {
		t.Error("another tenant has finished the session")
	}
	if f = tb.Finish(tb.KeyOf("", []byte("b"))); !slices.Equal(f.Keys, b) || f.Keep != 0 {
		t.Errorf("the last session keeps %d blocks", f.Keep)
	}
	if st := tb.Stats(); st.Sessions != 0 || st.Counts.Finished != 2 || len(tb.blocks.count) != 0 || tb.keys != 0 || st.Active != 0 || st.Need != 0 {
		t.Errorf("what is left: %+v, %d marks, %d keys", st, len(tb.blocks.count), tb.keys)
	}
}

// A session that is finished during a turn, or with the header on its last request, ends with it.
func TestFinishDuringATurn(t *testing.T) {
	tb, rank := NewTable(Options{}), newRank("w")
	blocks := blocksOf(0, 1, 50)
	key := tb.KeyOf("", []byte("a"))
	u := turn(tb, "", "a", blocks, rank)
	if f := tb.Finish(key); f.Keys != nil {
		t.Error("the blocks of a turn in progress are forgotten")
	}
	if f := tb.End(&u, Result{}); !slices.Equal(f.Keys, blocks) {
		t.Errorf("%d blocks are forgotten at the end", len(f.Keys))
	}
	u = turn(tb, "", "a", blocks, rank)
	tb.Finish(key)
	next := turn(tb, "", "a", blocks, rank) // the session goes on
	tb.End(&u, Result{})
	if f := tb.End(&next, Result{}); f.Keys != nil || tb.Stats().Sessions != 1 {
		t.Error("a session that went on has ended")
	}
	last := tb.Begin(key, "", SluiceSession, true)
	if f := tb.End(&last, Result{OK: true}); !slices.Equal(f.Keys, blocks) || tb.Stats().Sessions != 0 {
		t.Error("the last request does not end the session")
	}
	if f := tb.End(&last, Result{}); f.Keys != nil { // a second call has no effect
		t.Error("a turn has ended twice")
	}
}

// A request with another, shorter prompt, such as one for a title, is not taken for the session's
// context.
func TestMinorTurn(t *testing.T) {
	tb, rank, other := NewTable(Options{}), newRank("w"), newRank("v")
	u := turn(tb, "", "a", blocksOf(0, 1, 100), rank)
	tb.End(&u, Result{OK: true, Prompt: 1600, Cached: -1})
	u = turn(tb, "", "a", blocksOf(0, 2, 10), other)
	if !u.minor || u.expected != -1 {
		t.Errorf("a short prompt of its own: %+v", u)
	}
	tb.End(&u, Result{OK: true, Prompt: 160, Cached: 0})
	u = turn(tb, "", "a", blocksOf(0, 1, 120), nil)
	if u.minor || u.expected < 1600-16*markBlocks || u.expected > 1600 {
		t.Errorf("the next turn expects %d tokens, want about 1600", u.expected)
	}
	if got := tb.Rank(&u, schedule.WholeLeg); got != rank {
		t.Errorf("its rank is %v", got.ID)
	}
	tb.End(&u, Result{})
}

// A tenant that names many sessions displaces its own.
func TestTableIsBoundedPerTenant(t *testing.T) {
	tb := NewTable(Options{Max: 100})
	touch := func(tenant string, i int) {
		u := tb.Begin(tb.KeyOf(tenant, fmt.Append(nil, i)), tenant, SluiceSession, false)
		tb.End(&u, Result{})
	}
	for i := range 20 {
		touch("quiet", i)
	}
	for i := range 1000 {
		touch("noisy", i)
	}
	if st := tb.Stats(); st.Sessions != 100 || st.Counts.Evicted != 920 {
		t.Errorf("%d sessions, %d evicted", st.Sessions, st.Counts.Evicted)
	}
	for i := range 20 {
		if tb.byKey[tb.KeyOf("quiet", fmt.Append(nil, i))] == nil {
			t.Errorf("session %d of the quiet tenant is gone", i)
		}
	}
	if tb.byKey[tb.KeyOf("noisy", []byte("999"))] == nil || tb.byKey[tb.KeyOf("noisy", []byte("0"))] != nil {
		t.Error("the oldest of the noisy tenant should be gone, and the newest not")
	}
	tb.SetOptions(Options{Max: 10})
	if n := tb.Stats().Sessions; n != 10 {
		t.Errorf("%d sessions after Max became 10", n)
	}
}

func TestSessionsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tb := NewTable(Options{Expire: time.Minute})
		u := turn(tb, "", "idle", blocksOf(0, 1, 50), nil)
		tb.End(&u, Result{})
		long := turn(tb, "", "long", blocksOf(0, 2, 50), nil)
		time.Sleep(time.Minute)
		if st := tb.Stats(); st.Sessions != 1 || st.Counts.Expired != 1 {
			t.Errorf("after a minute: %+v", st)
		}
		tb.End(&long, Result{})
		time.Sleep(time.Minute)
		if st := tb.Stats(); st.Sessions != 0 || len(tb.blocks.count) != 0 || tb.keys != 0 {
			t.Errorf("after another: %+v", st)
		}
	})
}

// A request of a known session allocates nothing.
func TestKnownSessionAllocatesNothing(t *testing.T) {
	tb := NewTable(Options{})
	var h Headers = plainHeaders{[]byte("Content-Type"), []byte("Session-Id")}
	blocks := blocksOf(0, 1, 200)
	one := func() { knownTurn(tb, h, blocks) }
	one()
	if n := testing.AllocsPerRun(100, one); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

type plainHeaders [][]byte

func (h plainHeaders) Header(name string) []byte {
	for _, n := range h {
		if len(n) == len(name) && string(n) == name {
			return n
		}
	}
	return nil
}

func knownTurn(tb *Table, h Headers, blocks []blockhash.Seq) {
	id, from := FromHeaders(h)
	u := tb.Begin(tb.KeyOf("tenant", id), "tenant", from, IsFinal(h))
	tb.Start(&u, Request{Pool: "m", Tokens: 16 * len(blocks)})
	tb.Observe(&u, blocks, 16, 16*len(blocks), true)
	tb.Rank(&u, schedule.WholeLeg)
	tb.End(&u, Result{OK: true, Cached: 0, Prompt: 16 * len(blocks)})
}

// BenchmarkRecognise is what a request costs: without a session, and with one of 3,200 tokens.
func BenchmarkRecognise(b *testing.B) {
	tb := NewTable(Options{})
	var plain Headers = plainHeaders{[]byte("Content-Type"), []byte("Authorization"), []byte("User-Agent"), []byte("Accept"), []byte("Host"), []byte("Content-Length")}
	b.Run("none", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, from := FromHeaders(plain); from != None {
				b.Fatal("a session")
			}
		}
	})
	b.Run("known", func(b *testing.B) {
		b.ReportAllocs()
		var h Headers = append(slices.Clone(plain.(plainHeaders)), []byte("Session-Id"))
		blocks := blocksOf(0, 1, 200)
		for b.Loop() {
			knownTurn(tb, h, blocks)
		}
	})
}

// docs/sessions.md lists the names in their order.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/sessions.md")
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| (header|body) \\|").FindAllStringSubmatch(string(text), -1) {
		got = append(got, row[1]+" "+row[2])
	}
	for o := None + 1; o < NumOrigins; o++ {
		want = append(want, o.String()+map[bool]string{true: " header", false: " body"}[o.IsHeader()])
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/sessions.md has %q, want %q", got, want)
	}
}
