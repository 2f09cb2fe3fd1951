package sim

import (
	"fmt"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

type eventKind uint8

const (
	stored eventKind = iota
	removed
	cleared
)

// event is one KV event before encoding. Its slices are never written again once
// it is queued, so the publisher may read them from its own goroutine.
type event struct {
	kind    eventKind
	hashes  []blockHash
	parent  blockHash
	root    bool // no parent
	tokens  []uint32
	salt    string
	session string
}

// encoding is one of the wire forms engines have used (vLLM kv_events.py, SGLang
// kv_events.py); see Encodings.
type encoding struct {
	name     string
	sglang   bool
	maps     bool // tagged maps; else positional arrays
	map16    bool // msgspec writes a 16-bit map header once a struct may have 16 keys
	fields   int  // array form: elements of BlockStored, tag included
	medium   bool // array form: BlockRemoved carries the medium
	group    bool // BlockRemoved carries group_idx, BlockStored group_idx and spec kind
	noRank   bool // the batch has two elements
	signed   bool // hashes are int64
	topicRep bool // replay replies carry the topic frame
}

var encodings = []encoding{
	{name: "vllm-0.9.0", fields: 6, noRank: true, signed: true},
	{name: "vllm-0.9.2", fields: 6, signed: true},
	{name: "vllm-0.10.2", fields: 7, medium: true},
	{name: "vllm-0.14", fields: 8, medium: true},
	{name: "vllm-0.17", fields: 9, medium: true},
	{name: "vllm-0.20", fields: 10, medium: true, group: true},
	{name: "vllm-0.22", fields: 12, medium: true, group: true},
	{name: "vllm-0.24", maps: true, group: true},
	{name: "vllm-0.26", maps: true, group: true, topicRep: true},
	{name: "vllm-0.33", maps: true, map16: true, group: true, topicRep: true},
	{name: "sglang-0.4.6", sglang: true, fields: 6, noRank: true, signed: true},
	{name: "sglang-0.5.6", sglang: true, fields: 6, signed: true},
	{name: "sglang-0.5.9", sglang: true, fields: 7, medium: true, signed: true},
	{name: "sglang-0.5.18", sglang: true, fields: 8, medium: true, signed: true},
	{name: "sglang-0.5.20", sglang: true, maps: true, signed: true},
	{name: "sglang-0.5.22", sglang: true, maps: true, signed: true, topicRep: true},
}

// The short names stand for the last array form and the current map form.
var encodingAlias = map[string]string{
	"vllm-array": "vllm-0.22", "vllm-map": "vllm-0.26",
	"sglang-array": "sglang-0.5.9", "sglang-map": "sglang-0.5.22",
}

// Encodings are the names Options.Encoding takes: the first release of each form,
// and vllm-array, vllm-map, sglang-array, sglang-map.
func Encodings() []string {
	names := []string{"vllm-array", "vllm-map", "sglang-array", "sglang-map"}
	for _, e := range encodings {
		names = append(names, e.name)
	}
	return names
}

func encodingByName(name string) (encoding, error) {
	if a, ok := encodingAlias[name]; ok {
		name = a
	}
	for _, e := range encodings {
		if e.name == name {
			return e, nil
		}
	}
	return encoding{}, fmt.Errorf("sim: cannot use encoding %q: want %s", name, strings.Join(Encodings(), ", "))
}

// encoder writes batches of one publisher.
type encoder struct {
	encoding
	blockSize int
	rank      int
	bytes     bool
}

// batch appends [ts, events, rank] to b.
func (e *encoder) batch(b []byte, ts float64, events []event) []byte {
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
		b = msgp.AppendInt(b, e.rank)
	}
	return b
}

func (e *encoder) hash(b []byte, h *blockHash) []byte {
	switch {
	case e.bytes:
		return msgp.AppendBytes(b, h[:])
	case e.sglang:
		return msgp.AppendInt64(b, h.int())
	case e.signed:
		return msgp.AppendInt64(b, int64(h.uint()))
	}
	return msgp.AppendUint64(b, h.uint())
}

func (e *encoder) hashes(b []byte, list []blockHash) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for i := range list {
		b = e.hash(b, &list[i])
	}
	return b
}

func (e *encoder) parentOf(b []byte, ev *event) []byte {
	if ev.root {
		return msgp.AppendNil(b)
	}
	return e.hash(b, &ev.parent)
}

func (e *encoder) tokens(b []byte, list []uint32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for _, t := range list {
		b = msgp.AppendUint32(b, t)
	}
	return b
}

// extraKeys is one entry a block: nil, or what went into its hash beside tokens.
func (e *encoder) extraKeys(b []byte, ev *event) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(ev.hashes)))
	for i := range ev.hashes {
		if i == 0 && ev.root && ev.salt != "" {
			b = msgp.AppendArrayHeader(b, 1)
			b = msgp.AppendString(b, ev.salt)
		} else {
			b = msgp.AppendNil(b)
		}
	}
	return b
}

// asArray writes the positional form: every field of the release, nil or not.
func (e *encoder) asArray(b []byte, ev *event) []byte {
	switch ev.kind {
	case cleared:
		return msgp.AppendString(msgp.AppendArrayHeader(b, 1), "AllBlocksCleared")
	case removed:
		n := uint32(2)
		if e.medium {
			n++
		}
		if e.group {
			n++
		}
		b = msgp.AppendArrayHeader(b, n)
		b = msgp.AppendString(b, "BlockRemoved")
		b = e.hashes(b, ev.hashes)
		if e.medium {
			b = msgp.AppendString(b, "GPU")
		}
		if e.group {
			b = msgp.AppendInt(b, 0)
		}
		return b
	}
	n := e.fields
	if e.sglang && ev.salt == "" {
		n = min(n, 7) // the metadata map is there for salted blocks only
	}
	b = msgp.AppendArrayHeader(b, uint32(n))
	b = msgp.AppendString(b, "BlockStored")
	b = e.hashes(b, ev.hashes)
	b = e.parentOf(b, ev)
	b = e.tokens(b, ev.tokens)
	b = msgp.AppendInt(b, e.blockSize)
	b = msgp.AppendNil(b) // lora_id
	if n > 6 {
		b = msgp.AppendString(b, "GPU")
	}
	if n > 7 {
		if e.sglang {
			b = msgp.AppendMapHeader(b, 1)
			b = msgp.AppendString(b, "cache_salt")
			return msgp.AppendString(b, ev.salt)
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

// asMap writes the tagged form: defaults are left out, mandatory nullable fields are not.
func (e *encoder) asMap(b []byte, ev *event) []byte {
	str := func(k, v string) { b = msgp.AppendString(msgp.AppendString(b, k), v) }
	switch ev.kind {
	case cleared:
		b = e.openMap(b, 1, false)
		str("type", "AllBlocksCleared")
		return b
	case removed:
		n := 3
		if e.group {
			n++
		}
		b = e.openMap(b, n, false)
		str("type", "BlockRemoved")
		b = e.hashes(msgp.AppendString(b, "block_hashes"), ev.hashes)
		str("medium", "GPU")
		if e.group {
			b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
		}
		return b
	}
	n := 7
	salted := ev.salt != ""
	if e.sglang {
		if salted {
			n++
		}
	} else {
		n += 4 // lora_name, extra_keys, group_idx, kv_cache_spec_kind
	}
	if ev.session != "" {
		n++
	}
	b = e.openMap(b, n, true)
	str("type", "BlockStored")
	b = e.hashes(msgp.AppendString(b, "block_hashes"), ev.hashes)
	b = e.parentOf(msgp.AppendString(b, "parent_block_hash"), ev)
	b = e.tokens(msgp.AppendString(b, "token_ids"), ev.tokens)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), e.blockSize)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	str("medium", "GPU")
	if e.sglang {
		if salted {
			str("cache_salt", ev.salt)
		}
	} else {
		b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
		b = e.extraKeys(msgp.AppendString(b, "extra_keys"), ev)
		b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
		str("kv_cache_spec_kind", "full_attention")
	}
	if ev.session != "" {
		str("session_id", ev.session)
	}
	return b
}

func (e *encoder) openMap(b []byte, n int, full bool) []byte {
	if e.map16 && full {
		return append(b, 0xde, byte(n>>8), byte(n))
	}
	return msgp.AppendMapHeader(b, uint32(n))
}
