package sim

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/kvcache"
	"sluice/bench/testwait"
)

// TestEncodings holds the bytes of one batch in every encoding.
func TestEncodings(t *testing.T) {
	hash := func(n byte) (h kvcache.BlockHash) {
		for i := range h {
			h[i] = n + byte(i)
		}
		return h
	}
	events := []eventcodec.Event{
		{Kind: eventcodec.Removed, Hashes: []kvcache.BlockHash{hash(0x80)}},
		{Kind: eventcodec.Stored, Hashes: []kvcache.BlockHash{hash(1), hash(2)}, Root: true, Tokens: []uint32{1, 200, 70000, 4}, Salt: "tenantA"},
		{Kind: eventcodec.Stored, Hashes: []kvcache.BlockHash{hash(3)}, Parent: hash(2), Tokens: []uint32{5, 6}, Session: "s1"},
		{Kind: eventcodec.Cleared},
	}
	var b strings.Builder
	for _, enc := range eventcodec.Forms {
		for _, whole := range []bool{false, true} {
			e := eventcodec.Encoder{Encoding: enc, BlockSize: 2, Rank: 1, Bytes: whole}
			raw := e.Batch(nil, 1763690000.5, events)
			var js bytes.Buffer
			if left, err := msgp.CopyToJSON(&js, bytes.NewReader(raw)); err != nil {
				t.Fatalf("%s: %v %v", enc.Name, left, err)
			}
			fmt.Fprintf(&b, "%s bytes=%v\n%s\n%s\n\n", enc.Name, whole, hex.EncodeToString(raw), js.String())
		}
	}
	golden(t, "encodings.txt", b.String())
}

// TestHashes checks vectors of vLLM 0.32 (sha256_cbor, default seed) and SGLang 0.5.8.
func TestHashes(t *testing.T) {
	var v, s kvcache.Hasher
	s.SGLang = true
	a := v.Block(nil, true, []uint32{1, 2, 3, 4}, "")
	b := v.Block(&a, false, []uint32{5, 6, 7, 8}, "")
	if a.Uint64() != 9561501211280363793 || b.Uint64() != 15292913576410714033 {
		t.Errorf("vllm: %x %x", a, b)
	}
	a = s.Block(nil, true, []uint32{1, 2, 3, 4}, "")
	b = s.Block(&a, false, []uint32{5, 6, 7, 8}, "")
	if a.Int64() != -3488128144981237669 || b.Int64() != 5674439469042975057 {
		t.Errorf("sglang: %d %d", a.Int64(), b.Int64())
	}
}

// eventMirror is a subscriber and replay client with a naive model of one rank's cache.
type eventMirror struct {
	t      testing.TB
	ctx    *zmq.Context
	sub    *zmq.Socket
	dealer *zmq.Socket
	topic  string
	next   uint64
	copies map[uint64]int
	parent map[uint64]uint64
	tokens map[uint64][]uint32
	clears int
	lost   int
}

func newEventMirror(t testing.TB, e *Engine, rank int) *eventMirror {
	t.Helper()
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	w := &eventMirror{t: t, ctx: ctx}
	w.reset()
	w.sub, _ = ctx.NewSocket(zmq.SUB)
	w.dealer, _ = ctx.NewSocket(zmq.DEALER)
	for _, s := range []*zmq.Socket{w.sub, w.dealer} {
		s.SetLinger(0)
		s.SetRcvtimeo(10 * time.Second)
	}
	w.sub.SetSubscribe("")
	if err := w.sub.Connect(e.KVEndpoints()[rank]); err != nil {
		t.Fatal(err)
	}
	if err := w.dealer.Connect(e.ReplayEndpoints()[rank]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.sub.Close()
		w.dealer.Close()
		ctx.Term()
	})
	return w
}

func (w *eventMirror) reset() {
	w.next = 0
	w.copies, w.parent, w.tokens = map[uint64]int{}, map[uint64]uint64{}, map[uint64][]uint32{}
}

// replay asks from w.next and applies what comes.
func (w *eventMirror) replay() {
	w.t.Helper()
	w.dealer.SendMessage("", binary.BigEndian.AppendUint64(nil, w.next))
	for {
		f, err := w.dealer.RecvMessageBytes(0)
		if err != nil {
			w.t.Fatalf("replay: %v", err)
		}
		seq := binary.BigEndian.Uint64(f[len(f)-2])
		if seq == ^uint64(0) {
			return
		}
		w.apply(seq, f[len(f)-1])
	}
}

// live reads one live batch; false when none comes in time.
func (w *eventMirror) live(wait time.Duration) bool {
	w.t.Helper()
	w.sub.SetRcvtimeo(wait)
	f, err := w.sub.RecvMessageBytes(0)
	if err != nil {
		return false
	}
	if len(f) != 3 || len(f[1]) != 8 {
		w.t.Fatalf("frames: %q", f)
	}
	w.topic = string(f[0])
	seq := binary.BigEndian.Uint64(f[1])
	if seq > w.next {
		w.lost++
		w.replay()
	}
	if seq < w.next {
		return true
	}
	w.apply(seq, f[2])
	return true
}

// apply decodes a map-form batch of vLLM.
func (w *eventMirror) apply(seq uint64, payload []byte) {
	w.t.Helper()
	if seq != w.next {
		w.t.Fatalf("batch %d, want %d", seq, w.next)
	}
	w.next++
	v, _, err := msgp.ReadIntfBytes(payload)
	if err != nil {
		w.t.Fatal(err)
	}
	u := func(x any) uint64 {
		switch n := x.(type) {
		case uint64:
			return n
		case int64:
			return uint64(n)
		}
		w.t.Fatalf("hash %T", x)
		return 0
	}
	for _, x := range v.([]any)[1].([]any) {
		ev := x.(map[string]any)
		switch ev["type"] {
		case "AllBlocksCleared":
			w.clears++
			clear(w.copies)
		case "BlockRemoved":
			for _, h := range ev["block_hashes"].([]any) {
				k := u(h)
				if w.copies[k] == 0 {
					w.t.Fatalf("removed %d, which is not stored", k)
				}
				if w.copies[k]--; w.copies[k] == 0 {
					delete(w.copies, k)
				}
			}
		case "BlockStored":
			parent := uint64(0)
			if p := ev["parent_block_hash"]; p != nil {
				if parent = u(p); w.tokens[parent] == nil {
					w.t.Fatalf("parent %d was never stored", parent)
				}
			}
			list, size := ev["token_ids"].([]any), int(u(ev["block_size"]))
			hashes := ev["block_hashes"].([]any)
			if len(list) != size*len(hashes) {
				w.t.Fatalf("%d tokens for %d blocks of %d", len(list), len(hashes), size)
			}
			for i, h := range hashes {
				k := u(h)
				toks := make([]uint32, size)
				for j := range toks {
					toks[j] = uint32(u(list[i*size+j]))
				}
				if old, ok := w.tokens[k]; ok && (fmt.Sprint(old) != fmt.Sprint(toks) || w.parent[k] != parent) {
					w.t.Fatalf("hash %d stands for two blocks", k)
				}
				w.copies[k]++
				w.tokens[k], w.parent[k] = toks, parent
				parent = k
			}
		}
	}
}

// wantSame compares the model with what the rank holds.
func (w *eventMirror) wantSame(e *Engine, rank int) string {
	r := e.incarnation().Ranks[rank]
	diff := ""
	r.Do(func() {
		own := map[uint64]int{}
		r.EachCached(func(h *kvcache.BlockHash) { own[h.Uint64()]++ })
		if fmt.Sprint(own) != fmt.Sprint(w.copies) {
			diff = fmt.Sprintf("engine holds %d blocks, the events say %d", len(own), len(w.copies))
		}
	})
	return diff
}

// catchUp applies batches until as many as the engine numbered are in.
func (w *eventMirror) catchUp(e *Engine, rank int) {
	w.t.Helper()
	testwait.Until(w.t, "publisher idle", func() bool {
		r := e.incarnation().Ranks[rank]
		idle := false
		r.Do(func() { idle = r.Publisher.Idle() })
		return idle && e.Stats().Ranks[rank].Running+e.Stats().Ranks[rank].Waiting == 0
	})
	w.replay()
}

// TestEventsEqualCache drives a small cache through thousands of evictions and
// checks that a naive model fed by the events holds what the engine holds.
func TestEventsEqualCache(t *testing.T) {
	e := fastOptions(t, Options{Blocks: 40, BlockSize: 4, Ranks: 2, MaxSeqs: 6, Topic: "kv"})
	w := []*eventMirror{newEventMirror(t, e, 0), newEventMirror(t, e, 1)}
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 12 {
		done := make(chan error, 20)
		for range 20 {
			prompt := idPrompt(1+rng.IntN(100), rng.IntN(5))
			body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"cache_salt":%q}`, prompt, 1+rng.IntN(30), []string{"", "", "a"}[rng.IntN(3)])
			go func() {
				a, err := tryPost(e.URL()+"/v1/completions", body)
				if err == nil && a.status != 200 {
					err = fmt.Errorf("%d %s", a.status, a.body)
				}
				done <- err
			}()
		}
		for range 20 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		if round == 6 {
			if a := post(t, e, "/reset_prefix_cache", ""); a.status != 200 {
				t.Fatalf("reset: %d %s", a.status, a.body)
			}
		}
		for i := range w {
			w[i].catchUp(e, i)
			if diff := w[i].wantSame(e, i); diff != "" && round != 6 {
				t.Fatalf("round %d rank %d: %s", round, i, diff)
			}
		}
	}
	s := e.Stats().Sum()
	if s.Evictions < 500 || s.PrefixHits == 0 || s.BlocksFree != s.BlocksTotal || w[0].clears != 1 || w[1].clears != 1 {
		t.Errorf("clears %d %d, stats %+v", w[0].clears, w[1].clears, s)
	}
}

// TestPrefixCache: hits are whole blocks, never the whole prompt, and salted apart.
func TestPrefixCache(t *testing.T) {
	e := fastOptions(t, Options{})
	cached := func(n int, salt string) float64 {
		a := post(t, e, "/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":1,"cache_salt":%q}`, idPrompt(n, 1), salt))
		return a.json["usage"].(map[string]any)["prompt_tokens_details"].(map[string]any)["cached_tokens"].(float64)
	}
	for i, c := range []struct {
		n    int
		salt string
		want float64
	}{{64, "", 0}, {64, "", 48}, {100, "", 64}, {64, "x", 0}, {65, "x", 64}, {15, "", 0}, {15, "", 0}} {
		if got := cached(c.n, c.salt); got != c.want {
			t.Errorf("request %d (%d tokens, salt %q): %v cached, want %v", i, c.n, c.salt, got, c.want)
		}
	}
}

func TestLiveEvents(t *testing.T) {
	e := fastOptions(t, Options{Topic: "kv@1"})
	w := newEventMirror(t, e, 0)
	post(t, e, "/v1/completions", `{"prompt":`+idPrompt(40, 1)+`,"max_tokens":1}`)
	w.replay() // the subscription may have come after the first batch
	if len(w.copies) != 2 {
		t.Fatalf("%d blocks after replay, want 2", len(w.copies))
	}
	// Subscriptions travel: publish until one arrives.
	for salt := 2; !w.live(50 * time.Millisecond); salt++ {
		if salt > 200 {
			t.Fatal("no live event came")
		}
		post(t, e, "/v1/completions", `{"prompt":`+idPrompt(40, salt)+`,"max_tokens":1}`)
	}
	if w.topic != "kv@1" {
		t.Errorf("topic %q", w.topic)
	}
	// A lost batch is a gap that replay fills.
	w.catchUp(e, 0)
	for w.live(20 * time.Millisecond) {
	}
	w.lost = 0
	e.Fault(faults.Fault{Kind: faults.LoseEvents, N: 2})
	for salt := range 3 {
		post(t, e, "/v1/completions", `{"prompt":`+idPrompt(40, 900+salt)+`,"max_tokens":1}`)
	}
	if !w.live(10*time.Second) || w.lost != 1 {
		t.Errorf("%d gaps seen, want 1", w.lost)
	}
	if diff := w.wantSame(e, 0); diff != "" {
		t.Error(diff)
	}
}

func TestRestartEvents(t *testing.T) {
	e := fastOptions(t, Options{})
	id, kv := e.EngineID(), e.KVEndpoints()[0]
	for i := range 3 {
		post(t, e, "/v1/completions", `{"prompt":`+idPrompt(40, i)+`,"max_tokens":1}`)
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	if e.EngineID() == id || e.KVEndpoints()[0] != kv {
		t.Errorf("engine id %s (was %s), events on %s (were on %s)", e.EngineID(), id, e.KVEndpoints()[0], kv)
	}
	s := e.Stats()
	if s.Incarnations != 2 || s.Sum().BlocksCached != 0 || s.Sum().EventBatches != 0 {
		t.Errorf("after restart: %+v", s)
	}
	post(t, e, "/v1/completions", `{"prompt":`+idPrompt(40, 1)+`,"max_tokens":1}`)
	w := newEventMirror(t, e, 0)
	w.catchUp(e, 0)
	if w.next != 1 || w.wantSame(e, 0) != "" {
		t.Errorf("next batch is %d, want 1; %s", w.next, w.wantSame(e, 0))
	}
}

func TestReplayBuffer(t *testing.T) {
	e := fastOptions(t, Options{BufferSteps: 3, Encoding: "vllm-0.22"})
	for i := range 6 {
		post(t, e, "/v1/completions", `{"prompt":`+idPrompt(40, i)+`,"max_tokens":1}`)
	}
	w := newEventMirror(t, e, 0)
	testwait.Until(t, "published", func() bool { return e.Stats().Sum().EventBatches == 6 })
	w.dealer.SendMessage("", make([]byte, 8))
	var seqs []uint64
	for {
		f, err := w.dealer.RecvMessageBytes(0)
		if err != nil {
			t.Fatal(err)
		}
		if len(f) != 3 {
			t.Fatalf("%d frames, want 3 before vLLM 0.26", len(f))
		}
		seq := binary.BigEndian.Uint64(f[1])
		if seq == ^uint64(0) {
			break
		}
		seqs = append(seqs, seq)
	}
	if fmt.Sprint(seqs) != "[3 4 5]" {
		t.Errorf("replayed %v, want the last three", seqs)
	}
}

func TestEventPorts(t *testing.T) {
	e := fastOptions(t, Options{Ranks: 3})
	var base int
	for i, ep := range e.KVEndpoints() {
		var port int
		fmt.Sscanf(ep, "tcp://127.0.0.1:%d", &port)
		if i == 0 {
			base = port
		}
		if port != base+i {
			t.Errorf("rank %d publishes on %s, want port %d", i, ep, base+i)
		}
	}
	off := fastOptions(t, Options{KVEvents: "off"})
	if len(off.KVEndpoints())+len(off.ReplayEndpoints()) != 0 {
		t.Errorf("events off, endpoints %v", off.KVEndpoints())
	}
	if _, body := get(t, off.URL()+"/kv_event_sources"); body != "{}" {
		t.Errorf("sources of an engine without events: %s", body)
	}
}
