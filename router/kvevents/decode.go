package kvevents

import "fmt"

// Batch is the envelope of a message's events.
type Batch struct {
	Time    float64 // seconds since 1970, by the engine's clock
	HasRank bool
	Rank    int // data-parallel rank, if HasRank
	Len     int // number of events
}

// Decoder decodes one message at a time: Reset, then Next until it returns false. It reuses its
// buffers, so that a stream of messages causes no allocation. A Decoder belongs to one goroutine.
type Decoder struct {
	family    family
	events    reader
	remaining int
	stored    storedFields
	interned  map[string]string
}

// family is the part that differs between engines: the meaning of the elements of a BlockStored
// array. In the map form the fields are named.
type family interface {
	// storedElement reads element i (0 is the tag) of a BlockStored array. It is called for i from
	// firstOwnElement on and skips unknown elements.
	storedElement(d *Decoder, i int, ev *Event) error
}

// NewDecoder returns the decoder of an engine family, "vllm" or "sglang". For any other name it
// distinguishes the two by the content.
func NewDecoder(engine string) *Decoder {
	d := &Decoder{interned: make(map[string]string)}
	switch engine {
	case "vllm":
		d.family = vllm{}
	case "sglang":
		d.family = sglang{}
	default:
		d.family = unknownEngine{}
	}
	return d
}

// Reset starts a message. It checks that the whole payload is well formed before anything is
// decoded. The payload is borrowed until the next Reset.
func (d *Decoder) Reset(payload []byte) (Batch, error) {
	d.remaining, d.events = 0, reader{}
	b, err := d.envelope(reader{payload})
	if err != nil {
		return Batch{}, fmt.Errorf("kvevents: cannot decode a batch of %d bytes: %w", len(payload), err)
	}
	d.remaining = b.Len
	return b, nil
}

// envelope reads [ts, events, rank, …]; vLLM 0.9.0 sends no rank.
func (d *Decoder) envelope(r reader) (b Batch, err error) {
	n, err := r.array()
	if err != nil {
		return b, err
	}
	if n < 2 {
		return b, fmt.Errorf("array has %d elements; want at least 2", n)
	}
	if b.Time, err = r.timestamp(); err != nil {
		return b, fmt.Errorf("time: %w", err)
	}
	d.events = r
	if b.Len, err = d.events.array(); err != nil {
		return b, fmt.Errorf("events: %w", err)
	}
	if err = r.skip(); err != nil {
		return b, fmt.Errorf("events: %w", err)
	}
	for i := 2; i < n; i++ {
		if i == 2 && !r.null() {
			if b.Rank, err = r.small(); err != nil {
				return b, fmt.Errorf("rank: %w", err)
			}
			b.HasRank = true
		} else if i > 2 {
			if err = r.skip(); err != nil {
				return b, err
			}
		}
	}
	return b, nil
}

// Next decodes the next event into ev; more is false if there is none. After an error the event is
// skipped and Next may be called again.
func (d *Decoder) Next(ev *Event) (more bool, err error) {
	if d.remaining == 0 {
		return false, nil
	}
	d.remaining--
	start := d.events
	if err := d.event(ev); err != nil {
		d.events = start
		if d.events.skip() != nil {
			d.remaining = 0
		}
		return true, fmt.Errorf("kvevents: cannot decode an event: %w", err)
	}
	return true, nil
}

func (d *Decoder) event(ev *Event) error {
	*ev = Event{Kind: Unknown, Hashes: ev.Hashes[:0], Tokens: ev.Tokens[:0], Locals: ev.Locals[:0]}
	d.stored = storedFields{}
	c, err := d.events.lead()
	if err != nil {
		return err
	}
	if c&0xf0 == 0x80 || c == 0xde || c == 0xdf {
		err = d.mapEvent(ev)
	} else {
		err = d.arrayEvent(ev)
	}
	if err != nil || ev.Kind != BlockStored {
		return err
	}
	return d.finish(ev)
}

func kindOf(tag []byte) EventKind {
	switch string(tag) {
	case "BlockStored":
		return BlockStored
	case "BlockRemoved":
		return BlockRemoved
	case "AllBlocksCleared":
		return AllBlocksCleared
	}
	return Unknown
}

// firstOwnElement is the first element whose meaning differs between the families' BlockStored
// arrays.
const firstOwnElement = 6

// arrayEvent reads the positional form: vLLM to 0.23, SGLang to 0.5.19.
func (d *Decoder) arrayEvent(ev *Event) error {
	r := &d.events
	n, err := r.array()
	if err != nil {
		return err
	}
	if n == 0 {
		return fmt.Errorf("empty array; want an event's name first")
	}
	tag, err := r.text()
	if err != nil {
		return err
	}
	ev.Kind = kindOf(tag)
	if ev.Kind == BlockStored && n < firstOwnElement || ev.Kind == BlockRemoved && n < 2 {
		return fmt.Errorf("%s has only %d elements", ev.Kind, n)
	}
	for i := 1; i < n && err == nil; i++ {
		switch ev.Kind {
		case BlockStored:
			err = d.storedElement(i, ev)
		case BlockRemoved:
			err = d.removedElement(i, ev)
		default:
			err = r.skip()
		}
		if err != nil {
			return fmt.Errorf("%s, element %d: %w", ev.Kind, i, err)
		}
	}
	return nil
}

func (d *Decoder) storedElement(i int, ev *Event) error {
	switch i {
	case 1:
		return d.hashes(ev)
	case 2:
		return d.parent(ev)
	case 3:
		return d.tokens(ev)
	case 4:
		return d.blockSize(ev)
	case 5:
		return d.loraID()
	}
	return d.family.storedElement(d, i, ev)
}

// removedElement reads vLLM's BlockRemoved; SGLang's is a prefix of it.
func (d *Decoder) removedElement(i int, ev *Event) error {
	switch i {
	case 1:
		return d.hashes(ev)
	case 2:
		return d.internedString(&ev.Medium)
	case 3:
		return d.group(ev)
	case 4:
		return d.locality(ev)
	}
	return d.events.skip()
}

// mapEvent reads the form with field names: vLLM from 0.24, SGLang from 0.5.20.
func (d *Decoder) mapEvent(ev *Event) error {
	r := &d.events
	n, err := r.dict()
	if err != nil {
		return err
	}
	if ev.Kind, err = mapKind(*r, n); err != nil {
		return err
	}
	var seen uint8
	for range n {
		key, err := r.text()
		if err != nil {
			return err
		}
		switch ev.Kind {
		case BlockStored, BlockRemoved:
			err = d.field(key, ev, &seen)
		default:
			err = r.skip()
		}
		if err != nil {
			return fmt.Errorf("%s, field %q: %w", ev.Kind, key, err)
		}
	}
	var need uint8
	switch ev.Kind {
	case BlockStored:
		need = hasHashes | hasTokens | hasBlockSize
	case BlockRemoved:
		need = hasHashes
	}
	if seen&need != need {
		return fmt.Errorf("%s lacks block_hashes, token_ids or block_size", ev.Kind)
	}
	return nil
}

const (
	hasHashes = 1 << iota
	hasTokens
	hasBlockSize
)

// mapKind finds "type" among a map's n entries, in any position.
func mapKind(r reader, n int) (EventKind, error) {
	for range n {
		key, err := r.text()
		if err != nil {
			return 0, err
		}
		if string(key) == "type" {
			tag, err := r.text()
			return kindOf(tag), err
		}
		if err = r.skip(); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("map has no \"type\"")
}

// field reads one named field. It knows both families' names, none of which is ambiguous.
func (d *Decoder) field(key []byte, ev *Event, seen *uint8) error {
	switch string(key) {
	case "block_hashes":
		*seen |= hasHashes
		return d.hashes(ev)
	case "parent_block_hash":
		return d.parent(ev)
	case "token_ids":
		*seen |= hasTokens
		return d.tokens(ev)
	case "block_size":
		*seen |= hasBlockSize
		return d.blockSize(ev)
	case "lora_id":
		return d.loraID()
	case "medium":
		return d.internedString(&ev.Medium)
	case "lora_name":
		return d.internedString(&ev.LoRA)
	case "cache_salt":
		return d.internedString(&ev.CacheSalt)
	case "extra_keys":
		return d.extraKeys()
	case "group_idx":
		return d.group(ev)
	case "kv_cache_spec_kind":
		return d.internedString(&ev.CacheKind)
	case "locality":
		return d.locality(ev)
	}
	return d.events.skip()
}
