package incremental

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/objpool"
	"sluice/router/blockhash"
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

// Renderer renders and encodes in one call. It is safe for concurrent use. native/tokenizer.Model is
// one.
type Renderer interface {
	Model
	// Prompt renders input with a chat template ("": the model's own), passes the text to rest, which
	// is valid until rest returns, and appends the ids of what rest returns, the end of the text or
	// nil for nothing, to dst. addSpecial is that of Encode. After an error, input and what rest refers to
	// belong to the call, which may still run.
	Prompt(dst []uint32, template string, input []byte, addSpecial bool, rest func(text []byte) []byte) ([]uint32, error)
}

// Result is what Encode found.
type Result struct {
	Cached  int // ids that were cached
	Encoded int // bytes of text that the model has encoded
	Hashed  int // block hashes that were computed; the others were cached
	Bytes   int // of the whole text
}

// Output is where a text's ids go, and the hashes of their full blocks of BlockSize ids.
type Output struct {
	IDs    []uint32
	Blocks []blockhash.Seq // those of blockhash.Seqs with the scope as the salt
}

// BlockSize is the number of ids in a block whose hash is cached.
const BlockSize = 16

// work is the scratch memory of one text.
type work struct {
	cuts        []cut
	keys        []key
	chain       []*segment // the cached segments, last first
	added       []*segment
	tail        []uint32 // the ids of what is not cached
	n           int      // segments that are cached
	from, bytes int      // where the part that is not cached begins, and the text ends
	occurrences int      // boundary tokens in the text
}

var works = objpool.Pool[work]{New: func() *work { return new(work) }}

// maxScratch bounds the memory that a pooled work keeps: the segments of a text, and a quarter of its
// ids.
const maxScratch = 1 << 16

func (w *work) put() {
	clear(w.chain)
	clear(w.added)
	*w = work{cuts: w.cuts[:0], keys: w.keys[:0], chain: w.chain[:0], added: w.added[:0], tail: w.tail[:0]}
	if cap(w.keys) <= maxScratch && cap(w.tail) <= 4*maxScratch {
		works.Put(w)
	}
}

// Encode appends the ids of text to dst: those that the model itself would append. Texts share what
// is cached only within a scope; the caller passes what separates KV in the engines, such as the
// cache salt. If the model fails, dst's length is unchanged.
func (e *Encoder) Encode(dst []uint32, scope uint64, text []byte, addSpecial bool) ([]uint32, Result, error) {
	out := Output{IDs: dst}
	res, err := e.EncodeText(&out, scope, text, addSpecial)
	return out.IDs, res, err
}

// EncodeText is Encode with the hashes of the blocks of text's ids, which it appends to out.Blocks.
func (e *Encoder) EncodeText(out *Output, scope uint64, text []byte, addSpecial bool) (Result, error) {
	w := works.Get()
	defer w.put()
	var err error
	if rest := e.plan(w, scope, text, addSpecial); rest != nil {
		if w.tail, err = e.model.Encode(w.tail, rest, addSpecial && e.rules == nil); err != nil {
			return Result{Encoded: len(rest)}, err
		}
	}
	return e.finish(w, out, scope, addSpecial), nil
}

// EncodeChat renders a chat with the template of the model, which must be a Renderer, and encodes
// its text like EncodeText. After an error the call may still use input.
func (e *Encoder) EncodeChat(out *Output, scope uint64, input []byte, addSpecial bool) (Result, error) {
	w := works.Get()
	tail, err := e.model.(Renderer).Prompt(w.tail, "", input, addSpecial && e.rules == nil, func(text []byte) []byte {
		return e.plan(w, scope, text, addSpecial)
	})
	if err != nil {
		return Result{}, err // w belongs to the call
	}
	defer w.put()
	w.tail = tail
	return e.finish(w, out, scope, addSpecial), nil
}

// plan finds what of a text is cached and returns the rest, which the model has to encode; nil if
// all of it is cached.
func (e *Encoder) plan(w *work, scope uint64, text []byte, addSpecial bool) (rest []byte) {
	w.bytes = len(text)
	if text == nil {
		text = []byte{}
	}
	if e.cache == nil {
		return text
	}
	if e.rules != nil {
		w.cuts, w.occurrences = e.rules.boundaries.cuts(w.cuts, text, e.minSegment)
	}
	e.hash(w, scope, text, addSpecial && (e.rules == nil || len(e.rules.Prefix) > 0))
	w.chain, w.n = e.cache.find(w.chain, w.keys)
	w.from = w.start(w.n, len(text))
	if w.n == len(w.keys) {
		return nil
	}
	return text[w.from:]
}

// finish joins what is cached with the ids that the model has given for the rest, and stores them.
func (e *Encoder) finish(w *work, out *Output, scope uint64, addSpecial bool) Result {
	res := Result{Encoded: w.bytes - w.from, Bytes: w.bytes}
	if w.n > 0 {
		res.Cached = w.chain[0].total
	}
	before, have := len(out.IDs), len(out.Blocks)
	special := addSpecial && e.rules != nil
	if special {
		out.IDs = append(out.IDs, e.rules.Prefix...)
	}
	first := len(out.IDs) - before // ids before those of the text
	out.IDs = appendChain(out.IDs, w.chain, res.Cached)
	out.IDs = append(out.IDs, w.tail...)
	if special {
		out.IDs = append(out.IDs, e.rules.Suffix...)
	}
	out.Blocks = appendBlocks(out.Blocks, w.chain)
	res.Hashed = -len(out.Blocks)
	out.Blocks = blockhash.ContinueSeqs(out.Blocks, have, blockhash.Salt(scope), out.IDs[before:], BlockSize)
	res.Hashed += len(out.Blocks)
	if w.n < len(w.keys) {
		e.store(w, first, out.Blocks[have:])
	}
	return res
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

// appendBlocks appends the hashes of the blocks that end in a chain, whose first segment is the last
// one of the text.
func appendBlocks(dst []blockhash.Seq, chain []*segment) []blockhash.Seq {
	n := 0
	for _, s := range chain {
		n += len(s.blocks)
	}
	end := len(dst) + n
	dst = slices.Grow(dst, n)[:end]
	for _, s := range chain {
		end -= len(s.blocks)
		copy(dst[end:], s.blocks)
	}
	return dst
}

// minStored is the least number of bytes of a last segment that is worth its place in the cache: a
// shorter one, such as a generation prompt, is encoded again.
const minStored = 256

// store adds the segments that are not cached. first is the number of ids before those of the text;
// blocks are the hashes of all blocks.
func (e *Encoder) store(w *work, first int, blocks []blockhash.Seq) {
	total := 0
	var parent *segment
	before := 0 // boundary tokens before the first segment to add
	if w.n > 0 {
		parent, total = w.chain[0], w.chain[0].total
		before = w.cuts[w.n-1].ordinal
	}
	if w.n < len(w.cuts) && !e.eachOnce(w.tail, w.occurrences-before) {
		e.whole.Add(1)
		return
	}
	pos, seen := 0, 0
	for i := w.n; i < len(w.keys); i++ {
		begin := pos
		if i < len(w.cuts) {
			pos, seen = e.advance(w.tail, pos, seen, w.cuts[i].ordinal-before)
		} else {
			pos = len(w.tail)
			if w.bytes-w.start(i, 0) < e.minStored {
				break
			}
		}
		from := (first + total) / BlockSize
		total += pos - begin
		to := (first + total) / BlockSize
		s := newSegment(w.keys[i], parent, w.tail[begin:pos], total)
		s.blocks = append(make([]blockhash.Seq, 0, to-from), blocks[from:to]...)
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
		if e.rules.boundaries.isBoundary(id) {
			have++
		}
	}
	return have == n
}

// advance returns the position of boundary token number ordinal in ids; seen of them are before pos.
func (e *Encoder) advance(ids []uint32, pos, seen, ordinal int) (at, seenBefore int) {
	for i := pos; i < len(ids); i++ {
		if !e.rules.boundaries.isBoundary(ids[i]) {
			continue
		}
		if seen == ordinal {
			return i, seen
		}
		seen++
	}
	return len(ids), seen
}
