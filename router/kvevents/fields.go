package kvevents

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
)

func (d *Decoder) hashes(ev *Event) error {
	n, err := d.events.array()
	if err != nil {
		return err
	}
	ev.Hashes = ev.Hashes[:0]
	for range n {
		h, err := d.hash()
		if err != nil {
			return err
		}
		ev.Hashes = append(ev.Hashes, h)
	}
	return nil
}

// hash folds an engine's hash to 64 bits: integers as they are, negative ones in two's complement,
// digests by their last eight bytes. The two forms in which a vLLM engine may publish a hash give
// the same result.
func (d *Decoder) hash() (kvindex.EngineHash, error) {
	c, err := d.events.lead()
	if err != nil {
		return 0, err
	}
	if c < 0xc4 || c > 0xc6 {
		v, _, err := d.events.integer()
		return kvindex.EngineHash(v), err
	}
	b, err := d.events.binary()
	if err != nil {
		return 0, err
	}
	if len(b) == 0 {
		return 0, fmt.Errorf("empty hash")
	}
	var h kvindex.EngineHash
	for _, x := range b[max(0, len(b)-8):] {
		h = h<<8 | kvindex.EngineHash(x)
	}
	return h, nil
}

// parent reads the parent's hash. A prompt's first block has none: null in vLLM and SGLang, 0 in
// the arrays of llm-d's libraries.
func (d *Decoder) parent(ev *Event) (err error) {
	if ev.HasParent = !d.events.null(); ev.HasParent {
		ev.Parent, err = d.hash()
		ev.HasParent = ev.Parent != 0
	}
	return err
}

func (d *Decoder) tokens(ev *Event) error {
	r := &d.events
	ev.Tokens, ev.Pairs = ev.Tokens[:0], false
	if r.null() {
		return nil
	}
	n, err := r.array()
	if err != nil {
		return err
	}
	if n > 0 && len(r.b) > 0 {
		c := r.b[0]
		ev.Pairs = c&0xf0 == 0x90 || c == 0xdc || c == 0xdd
	}
	if !ev.Pairs {
		ev.Tokens, err = r.tokenList(ev.Tokens, n)
		return err
	}
	for range n {
		two, err := r.array()
		if err != nil {
			return err
		}
		if two != 2 {
			return fmt.Errorf("position has %d tokens; want 2", two)
		}
		if ev.Tokens, err = r.tokenList(ev.Tokens, 2); err != nil {
			return err
		}
	}
	return nil
}

// tokenList appends n tokens to dst. This is most of the work of decoding events, so the three
// encodings of nearly all tokens are read in place. The two wide ones are mixed at random, so a
// branch between them would be mispredicted half of the time; they are distinguished by arithmetic.
func (r *reader) tokenList(dst []uint32, n int) ([]uint32, error) {
	b, i := r.b, 0
	for ; n > 0; n-- {
		if i+5 <= len(b) { // enough for the longest of the three
			c := b[i]
			if wide := uint32(c) - 0xcd; wide <= 1 {
				dst = append(dst, binary.BigEndian.Uint32(b[i+1:])>>(16-16*wide))
				i += 3 + 2*int(wide)
				continue
			}
			if c <= 0x7f {
				dst = append(dst, uint32(c))
				i++
				continue
			}
		}
		r.b = b[i:]
		v, negative, err := r.integer()
		if err != nil {
			return dst, err
		}
		if negative || v > 1<<32-1 {
			return dst, fmt.Errorf("token %d; want 0 to 4294967295", int64(v))
		}
		dst, b, i = append(dst, uint32(v)), r.b, 0
	}
	r.b = b[i:]
	return dst, nil
}

func (d *Decoder) blockSize(ev *Event) (err error) {
	if ev.BlockSize = 0; !d.events.null() {
		ev.BlockSize, err = d.events.small()
	}
	return err
}

func (d *Decoder) group(ev *Event) (err error) {
	if ev.Group = 0; !d.events.null() {
		ev.Group, err = d.events.small()
	}
	return err
}

// locality reads nil, LOCAL or REMOTE; an unknown value counts as REMOTE.
func (d *Decoder) locality(ev *Event) error {
	if ev.Locality = Unspecified; d.events.null() {
		return nil
	}
	s, err := d.events.text()
	if ev.Locality = Remote; string(s) == "LOCAL" {
		ev.Locality = Local
	}
	return err
}

// internedString reads a string or nil. It interns the few strings that recur, so that reading them
// does not allocate.
func (d *Decoder) internedString(to *string) error {
	if *to = ""; d.events.null() {
		return nil
	}
	s, err := d.events.text()
	if err != nil {
		return err
	}
	*to = d.intern(s)
	return nil
}

const (
	maxInterned    = 4096
	maxInternedLen = 256
)

func (d *Decoder) intern(s []byte) string {
	if w, ok := d.interned[string(s)]; ok || len(s) > maxInternedLen {
		if ok {
			return w
		}
		return string(s)
	}
	if len(d.interned) >= maxInterned {
		clear(d.interned)
	}
	w := string(s)
	d.interned[w] = w
	return w
}

// storedFields are the fields that are evaluated after the whole event was read.
type storedFields struct {
	extra     reader // positioned at extra_keys, if hasExtra
	hasExtra  bool
	adapter   int64 // lora_id
	hasLoraID bool
}

func (d *Decoder) loraID() error {
	if d.stored.hasLoraID = !d.events.null(); !d.stored.hasLoraID {
		return nil
	}
	v, _, err := d.events.integer()
	d.stored.adapter = int64(v)
	return err
}

func (d *Decoder) extraKeys() error {
	d.stored.hasExtra = !d.events.null()
	if !d.stored.hasExtra {
		return nil
	}
	d.stored.extra = d.events
	return d.events.skip()
}

// finish sets the adapter's name and hashes the blocks.
func (d *Decoder) finish(ev *Event) error {
	if ev.LoRA == "" && d.stored.hasLoraID {
		var buf [32]byte
		ev.LoRA = d.intern(strconv.AppendInt(append(buf[:0], "lora_id:"...), d.stored.adapter, 10))
	}
	positions, perBlock := len(ev.Tokens), ev.BlockSize
	if ev.Pairs {
		positions, perBlock = positions/2, 2*perBlock
	}
	placed := ev.BlockSize > 0 && len(ev.Hashes) > 0 && positions/ev.BlockSize == len(ev.Hashes) && positions%ev.BlockSize == 0
	if placed {
		ev.Locals = blockhash.Locals(ev.Locals[:0], ev.Tokens, perBlock)
		if ev.Pairs {
			for i, l := range ev.Locals {
				ev.Locals[i] = blockhash.Tagged(l, pairTag)
			}
		}
	}
	if d.stored.hasExtra {
		return d.mixExtra(ev)
	}
	return nil
}

// pairTag distinguishes blocks of token pairs from blocks of as many tokens.
var pairTag = []byte("pairs")
