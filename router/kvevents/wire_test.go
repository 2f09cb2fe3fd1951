package kvevents

import (
	"math/rand/v2"

	"github.com/tinylib/msgp/msgp"
)

// wireEvent is an event as tests write it, in either form.
type wireEvent struct {
	kind      string // "" is BlockStored
	hashes    []any  // int, uint64 or []byte
	parent    any
	tokens    []any // int, or []any{int, int}
	blockSize int
	medium    any
	more      map[string]any
}

func (e wireEvent) name() string {
	if e.kind == "" {
		return "BlockStored"
	}
	return e.kind
}

func (e wireEvent) asArray(tail ...any) []byte {
	out := []any{e.name()}
	switch e.name() {
	case "BlockStored":
		out = append(out, e.hashes, e.parent, e.tokens, e.blockSize, nil, e.medium)
	case "BlockRemoved":
		out = append(out, e.hashes, e.medium)
	}
	return pack(nil, append(out, tail...))
}

func (e wireEvent) fields() map[string]any {
	m := map[string]any{"type": e.name()}
	if e.name() != "AllBlocksCleared" {
		m["block_hashes"], m["medium"] = e.hashes, e.medium
	}
	if e.name() == "BlockStored" {
		m["parent_block_hash"], m["token_ids"], m["block_size"], m["lora_id"] = e.parent, e.tokens, e.blockSize, nil
	}
	for k, v := range e.more {
		m[k] = v
	}
	return m
}

// asMap writes the fields in the random order of Go's maps.
func (e wireEvent) asMap() []byte { return pack(nil, e.fields()) }

// asLongMap is asMap with a header of any length, as vLLM 0.33 writes.
func (e wireEvent) asLongMap(rng *rand.Rand) []byte {
	m := e.fields()
	var b []byte
	if rng.IntN(2) == 0 {
		b = append(b, 0xde, 0, byte(len(m)))
	} else {
		b = append(b, 0xdf, 0, 0, 0, byte(len(m)))
	}
	for k, v := range m {
		b = pack(msgp.AppendString(b, k), v)
	}
	return b
}

// wireBatch is a message of ready-made events; rank nil is sent as nil.
func wireBatch(rank any, events ...[]byte) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, 1.5)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, e := range events {
		b = append(b, e...)
	}
	return pack(b, rank)
}

// signed is packed in a signed form, whatever its sign.
type signed int

func pack(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return msgp.AppendNil(b)
	case int:
		if v >= 0 {
			return msgp.AppendUint(b, uint(v)) // as msgspec does
		}
		return msgp.AppendInt(b, v)
	case signed:
		return msgp.AppendInt(b, int(v))
	case uint64:
		return msgp.AppendUint64(b, v)
	case string:
		return msgp.AppendString(b, v)
	case []byte:
		return msgp.AppendBytes(b, v)
	case []any:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, x := range v {
			b = pack(b, x)
		}
		return b
	case map[string]any:
		b = msgp.AppendMapHeader(b, uint32(len(v)))
		for k, x := range v {
			b = pack(msgp.AppendString(b, k), x)
		}
		return b
	}
	panic("a test packs what it cannot")
}
