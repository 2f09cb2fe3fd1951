package incremental

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/objpool"
)

// Model encodes a whole text. It is safe for concurrent use.
type Model interface {
	// Encode appends the ids of text, which is valid UTF-8, to dst. addSpecial adds what the
	// post-processor adds.
	Encode(dst []uint32, text []byte, addSpecial bool) ([]uint32, error)
}

// Encoder encodes the texts of one model. It is safe for concurrent use.
type Encoder struct {
	model Model
	rules *Rules // nil: every text is encoded as a whole
	cache *Cache
	id    uint64 // separates the texts of models in a shared cache

	minSegment, minStored int // bytes; only tests change them

	whole atomic.Uint64
}

var (
	nextID atomic.Uint64
	seed   = rand.Uint64()
)

// NewEncoder returns an Encoder. rules may be nil: then texts are cached, but encoded as a whole.
// cache may be nil.
func NewEncoder(model Model, rules *Rules, cache *Cache) *Encoder {
	return &Encoder{model: model, rules: rules, cache: cache, id: nextID.Add(1), minSegment: minSegment, minStored: minStored}
}

// Check compares the rules with the model: each boundary token must be one id, a text before and
// after it must keep its ids, and the post-processor must add what Rules say. NewRules has proved
// more than Check can try; Check finds a model that was not loaded from the file that NewRules has
// read.
func (e *Encoder) Check() error {
	if e.rules == nil {
		return nil
	}
	const before, after = "Text, 1 2\n ", " text\n\n3 "
	left, err := e.model.Encode(nil, []byte(before), false)
	if err != nil {
		return err
	}
	withSpecial, err := e.model.Encode(nil, []byte(before), true)
	if err != nil {
		return err
	}
	if want := slices.Concat(e.rules.Prefix, left, e.rules.Suffix); !slices.Equal(withSpecial, want) {
		return fmt.Errorf("incremental: the model adds other special tokens than its post_processor: %d ids, not %d: %w", len(withSpecial), len(want), ErrNotIncremental)
	}
	for content, id := range e.rules.boundaries.ids {
		right, err := e.model.Encode(nil, []byte(content+after), false)
		if err != nil {
			return err
		}
		all, err := e.model.Encode(nil, []byte(before+content+after), false)
		if err != nil {
			return err
		}
		if len(right) == 0 || right[0] != id || !slices.Equal(all, slices.Concat(left, right)) {
			return fmt.Errorf("incremental: the model does not split a text before the added token %q: %w", content, ErrNotIncremental)
		}
	}
	return nil
}

// Result is what Encode found.
type Result struct {
	Cached  int // ids that were cached
	Encoded int // bytes of text that the model has encoded
}

// work is the scratch memory of one Encode.
type work struct {
	cuts  []cut
	keys  []key
	chain []*segment
	added []*segment
}

var works = objpool.Pool[work]{New: func() *work { return new(work) }}

// maxScratch bounds the memory that a pooled work keeps, in segments of a text.
const maxScratch = 1 << 16

func (w *work) put() {
	clear(w.chain)
	clear(w.added)
	*w = work{cuts: w.cuts[:0], keys: w.keys[:0], chain: w.chain[:0], added: w.added[:0]}
	if cap(w.keys) <= maxScratch {
		works.Put(w)
	}
}

// Encode appends the ids of text to dst: those that the model itself would append. Texts share what
// is cached only within a scope; the caller passes what separates KV in the engines, such as the
// cache salt. If the model fails, dst's length is unchanged.
func (e *Encoder) Encode(dst []uint32, scope uint64, text []byte, addSpecial bool) ([]uint32, Result, error) {
	if e.cache == nil {
		ids, err := e.model.Encode(dst, text, addSpecial)
		return ids, Result{Encoded: len(text)}, err
	}
	w := works.Get()
	defer w.put()
	occurrences := 0
	if e.rules != nil {
		w.cuts, occurrences = e.rules.boundaries.cuts(w.cuts, text, e.minSegment)
	}
	e.hash(w, scope, text, addSpecial && e.rules == nil)
	var n int
	w.chain, n = e.cache.find(w.chain, w.keys)
	var res Result
	if n > 0 {
		res.Cached = w.chain[0].total
	}
	from := w.start(n, len(text))
	ids := dst
	if addSpecial && e.rules != nil {
		ids = append(ids, e.rules.Prefix...)
	}
	ids = appendChain(ids, w.chain, res.Cached)
	if n < len(w.keys) {
		res.Encoded = len(text) - from
		tail := len(ids)
		var err error
		if ids, err = e.model.Encode(ids, text[from:], addSpecial && e.rules == nil); err != nil {
			return dst, res, err
		}
		e.store(w, n, ids[tail:], occurrences, len(text)-from)
	}
	if addSpecial && e.rules != nil {
		ids = append(ids, e.rules.Suffix...)
	}
	return ids, res, nil
}

// hash computes the keys of the text's segments: one for each cut, of what is before it, and one for
// the whole text.
func (e *Encoder) hash(w *work, scope uint64, text []byte, special bool) {
	var head [40]byte
	binary.LittleEndian.PutUint64(head[0:], e.id)
	binary.LittleEndian.PutUint64(head[8:], scope)
	if special {
		head[16] = 1
	}
	k := xxh3.Hash128Seed(head[:24], seed)
	from := 0
	for i := 0; i <= len(w.cuts); i++ {
		to := len(text)
		if i < len(w.cuts) {
			to = w.cuts[i].at
		}
		// The hash of the segment alone is joined with that of what precedes it.
		own := xxh3.Hash128Seed(text[from:to], seed)
		binary.LittleEndian.PutUint64(head[0:], k.Hi)
		binary.LittleEndian.PutUint64(head[8:], k.Lo)
		binary.LittleEndian.PutUint64(head[16:], own.Hi)
		binary.LittleEndian.PutUint64(head[24:], own.Lo)
		binary.LittleEndian.PutUint64(head[32:], uint64(to-from)<<1|uint64(b2i(i == len(w.cuts))))
		k = xxh3.Hash128Seed(head[:40], seed)
		w.keys = append(w.keys, k)
		from = to
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// start returns where the segment after the first n begins.
func (w *work) start(n, end int) int {
	switch {
	case n == 0:
		return 0
	case n <= len(w.cuts):
		return w.cuts[n-1].at
	}
	return end
}

// appendChain appends the ids of a chain, whose first segment is the last one of the text.
func appendChain(dst []uint32, chain []*segment, total int) []uint32 {
	from := len(dst)
	dst = slices.Grow(dst, total)[:from+total]
	for _, s := range chain {
		s.unpack(dst[from+s.total-s.count : from+s.total])
	}
	return dst
}

// minStored is the least number of bytes of a last segment that is worth its place in the cache: a
// shorter one, such as a generation prompt, is encoded again.
const minStored = 256

// store adds the segments from number n on, whose ids are ids, to the cache.
func (e *Encoder) store(w *work, n int, ids []uint32, occurrences, bytes int) {
	from := w.start(n, 0)
	total := 0
	var parent *segment
	if n > 0 {
		parent, total = w.chain[0], w.chain[0].total
	}
	before := 0 // boundary tokens before the first segment to add
	if n > 0 {
		before = w.cuts[n-1].ordinal
	}
	if n < len(w.cuts) && !e.eachOnce(ids, occurrences-before) {
		e.whole.Add(1)
		return
	}
	pos, seen := 0, 0
	for i := n; i < len(w.keys); i++ {
		begin := pos
		if i < len(w.cuts) {
			pos, seen = e.advance(ids, pos, seen, w.cuts[i].ordinal-before)
		} else {
			pos = len(ids)
			if from+bytes-w.start(i, 0) < e.minStored {
				break
			}
		}
		total += pos - begin
		s := newSegment(w.keys[i], parent, ids[begin:pos], total)
		w.added = append(w.added, s)
		parent = s
	}
	e.cache.add(w.added)
}

// eachOnce reports whether ids contains exactly one id of a boundary token for each of n
// occurrences in the text, in which case the ids tell where each of them is. A vocabulary may have
// a token's id as one that ordinary text can yield as well.
func (e *Encoder) eachOnce(ids []uint32, n int) bool {
	have := 0
	for _, id := range ids {
		if e.rules.boundaries.isID[id] {
			have++
		}
	}
	return have == n
}

// advance returns the position of boundary token number ordinal in ids; seen of them are before pos.
func (e *Encoder) advance(ids []uint32, pos, seen, ordinal int) (at, seenBefore int) {
	for i := pos; i < len(ids); i++ {
		if !e.rules.boundaries.isID[ids[i]] {
			continue
		}
		if seen == ordinal {
			return i, seen
		}
		seen++
	}
	return len(ids), seen
}
