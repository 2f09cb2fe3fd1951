package kvevents

import "sluice/router/blockhash"

// vllm reads the arrays of vLLM 0.9 to 0.23 (vllm/distributed/kv_events.py). The
// element's meaning goes by its place; later releases only made them longer.
// Before 0.17 nothing tells of images and cache salts: prompts that differ in
// those alone look alike. Before 0.14 an adapter is a number, not its name.
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
	return d.events.skip() // cache spec, and whatever comes after
}

// mixExtra reads vLLM's extra_keys: per block nil or what its hash depends on
// beside the tokens, in the order LoRA name, multimodal items (an identifier, or
// with its offset), cache salt (a sequence's first block only), digests of
// prompt embeddings. Nothing says which is which. The adapter's name is known;
// in a first block the last string is taken for the salt; all else goes into
// the block's hash as it is. Taken wrongly (vLLM 0.17 and 0.18 send an image's
// identifier as a bare string), a block is missed, never found for another.
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
		ev.Locals = ev.Locals[:0] // which key is whose is not known
	}
	return nil
}

// lastText is the place of the last string among n values, -1 if there is none.
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
