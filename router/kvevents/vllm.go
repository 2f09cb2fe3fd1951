package kvevents

import "sluice/router/blockhash"

// vllm reads the arrays of vLLM 0.9 to 0.23 (vllm/distributed/kv_events.py). An element's position
// gives its meaning; later releases only appended elements. Before 0.17 events contain neither
// images nor cache salts: prompts that differ only in those look equal. Before 0.14 an adapter is
// identified by a number.
type vllm struct{}

func (vllm) storedElement(d *Decoder, i int, ev *Event) error {
	switch i {
	case 6:
		return d.internedString(&ev.Medium)
	case 7:
		return d.internedString(&ev.LoRA)
	case 8:
		return d.extraKeys()
	case 9:
		return d.group(ev)
	case 10:
		return d.internedString(&ev.CacheKind)
	}
	return d.events.skip() // cache spec, and elements that later releases append
}

// mixExtra reads vLLM's extra_keys: per block nil, or what its hash depends on besides the tokens,
// in the order LoRA name, multimodal items (an identifier, possibly with its offset), cache salt
// (only in a sequence's first block), digests of prompt embeddings. The items are not labelled. The
// adapter's name is known from another field; the last string of a first block is used as the salt;
// everything else becomes part of the block's hash. If that is wrong (vLLM 0.17 and 0.18 send an
// image's identifier as a bare string), a block is missed but never confused with another.
func (d *Decoder) mixExtra(ev *Event) error {
	r := d.stored.extra
	blocks, err := r.array()
	if err != nil {
		return err
	}
	for i := range blocks {
		if r.null() {
			continue
		}
		keys, err := r.array()
		if err != nil {
			return err
		}
		salt := -1
		if i == 0 && !ev.HasParent {
			salt = lastText(r, keys)
		}
		for k := range keys {
			raw, err := r.raw()
			if err != nil {
				return err
			}
			word, err := (&reader{raw}).text()
			switch isText := err == nil; {
			case isText && k == 0 && ev.LoRA != "" && string(word) == ev.LoRA:
			case isText && k == salt:
				ev.CacheSalt = d.intern(word)
			default:
				ev.Extra = true
				if i < len(ev.Locals) {
					ev.Locals[i] = blockhash.Tagged(ev.Locals[i], raw)
				}
			}
		}
	}
	if ev.Extra && blocks != len(ev.Hashes) {
		ev.Locals = ev.Locals[:0] // the keys cannot be assigned to blocks
	}
	return nil
}

// lastText returns the index of the last string among n values, or -1.
func lastText(r reader, n int) int {
	last := -1
	for k := range n {
		raw, err := r.raw()
		if err != nil {
			return -1
		}
		if c := raw[0]; c&0xe0 == 0xa0 || c >= 0xd9 && c <= 0xdb {
			last = k
		}
	}
	return last
}
