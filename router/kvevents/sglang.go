package kvevents

// sglang reads the arrays of SGLang to 0.5.19 (sglang/srt/disaggregation/kv_events.py). The eighth
// element differs from vLLM's: 0.5.18 has a map of metadata there, for salted blocks only. Events
// have no adapter names before 0.5.22 and no salts before 0.5.18: prompts that differ only in those
// look equal.
type sglang struct{}

func (sglang) storedElement(d *Decoder, i int, ev *Event) error {
	switch i {
	case 6:
		return d.internedString(&ev.Medium)
	case 7:
		if d.nextIsMap() {
			return d.metadata(ev)
		}
	}
	return d.events.skip()
}

func (d *Decoder) metadata(ev *Event) error {
	n, err := d.events.dict()
	if err != nil {
		return err
	}
	for range n {
		key, err := d.events.text()
		if err != nil {
			return err
		}
		if string(key) == "cache_salt" {
			err = d.internedString(&ev.CacheSalt)
		} else {
			err = d.events.skip()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *Decoder) nextIsMap() bool {
	c, err := d.events.lead()
	return err == nil && (c&0xf0 == 0x80 || c == 0xde || c == 0xdf)
}

// unknownEngine reads events of an engine without a configured name: a map as the eighth element is
// SGLang's metadata, everything else is read as vLLM's.
type unknownEngine struct{}

func (unknownEngine) storedElement(d *Decoder, i int, ev *Event) error {
	if i == 7 && d.nextIsMap() {
		return sglang{}.storedElement(d, i, ev)
	}
	return vllm{}.storedElement(d, i, ev)
}
