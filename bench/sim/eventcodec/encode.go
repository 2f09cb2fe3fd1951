package eventcodec

import (
	"fmt"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"sluice/bench/sim/kvcache"
)

// eventKind is the type of an Event.
type eventKind uint8

// The types of an Event.
const (
	Stored eventKind = iota
	Removed
	Cleared
)

// Event is one KV event before encoding. Its slices must not change once it is queued,
// because the publisher reads them in its own goroutine.
type Event struct {
	Kind    eventKind
	Hashes  []kvcache.BlockHash
	Parent  kvcache.BlockHash
	Root    bool // no parent
	Tokens  []uint32
	Salt    string
	Session string
}

// Encoding is one of the wire formats that engines have used (vLLM kv_events.py, SGLang
// kv_events.py); Encodings lists them.
type Encoding struct {
	Name     string
	sglang   bool
	maps     bool // tagged maps; else positional arrays
	map16    bool // msgspec writes a 16-bit map header once a struct may have 16 keys
	fields   int  // array form: elements of BlockStored, tag included
	medium   bool // array form: BlockRemoved carries the medium
	group    bool // BlockRemoved carries group_idx, BlockStored group_idx and spec kind
	noRank   bool // the batch has two elements
	signed   bool // hashes are int64
	TopicRep bool // replay replies carry the topic frame
}

// Forms lists the encodings, oldest first for each engine.
var Forms = []Encoding{
	{Name: "vllm-0.9.0", fields: 6, noRank: true, signed: true},
	{Name: "vllm-0.9.2", fields: 6, signed: true},
	{Name: "vllm-0.10.2", fields: 7, medium: true},
	{Name: "vllm-0.14", fields: 8, medium: true},
	{Name: "vllm-0.17", fields: 9, medium: true},
	{Name: "vllm-0.20", fields: 10, medium: true, group: true},
	{Name: "vllm-0.22", fields: 12, medium: true, group: true},
	{Name: "vllm-0.24", maps: true, group: true},
	{Name: "vllm-0.26", maps: true, group: true, TopicRep: true},
	{Name: "vllm-0.33", maps: true, map16: true, group: true, TopicRep: true},
	{Name: "sglang-0.4.6", sglang: true, fields: 6, noRank: true, signed: true},
	{Name: "sglang-0.5.6", sglang: true, fields: 6, signed: true},
	{Name: "sglang-0.5.9", sglang: true, fields: 7, medium: true, signed: true},
	{Name: "sglang-0.5.18", sglang: true, fields: 8, medium: true, signed: true},
	{Name: "sglang-0.5.20", sglang: true, maps: true, signed: true},
	{Name: "sglang-0.5.22", sglang: true, maps: true, signed: true, TopicRep: true},
}

// encodingAlias has short names for the last array format and the current map format.
var encodingAlias = map[string]string{
	"vllm-array": "vllm-0.22", "vllm-map": "vllm-0.26",
	"sglang-array": "sglang-0.5.9", "sglang-map": "sglang-0.5.22",
}

// Encodings returns the names that ByName accepts: the first release of each format,
// oldest first for each engine, and vllm-array, vllm-map, sglang-array, sglang-map.
func Encodings() []string {
	names := []string{"vllm-array", "vllm-map", "sglang-array", "sglang-map"}
	for _, e := range Forms {
		names = append(names, e.Name)
	}
	return names
}

// ByName returns the encoding with a name of Encodings.
func ByName(name string) (Encoding, error) {
	if a, ok := encodingAlias[name]; ok {
		name = a
	}
	for _, e := range Forms {
		if e.Name == name {
			return e, nil
		}
	}
	return Encoding{}, fmt.Errorf("sim: cannot use encoding %q: want %s", name, strings.Join(Encodings(), ", "))
}

// Encoder encodes the batches of one publisher.
type Encoder struct {
	Encoding
	BlockSize int
	Rank      int
	Bytes     bool
}

// Batch appends the batch [ts, events, rank] to b. ts is in seconds since the epoch.
func (e *Encoder) Batch(b []byte, ts float64, events []Event) []byte {
	n := uint32(3)
	if e.noRank {
		n = 2
	}
	b = msgp.AppendArrayHeader(b, n)
	b = msgp.AppendFloat64(b, ts)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for i := range events {
		if e.maps {
			b = e.asMap(b, &events[i])
		} else {
			b = e.asArray(b, &events[i])
		}
	}
	if !e.noRank {
		b = msgp.AppendInt(b, e.Rank)
	}
	return b
}

func (e *Encoder) hash(b []byte, h *kvcache.BlockHash) []byte {
	switch {
	case e.Bytes:
		return msgp.AppendBytes(b, h[:])
	case e.sglang:
		return msgp.AppendInt64(b, h.Int64())
	case e.signed:
		return msgp.AppendInt64(b, int64(h.Uint64()))
	}
	return msgp.AppendUint64(b, h.Uint64())
}

func (e *Encoder) hashes(b []byte, list []kvcache.BlockHash) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for i := range list {
		b = e.hash(b, &list[i])
	}
	return b
}

func (e *Encoder) parentOf(b []byte, ev *Event) []byte {
	if ev.Root {
		return msgp.AppendNil(b)
	}
	return e.hash(b, &ev.Parent)
}

func (e *Encoder) tokens(b []byte, list []uint32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for _, t := range list {
		b = msgp.AppendUint32(b, t)
	}
	return b
}

// extraKeys appends one entry for each block: nil, or what its hash covers besides tokens.
func (e *Encoder) extraKeys(b []byte, ev *Event) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(ev.Hashes)))
	for i := range ev.Hashes {
		if i == 0 && ev.Root && ev.Salt != "" {
			b = msgp.AppendArrayHeader(b, 1)
			b = msgp.AppendString(b, ev.Salt)
		} else {
			b = msgp.AppendNil(b)
		}
	}
	return b
}

// asArray appends the positional format: every field of the release, nil or not.
func (e *Encoder) asArray(b []byte, ev *Event) []byte {
	switch ev.Kind {
	case Cleared:
		return msgp.AppendString(msgp.AppendArrayHeader(b, 1), "AllBlocksCleared")
	case Removed:
		n := uint32(2)
		if e.medium {
			n++
		}
		if e.group {
			n++
		}
		b = msgp.AppendArrayHeader(b, n)
		b = msgp.AppendString(b, "BlockRemoved")
		b = e.hashes(b, ev.Hashes)
		if e.medium {
			b = msgp.AppendString(b, "GPU")
		}
		if e.group {
			b = msgp.AppendInt(b, 0)
		}
		return b
	}
	n := e.fields
	if e.sglang && ev.Salt == "" {
		n = min(n, 7) // only salted blocks have the metadata map
	}
	b = msgp.AppendArrayHeader(b, uint32(n))
	b = msgp.AppendString(b, "BlockStored")
	b = e.hashes(b, ev.Hashes)
	b = e.parentOf(b, ev)
	b = e.tokens(b, ev.Tokens)
	b = msgp.AppendInt(b, e.BlockSize)
	b = msgp.AppendNil(b) // lora_id
	if n > 6 {
		b = msgp.AppendString(b, "GPU")
	}
	if n > 7 {
		if e.sglang {
			b = msgp.AppendMapHeader(b, 1)
			b = msgp.AppendString(b, "cache_salt")
			return msgp.AppendString(b, ev.Salt)
		}
		b = msgp.AppendNil(b) // lora_name
	}
	if n > 8 {
		b = e.extraKeys(b, ev)
	}
	if n > 9 {
		b = msgp.AppendInt(b, 0) // group_idx
	}
	if n > 10 {
		b = msgp.AppendString(b, "full_attention")
		b = msgp.AppendNil(b) // kv_cache_spec_sliding_window
	}
	return b
}

// asMap appends the tagged format: without defaults, but with nullable mandatory fields.
func (e *Encoder) asMap(b []byte, ev *Event) []byte {
	str := func(k, v string) { b = msgp.AppendString(msgp.AppendString(b, k), v) }
	switch ev.Kind {
	case Cleared:
		b = e.openMap(b, 1, false)
		str("type", "AllBlocksCleared")
		return b
	case Removed:
		n := 3
		if e.group {
			n++
		}
		b = e.openMap(b, n, false)
		str("type", "BlockRemoved")
		b = e.hashes(msgp.AppendString(b, "block_hashes"), ev.Hashes)
		str("medium", "GPU")
		if e.group {
			b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
		}
		return b
	}
	n := 7
	salted := ev.Salt != ""
	if e.sglang {
		if salted {
			n++
		}
	} else {
		n += 4 // lora_name, extra_keys, group_idx, kv_cache_spec_kind
	}
	if ev.Session != "" {
		n++
	}
	b = e.openMap(b, n, true)
	str("type", "BlockStored")
	b = e.hashes(msgp.AppendString(b, "block_hashes"), ev.Hashes)
	b = e.parentOf(msgp.AppendString(b, "parent_block_hash"), ev)
	b = e.tokens(msgp.AppendString(b, "token_ids"), ev.Tokens)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), e.BlockSize)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	str("medium", "GPU")
	if e.sglang {
		if salted {
			str("cache_salt", ev.Salt)
		}
	} else {
		b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
		b = e.extraKeys(msgp.AppendString(b, "extra_keys"), ev)
		b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
		str("kv_cache_spec_kind", "full_attention")
	}
	if ev.Session != "" {
		str("session_id", ev.Session)
	}
	return b
}

func (e *Encoder) openMap(b []byte, n int, full bool) []byte {
	if e.map16 && full {
		return append(b, 0xde, byte(n>>8), byte(n))
	}
	return msgp.AppendMapHeader(b, uint32(n))
}
