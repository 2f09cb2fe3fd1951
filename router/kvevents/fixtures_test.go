package kvevents

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"sluice/router/blockhash"
)

// expectation is NAME.json beside NAME.bin, made by scripts/fixtures from the
// engines' own structs.
type expectation struct {
	Engine, Version string
	Rank            *int
	Events          []expectedEvent
}

type expectedEvent struct {
	Kind      string   `json:"kind"`
	Hashes    []uint64 `json:"hashes"`
	Parent    *uint64  `json:"parent"`
	Tokens    []uint32 `json:"tokens"`
	Pairs     bool     `json:"pairs"`
	BlockSize int      `json:"block_size"`
	Medium    string   `json:"medium"`
	LoRA      string   `json:"lora"`
	CacheSalt string   `json:"cache_salt"`
	Group     int      `json:"group"`
	Remote    bool     `json:"remote"`
	Extra     bool     `json:"extra"`
}

func expected(ev *Event) expectedEvent {
	x := expectedEvent{Kind: ev.Kind.String(), Pairs: ev.Pairs, BlockSize: ev.BlockSize, Medium: ev.Medium,
		LoRA: ev.LoRA, CacheSalt: ev.CacheSalt, Group: ev.Group, Remote: ev.Locality == Remote, Extra: ev.Extra}
	for _, h := range ev.Hashes {
		x.Hashes = append(x.Hashes, uint64(h))
	}
	x.Tokens = append(x.Tokens, ev.Tokens...)
	if ev.HasParent {
		p := uint64(ev.Parent)
		x.Parent = &p
	}
	return x
}

// tidy makes nil and empty lists equal.
func (x expectedEvent) tidy() expectedEvent {
	if len(x.Hashes) == 0 {
		x.Hashes = nil
	}
	if len(x.Tokens) == 0 {
		x.Tokens = nil
	}
	return x
}

func decodeAll(t testing.TB, d *Decoder, payload []byte) (Batch, []expectedEvent) {
	t.Helper()
	b, err := d.Reset(payload)
	if err != nil {
		t.Fatal(err)
	}
	var out []expectedEvent
	var ev Event
	for {
		more, err := d.Next(&ev)
		if err != nil {
			t.Fatal(err)
		}
		if !more {
			return b, out
		}
		if n := len(ev.Locals); n != 0 && n != len(ev.Hashes) {
			t.Fatalf("%d local hashes for %d blocks", n, len(ev.Hashes))
		}
		out = append(out, expected(&ev))
	}
}

func fixtures(t testing.TB, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.bin"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no fixtures in %s: %v", dir, err)
	}
	return names
}

func TestFixtures(t *testing.T) {
	for _, name := range fixtures(t, "testdata") {
		payload, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(strings.TrimSuffix(name, ".bin") + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var want expectation
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatal(err)
		}
		// An engine nobody has named must be read as well as a named one.
		for _, engine := range []string{want.Engine, ""} {
			t.Run(fmt.Sprintf("%s/as=%s", filepath.Base(name), engine), func(t *testing.T) {
				b, got := decodeAll(t, NewDecoder(engine), payload)
				if b.HasRank != (want.Rank != nil) || b.HasRank && b.Rank != *want.Rank || b.Time != 1763690000.5 {
					t.Errorf("batch %+v", b)
				}
				if len(got) != len(want.Events) {
					t.Fatalf("%d events, want %d", len(got), len(want.Events))
				}
				for i := range got {
					if g, w := got[i].tidy(), want.Events[i].tidy(); !reflect.DeepEqual(g, w) {
						t.Errorf("event %d:\n got %+v\nwant %+v", i, g, w)
					}
				}
				againstGeneric(t, payload, got)
			})
		}
	}
}

// againstGeneric compares with a decoder that knows msgpack and no schema.
func againstGeneric(t *testing.T, payload []byte, got []expectedEvent) {
	t.Helper()
	value, left, err := msgp.ReadIntfBytes(payload)
	if err != nil || len(left) != 0 {
		t.Fatalf("the generic decoder fails: %v, %d bytes left", err, len(left))
	}
	for i, e := range value.([]any)[1].([]any) {
		var kind, hashes, tokens any
		switch e := e.(type) {
		case []any:
			kind = e[0]
			if len(e) > 1 {
				hashes = e[1]
			}
			if len(e) > 3 && kind == "BlockStored" {
				tokens = e[3]
			}
		case map[string]any:
			kind, hashes, tokens = e["type"], e["block_hashes"], e["token_ids"]
		}
		var flat []uint32
		var flatten func(any)
		flatten = func(v any) {
			switch v := v.(type) {
			case []any:
				for _, x := range v {
					flatten(x)
				}
			case int64:
				flat = append(flat, uint32(v))
			case uint64:
				flat = append(flat, uint32(v))
			}
		}
		flatten(tokens)
		n := 0
		if hs, ok := hashes.([]any); ok {
			n = len(hs)
		}
		if got[i].Kind != kind || len(got[i].Hashes) != n || fmt.Sprint(got[i].Tokens) != fmt.Sprint(flat) {
			t.Errorf("event %d: %+v, but generically %v", i, got[i], e)
		}
	}
}

// KVEVENTS_FIXTURES may name another folder of NAME.bin payloads to try.
func TestMoreFixtures(t *testing.T) {
	dir := os.Getenv("KVEVENTS_FIXTURES")
	if dir == "" {
		t.Skip("KVEVENTS_FIXTURES names no folder")
	}
	for _, name := range fixtures(t, dir) {
		base := filepath.Base(name)
		if !strings.HasPrefix(base, "vllm") && !strings.HasPrefix(base, "sglang") {
			continue
		}
		payload, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		engine, _, _ := strings.Cut(base, "_")
		b, got := decodeAll(t, NewDecoder(engine), payload)
		againstGeneric(t, payload, got)
		t.Logf("%s: %+v, %d events", base, b, len(got))
	}
}

func TestLocalHashesDiffer(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4}
	plain := blockhash.Locals(nil, tokens, 2)
	one := func(e wireEvent) []blockhash.Local {
		var ev Event
		d := NewDecoder("vllm")
		if _, err := d.Reset(wireBatch(nil, e.asMap())); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Next(&ev); err != nil {
			t.Fatal(err)
		}
		return append([]blockhash.Local(nil), ev.Locals...)
	}
	base := wireEvent{hashes: []any{1, 2}, tokens: []any{1, 2, 3, 4}, blockSize: 2}
	if got := one(base); !reflect.DeepEqual(got, plain) {
		t.Errorf("plain blocks: %x, want %x", got, plain)
	}
	image := func(id string, offset int) []blockhash.Local {
		e := base
		e.more = map[string]any{"extra_keys": []any{nil, []any{[]any{id, offset}}}}
		return one(e)
	}
	a, b, c := image("a", 0), image("b", 0), image("a", 1)
	if a[0] != plain[0] || a[1] == plain[1] || a[1] == b[1] || a[1] == c[1] {
		t.Errorf("images: %x %x %x, plain %x", a, b, c, plain)
	}
	pairs := base
	pairs.tokens, pairs.blockSize = []any{[]any{1, 2}, []any{3, 4}}, 1
	if got := one(pairs); len(got) != 2 || got[0] == plain[0] {
		t.Errorf("pairs: %x, plain %x", got, plain)
	}
	odd := base
	odd.more = map[string]any{"extra_keys": []any{[]any{[]any{"a", 0}}}}
	if got := one(odd); len(got) != 0 {
		t.Errorf("extra keys for one block of two: %x, want nothing placed", got)
	}
	for name, change := range map[string]func(*wireEvent){
		"tokens":  func(e *wireEvent) { e.tokens = e.tokens[:3] },
		"offload": func(e *wireEvent) { e.tokens, e.blockSize = nil, 0 },
		"skipped": func(e *wireEvent) { e.hashes = e.hashes[:1] },
		"none":    func(e *wireEvent) { e.hashes, e.tokens = nil, nil },
	} {
		e := base
		change(&e)
		if got := one(e); len(got) != 0 {
			t.Errorf("%s: %x, want nothing placed", name, got)
		}
	}
}
