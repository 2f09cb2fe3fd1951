package kvevents

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Events made at random, written in a random form, must come back as made.
func TestRandomEvents(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	d := NewDecoder("")
	for range 3000 {
		var want []expectedEvent
		var events [][]byte
		for range rng.IntN(4) {
			e, x := randomEvent(rng)
			want = append(want, x)
			switch rng.IntN(3) {
			case 0:
				if e.more == nil {
					events = append(events, e.asArray())
					break
				}
				fallthrough
			case 1:
				if e.more == nil {
					e.more = map[string]any{}
				}
				e.more["a field of the future"] = []any{1, map[string]any{"x": nil}}
				events = append(events, e.asMap())
			case 2:
				events = append(events, e.asLongMap(rng))
			}
		}
		_, got := decodeAll(t, d, wireBatch(nil, events...))
		if len(got) != len(want) {
			t.Fatalf("%d events, want %d", len(got), len(want))
		}
		for i := range got {
			if g, w := got[i].tidy(), want[i].tidy(); !reflect.DeepEqual(g, w) {
				t.Fatalf("event %d:\n got %+v\nwant %+v", i, g, w)
			}
		}
	}
}

func randomEvent(rng *rand.Rand) (wireEvent, expectedEvent) {
	e, x := wireEvent{}, expectedEvent{}
	if e.kind = []string{"BlockStored", "BlockRemoved", "AllBlocksCleared"}[rng.IntN(3)]; e.kind == "AllBlocksCleared" {
		return e, expectedEvent{Kind: e.kind}
	}
	x.Kind = e.kind
	randomHash := func() (any, uint64) {
		v := rng.Uint64() >> rng.IntN(64)
		switch rng.IntN(3) {
		case 0:
			return v, v
		case 1:
			return -int(v >> 1), uint64(-int(v >> 1))
		}
		digest := make([]byte, 24, 32)
		for s := 56; s >= 0; s -= 8 {
			digest = append(digest, byte(v>>s))
		}
		return digest, v
	}
	for range rng.IntN(4) {
		h, v := randomHash()
		e.hashes, x.Hashes = append(e.hashes, h), append(x.Hashes, v)
	}
	if rng.IntN(2) == 0 {
		e.medium, x.Medium = "CPU", "CPU"
	}
	if rng.IntN(3) == 0 {
		e.more = map[string]any{"group_idx": 2, "locality": "ELSEWHERE"}
		x.Group, x.Remote = 2, true
	}
	if e.kind == "BlockRemoved" {
		return e, x
	}
	if rng.IntN(2) == 0 {
		h, v := randomHash()
		e.parent = h
		if v != 0 { // the array form of no parent
			x.Parent = &v
		}
	}
	e.blockSize = 1 + rng.IntN(20)
	x.BlockSize = e.blockSize
	pairs := rng.IntN(4) == 0
	for range len(e.hashes) * e.blockSize {
		a, b := rng.Uint32()>>rng.IntN(32), rng.Uint32()
		if x.Pairs = pairs; pairs {
			e.tokens, x.Tokens = append(e.tokens, []any{int(a), int(b)}), append(x.Tokens, a, b)
		} else {
			e.tokens, x.Tokens = append(e.tokens, []any{int(a), signed(a)}[rng.IntN(2)]), append(x.Tokens, a)
		}
	}
	return e, x
}

func TestEnvelope(t *testing.T) {
	d := NewDecoder("vllm")
	for name, c := range map[string]struct {
		payload []byte
		want    Batch
		bad     bool
	}{
		"two elements":   {[]byte{0x92, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x90}, Batch{Time: 1.5}, false},
		"nil rank":       {wireBatch(nil), Batch{Time: 1.5}, false},
		"rank 7":         {wireBatch(7), Batch{Time: 1.5, HasRank: true, Rank: 7}, false},
		"integer time":   {[]byte{0x93, 5, 0x90, 0}, Batch{Time: 5, HasRank: true}, false},
		"half time":      {[]byte{0x92, 0xca, 0x3f, 0x80, 0, 0, 0x90}, Batch{Time: 1}, false},
		"more elements":  {[]byte{0x95, 5, 0x90, 0xc0, 0xa1, 'x', 0x81, 1, 2}, Batch{Time: 5}, false},
		"empty":          {nil, Batch{}, true},
		"a map":          {[]byte{0x80}, Batch{}, true},
		"one element":    {[]byte{0x91, 5}, Batch{}, true},
		"text for time":  {[]byte{0x92, 0xa1, 'x', 0x90}, Batch{}, true},
		"events no list": {[]byte{0x92, 5, 5}, Batch{}, true},
		"negative rank":  {wireBatch(-1), Batch{}, true},
		"reserved byte":  {[]byte{0x92, 5, 0x91, 0xc1}, Batch{}, true},
		"2^31 events":    {[]byte{0x92, 5, 0xdd, 0x7f, 0xff, 0xff, 0xff}, Batch{}, true},
	} {
		got, err := d.Reset(c.payload)
		if (err != nil) != c.bad || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v, an error: %v", name, got, err, c.want, c.bad)
		}
	}
}

func TestBadEventsAreSkipped(t *testing.T) {
	good := wireEvent{kind: "BlockRemoved", hashes: []any{7}}
	stored := wireEvent{hashes: []any{1}, tokens: []any{1, 2}, blockSize: 2}
	with := func(change func(e *wireEvent)) []byte {
		e := stored
		change(&e)
		return e.asMap()
	}
	without := func(field string) []byte {
		m := stored.fields()
		delete(m, field)
		return pack(nil, m)
	}
	for name, bad := range map[string][]byte{
		"a number":         {5},
		"nil":              {0xc0},
		"empty array":      {0x90},
		"no name":          {0x92, 1, 2},
		"short stored":     pack(nil, []any{"BlockStored", []any{1}, nil, []any{1}, 1}),
		"short removed":    pack(nil, []any{"BlockRemoved"}),
		"no type":          without("type"),
		"no hashes":        without("block_hashes"),
		"no tokens":        without("token_ids"),
		"no size":          without("block_size"),
		"negative token":   with(func(e *wireEvent) { e.tokens = []any{1, -2} }),
		"huge token":       with(func(e *wireEvent) { e.tokens = []any{1, uint64(1) << 32} }),
		"text token":       with(func(e *wireEvent) { e.tokens = []any{"x", "y"} }),
		"three in a pair":  with(func(e *wireEvent) { e.tokens = []any{[]any{1, 2, 3}, []any{1, 2, 3}} }),
		"half a pair":      with(func(e *wireEvent) { e.tokens = []any{[]any{1, 2}, 3} }),
		"empty hash":       with(func(e *wireEvent) { e.hashes = []any{[]byte{}} }),
		"text hash":        with(func(e *wireEvent) { e.hashes = []any{"x"} }),
		"negative size":    with(func(e *wireEvent) { e.blockSize = -4 }),
		"medium a number":  with(func(e *wireEvent) { e.medium = 3 }),
		"extra keys flat":  with(func(e *wireEvent) { e.more = map[string]any{"extra_keys": []any{3}} }),
		"group a text":     with(func(e *wireEvent) { e.more = map[string]any{"group_idx": "x"} }),
		"key not a string": {0x82, 0xa4, 't', 'y', 'p', 'e', 0xac, 'B', 'l', 'o', 'c', 'k', 'R', 'e', 'm', 'o', 'v', 'e', 'd', 1, 2},
	} {
		for _, engine := range []string{"vllm", "sglang", ""} {
			d := NewDecoder(engine)
			if _, err := d.Reset(wireBatch(nil, bad, good.asMap())); err != nil {
				t.Errorf("%s: the batch is refused: %v", name, err)
				continue
			}
			var ev Event
			if more, err := d.Next(&ev); !more || err == nil {
				t.Errorf("%s: more=%v, error %v; want an error", name, more, err)
			}
			if more, err := d.Next(&ev); !more || err != nil || len(ev.Hashes) != 1 || ev.Hashes[0] != 7 {
				t.Errorf("%s: the good event after it: more=%v, error %v, %+v", name, more, err, ev)
			}
			if more, err := d.Next(&ev); more || err != nil {
				t.Errorf("%s: more=%v, error %v at the end", name, more, err)
			}
		}
	}
}

func TestUnknownKind(t *testing.T) {
	d := NewDecoder("vllm")
	for _, e := range [][]byte{pack(nil, []any{"BlockMoved", 1, []any{2}}), pack(nil, map[string]any{"x": 1, "type": "BlockMoved"})} {
		_, got := decodeAll(t, d, wireBatch(nil, e))
		if len(got) != 1 || got[0].Kind != "unknown" {
			t.Errorf("%+v, want one unknown event", got)
		}
	}
}

// Headers that claim what the message does not hold must cost no memory.
func TestLargeCountsAllocateNothing(t *testing.T) {
	huge := []byte{0xdd, 0x7f, 0xff, 0xff, 0xff}
	stored := append([]byte{0x96, 0xab}, "BlockStored"...)
	for name, payload := range map[string][]byte{
		"hashes": wireBatchRaw(append(append([]byte{}, stored...), huge...)),
		"tokens": wireBatchRaw(append(append(append([]byte{}, stored...), 0x90, 0xc0), huge...)),
		"string": wireBatchRaw([]byte{0x91, 0xdb, 0x7f, 0xff, 0xff, 0xff}),
		"map":    wireBatchRaw([]byte{0xdf, 0xff, 0xff, 0xff, 0xff}),
		"nested": append([]byte{0x92, 5}, strings.Repeat("\x91", 1<<20)...),
	} {
		d := NewDecoder("")
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := d.Reset(payload); err == nil {
			t.Errorf("%s: accepted", name)
		}
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 1<<16 {
			t.Errorf("%s: took %d bytes", name, got)
		}
	}
}

func wireBatchRaw(event []byte) []byte { return append([]byte{0x92, 5, 0x91}, event...) }

func TestTruncation(t *testing.T) {
	for _, name := range fixtures(t, "testdata") {
		payload, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		d := NewDecoder("")
		for n := range payload {
			if b, err := d.Reset(payload[:n]); err == nil {
				t.Fatalf("%s cut to %d of %d bytes is accepted: %+v", filepath.Base(name), n, len(payload), b)
			}
		}
	}
}

func TestDecodingAllocatesNothing(t *testing.T) {
	var payload []byte
	e := wireEvent{medium: "GPU", blockSize: 16, more: map[string]any{"lora_name": "adapter", "extra_keys": []any{[]any{"adapter", "salt"}}}}
	e.hashes = []any{1}
	for i := range 16 {
		e.tokens = append(e.tokens, i)
	}
	payload = wireBatch(0, e.asMap(), e.asArray("adapter"), wireEvent{kind: "BlockRemoved", hashes: []any{1, 2}, medium: "CPU"}.asMap())
	d := NewDecoder("vllm")
	var ev Event
	if n := testing.AllocsPerRun(100, func() {
		if _, err := d.Reset(payload); err != nil {
			t.Fatal(err)
		}
		for more := true; more; {
			var err error
			if more, err = d.Next(&ev); err != nil {
				t.Fatal(err)
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations a batch, want 0", n)
	}
}

func TestInternedStringsAreBounded(t *testing.T) {
	d := NewDecoder("sglang")
	for i := range 3 * maxInterned {
		e := wireEvent{hashes: []any{1}, tokens: []any{1}, blockSize: 1, more: map[string]any{"cache_salt": fmt.Sprint("salt-", i)}}
		if _, got := decodeAll(t, d, wireBatch(nil, e.asMap())); got[0].CacheSalt != fmt.Sprint("salt-", i) {
			t.Fatalf("salt %q", got[0].CacheSalt)
		}
	}
	if len(d.interned) > maxInterned {
		t.Errorf("%d words kept", len(d.interned))
	}
}

func TestTiers(t *testing.T) {
	for medium, want := range map[string]kvindex.Tier{
		"": kvindex.Device, "GPU": kvindex.Device, "CPU": kvindex.Host, "CPU_PINNED": kvindex.Host,
		"DISK": kvindex.Disk, "FS": kvindex.Disk, "OBJ": kvindex.Disk, "STORAGE": kvindex.Disk, "EXTERNAL": kvindex.Disk,
	} {
		if got, ok := TierOf(medium); !ok || got != want {
			t.Errorf("TierOf(%q) = %v, %v; want %v", medium, got, ok, want)
		}
	}
	if _, ok := TierOf("TAPE"); ok {
		t.Error("an unknown medium has a tier")
	}
}

func FuzzDecode(f *testing.F) {
	for _, name := range fixtures(f, "testdata") {
		payload, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(payload)
	}
	f.Add(wireBatch(nil, []byte{0xc1}))
	f.Fuzz(func(t *testing.T, payload []byte) {
		ours := reader{payload}
		err := ours.skip()
		if _, theirs := msgp.Skip(payload); (err == nil) != (theirs == nil) && !strings.Contains(fmt.Sprint(theirs), "recursion") {
			t.Fatalf("well-formed: we say %v, msgp says %v", err, theirs)
		}
		for _, engine := range []string{"vllm", "sglang", ""} {
			d := NewDecoder(engine)
			b, err := d.Reset(payload)
			if err != nil {
				continue
			}
			var ev Event
			n := 0
			for ; ; n++ {
				more, err := d.Next(&ev)
				if !more {
					break
				}
				if err == nil && len(ev.Locals) != 0 && len(ev.Locals) != len(ev.Hashes) {
					t.Fatalf("%d local hashes for %d blocks", len(ev.Locals), len(ev.Hashes))
				}
			}
			if n != b.Len {
				t.Fatalf("%d events of %d", n, b.Len)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	e := wireEvent{medium: "GPU", blockSize: 16, parent: uint64(1) << 63}
	for i := range 16 {
		e.hashes = append(e.hashes, uint64(1)<<63|uint64(i))
		for j := range 16 {
			e.tokens = append(e.tokens, 1000*i+j)
		}
	}
	for name, payload := range map[string][]byte{"form=array": wireBatch(0, e.asArray()), "form=map": wireBatch(0, e.asMap())} {
		b.Run(name, func(b *testing.B) {
			d := NewDecoder("vllm")
			var ev Event
			b.ReportAllocs()
			b.SetBytes(int64(len(payload)))
			for b.Loop() {
				if _, err := d.Reset(payload); err != nil {
					b.Fatal(err)
				}
				if _, err := d.Next(&ev); err != nil || len(ev.Locals) != 16 {
					b.Fatal(err, len(ev.Locals))
				}
			}
		})
	}
}

// BenchmarkApply decodes and applies events of 16 blocks of 16 tokens, stores and
// removals in turn, as one feed's goroutine does.
func BenchmarkApply(b *testing.B) {
	const prompts, blocks = 64, 16
	var payloads [][]byte
	for p := range prompts {
		stored := wireEvent{medium: "GPU", blockSize: 16}
		for i := range blocks {
			stored.hashes = append(stored.hashes, uint64(p)<<32|uint64(i)|1<<63)
			for j := range 16 {
				stored.tokens = append(stored.tokens, 1000*p+16*i+j)
			}
		}
		removed := wireEvent{kind: "BlockRemoved", medium: "GPU", hashes: stored.hashes}
		payloads = append(payloads, wireBatch(0, stored.asMap()), wireBatch(0, removed.asMap()))
	}
	rank := worker.New(worker.Spec{ID: "w"}).Ranks[0]
	f := &feed{source: Source{Rank: rank, Model: "m"}, options: &Options{MaxFrame: 1 << 20},
		Applier: NewApplier(kvindex.New(kvindex.Options{}), rank, "m", "vllm"), log: slog.New(slog.DiscardHandler)}
	b.ReportAllocs()
	seq := uint64(0)
	for b.Loop() {
		f.apply(seq, payloads[seq%uint64(len(payloads))])
		seq++
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}
