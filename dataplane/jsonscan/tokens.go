package jsonscan

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"unsafe"

	"sluice/dataplane/objpool"
)

// Integer parses an integer as engines do (pydantic's lax mode): digits, also with a fraction of
// zeros ("16.0"), or a float without a fraction ("1e3"). ok is false if it does not fit into 64
// bits.
func Integer(raw []byte) (n int64, ok bool) {
	if n, ok = parseInt(raw); ok || !bytes.ContainsAny(raw, "eE.") || len(raw) > maxFloat {
		return n, ok
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != math.Trunc(f) || f < math.MinInt64 || f >= math.MaxInt64 {
		return 0, false
	}
	return int64(f), true
}

// maxFloat bounds the length of an integer with a fraction or exponent.
const maxFloat = 64

// parseInt is Integer for digits, or digits with a fraction of zeros.
func parseInt(raw []byte) (int64, bool) {
	i, neg := 0, false
	if len(raw) > 0 && raw[0] == '-' {
		i, neg = 1, true
	}
	start, n := i, uint64(0)
	for ; i < len(raw) && raw[i]-'0' <= 9; i++ {
		if n > math.MaxInt64/10 {
			return 0, false
		}
		n = n*10 + uint64(raw[i]-'0')
	}
	if i == start {
		return 0, false
	}
	if i < len(raw) && raw[i] == '.' {
		for i++; i < len(raw) && raw[i] == '0'; i++ {
		}
	}
	limit := uint64(math.MaxInt64)
	if neg {
		limit++
	}
	if i != len(raw) || n > limit {
		return 0, false
	}
	if neg {
		return -int64(n), true
	}
	return int64(n), true
}

// digits returns how many of w's bytes, from the lowest, are decimal digits before the first that
// is not. A digit xor '0' is at most 9. A carry of the addition moves upwards from a byte that is
// not a digit.
func digits(w uint64) int {
	t := w ^ '0'*lowBits
	return bits.TrailingZeros64((t+0x76*lowBits|t)&highBits) / 8
}

// decimal returns the number that the lowest n bytes of w spell, 0 < n < 8. Shifted to the top they
// have zeros before them; then neighbours are joined pairwise.
func decimal(w uint64, n int) uint64 {
	return joined((w ^ '0'*lowBits) << (64 - 8*n))
}

// joined returns the number of eight digits, the first in the lowest byte.
func joined(w uint64) uint64 {
	w = w*10 + w>>8
	return ((w&0x000000ff000000ff)*0x000f424000000064 + (w>>16&0x000000ff000000ff)*0x0000271000000001) >> 32
}

// TokenIDs appends the token ids of a raw JSON array of non-negative integers to dst. If raw is
// anything else (also an array of arrays, or an id over 2^32-1) it returns dst unchanged and a
// *SyntaxError, whose offset counts from the beginning of raw.
func TokenIDs(dst []uint32, raw []byte) ([]uint32, error) {
	out, end, err := idsFrom(growForIDs(dst, raw), raw, skipSpace(raw, 0))
	if err == nil {
		err = endIDs(raw, end)
	}
	if err != nil {
		return dst, err
	}
	return out, nil
}

// FindTokenIDs appends the token ids of the top-level member called name of an engine's whole
// response, and reads them once. Of several members with the name the last counts. It returns a
// *SyntaxError if body is not a well-formed object. ok is false, and dst unchanged, if the member
// is absent or not an array of ids.
func FindTokenIDs(dst []uint32, body []byte, name string) (ids []uint32, ok bool, err error) {
	s := scanner{b: body, maxDepth: defaultDepth, names: [2]string{name}, ids: dst, idsFrom: len(dst), wantIDs: true}
	s.document(scopeFind)
	if s.err != nil || !s.foundIDsValue {
		return dst, false, s.err
	}
	return s.ids, true, nil
}

// foundIDs reads the array of token ids at i; -1: it is something else, and has not been read.
func (s *scanner) foundIDs(i, depth int) (end int) {
	s.ids, s.foundIDsValue = s.ids[:s.idsFrom], false
	if i >= len(s.b) || s.b[i] != '[' || depth > s.maxDepth {
		return -1
	}
	ids, end, err := idsFrom(growForIDs(s.ids, s.b[i:]), s.b, i)
	if err != nil {
		return -1
	}
	s.ids, s.foundIDsValue = ids, true
	return end
}

// countIDsFrom is the length in bytes from which the ids of an array are counted before they are
// read, which takes a fiftieth of the time of reading them. A slice that grows instead is copied
// several times and ends up to a quarter too large.
const countIDsFrom = 1 << 10

// growForIDs gives dst capacity for the ids that raw may contain.
func growForIDs(dst []uint32, raw []byte) []uint32 {
	if len(raw) < countIDsFrom || cap(dst)-len(dst) > len(raw)/2+maxIDsPerBlock {
		return dst
	}
	maxIDs := bytes.Count(raw, comma) + 1
	if cap(dst)-len(dst) >= maxIDs {
		return dst
	}
	grown := make([]uint32, len(dst), len(dst)+maxIDs+maxIDsPerBlock) // so that all can be read by blocks
	copy(grown, dst)
	return grown
}

var comma = []byte{','}

// maxScannedIDs bounds the bytes from a prompt's ids to the end of the body within which a scan
// reads the ids as it passes. It may need memory for half as many ids. In a longer body ids are
// only checked for form.
const maxScannedIDs = 512 << 10

// maxRetainedIDs is the number of ids for which a Doc keeps memory, because Docs live as long as
// requests. It has more only from a scan until ScannedIDs.
const maxRetainedIDs = 32 << 10

// idPools holds the unused slices of more than maxRetainedIDs.
var idPools objpool.Pool[[]uint32]

// acquireIDs acquires capacity for about n ids, more than a Doc keeps.
func (d *Doc) acquireIDs(n int) {
	if d.pooledIDs = idPools.Get(); d.pooledIDs == nil {
		d.pooledIDs = new([]uint32)
	}
	if d.ids = *d.pooledIDs; cap(d.ids) < n {
		d.ids = make([]uint32, 0, n)
	}
	*d.pooledIDs = nil
}

// releaseIDs releases the memory of ids.
func (d *Doc) releaseIDs(ids []uint32) {
	if d.ids = ids[:0]; cap(ids) <= maxRetainedIDs {
		return
	}
	if d.pooledIDs == nil {
		d.pooledIDs = new([]uint32)
	}
	*d.pooledIDs = d.ids
	idPools.Put(d.pooledIDs)
	d.pooledIDs, d.ids = nil, nil
}

// promptIDs reads the value at i of member k, if it is an array of token ids, and keeps them. It
// returns -1 for anything else, which has not been read.
func (s *scanner) promptIDs(k Key, i, depth int) int {
	if i >= len(s.b) || s.b[i] != '[' || len(s.b)-i > maxScannedIDs || depth > s.maxDepth {
		return -1
	}
	if first := skipSpace(s.b, i+1); first >= len(s.b) || s.b[first]-'0' > 9 {
		return -1
	}
	d := s.doc
	if n := (len(s.b) - i) / 5; n > maxRetainedIDs && cap(d.ids) < n {
		d.acquireIDs(n)
	}
	ids, end, err := idsFrom(d.ids[:0], s.b, i)
	if d.ids = ids; err != nil {
		return -1
	}
	if cap(ids)-len(ids) < maxIDsPerBlock && cap(ids) < maxRetainedIDs {
		d.ids = slices.Grow(ids, maxIDsPerBlock) // so that the next ids can be read by blocks
	}
	d.idsKey = k
	return end
}

// ScannedIDs is TokenIDs for member k, a prompt, if the scan has read them; ok is false if it has
// not: there are none, there were too many, or they have been returned before. The caller owns the
// result; dst's memory is used for a later scan.
func (d *Doc) ScannedIDs(k Key, dst []uint32) (ids []uint32, ok bool) {
	if len(d.ids) == 0 || d.idsKey != k {
		return dst, false
	}
	ids = d.ids
	d.releaseIDs(dst)
	return ids, true
}

// idsFrom is TokenIDs for the array at raw[i]. end is the offset after it.
func idsFrom(dst []uint32, raw []byte, i int) (out []uint32, end int, err error) {
	if i >= len(raw) || raw[i] != '[' {
		return dst, i, badIDs(raw, i, "an array of token ids")
	}
	i = skipSpace(raw, i+1)
	if i < len(raw) && raw[i] == ']' {
		return dst, i + 1, nil
	}
	return moreIDs(dst, raw, i)
}

// moreIDs reads the elements of an array from raw[i] on.
func moreIDs(dst []uint32, raw []byte, i int) (out []uint32, end int, err error) {
	out = dst
	quick := wide
	if i < len(raw) && raw[i] <= ' ' {
		i = skipSpace(raw, i)
	}
	for {
		if quick && i >= 8 && len(raw)-i > simdBlock && cap(out)-len(out) >= maxIDsPerBlock {
			before := len(out)
			if out, i = wideIDs(out, raw, i); i < len(raw) && raw[i] <= ' ' {
				i = skipSpace(raw, i)
			}
			quick = len(out)-before >= 4 // otherwise their form does not suit it
		}
		start, id := i, uint64(0)
		if i+8 <= len(raw) {
			w := binary.LittleEndian.Uint64(raw[i:])
			if n := digits(w); n > 0 && n < 8 {
				id = decimal(w, n)
				i += n
			}
		}
		for ; i < len(raw) && raw[i]-'0' <= 9; i++ {
			if id = id*10 + uint64(raw[i]-'0'); id > math.MaxUint32 {
				return dst, i, badIDs(raw, start, "a token id below 4294967296")
			}
		}
		if i == start || raw[start] == '0' && i > start+1 {
			return dst, i, badIDs(raw, start, "a token id, an integer from 0 on")
		}
		out = append(out, uint32(id))
		if i < len(raw) && raw[i] <= ' ' {
			i = skipSpace(raw, i)
		}
		if i >= len(raw) {
			return dst, i, badIDs(raw, i, `"," or "]"`)
		}
		switch raw[i] {
		case ',':
			if i++; i < len(raw) && raw[i] <= ' ' {
				i = skipSpace(raw, i)
			}
		case ']':
			return out, i + 1, nil
		default:
			return dst, i, badIDs(raw, start, "a token id, an integer from 0 on")
		}
	}
}

const (
	simdBlock      = 64            // bytes that wideIDs processes at a time
	maxIDsPerBlock = simdBlock / 2 // ids that may end in them
	// maxSIMDBlocks bounds the blocks processed by one call, during which the goroutine cannot be
	// preempted.
	maxSIMDBlocks = 1 << 10
)

// simdCarry describes the bytes before a block, the last one in the highest bit: digits, digits
// that are the second or fourth of a row, commas, and a 0 that begins a number. All zero: the block
// begins with an element. wideForm depends on the layout.
type simdCarry struct {
	_ [3]uint64 // digits, second digits, fourth digits
	_ [2]uint64 // commas, zeros
}

// wideIDs reads elements from raw[i] on, which has eight bytes before it, as long as they have the
// usual form: up to seven digits and a comma, with at most one space after it. The ends of the
// elements are found for a whole block, and blocks follow each other wherever elements end, so that
// no step depends on the one before. The last ids of a slice that is exactly large enough are read
// by the ordinary path. It returns the offset of the first element that it did not read, or of the
// space before it.
func wideIDs(out []uint32, raw []byte, i int) ([]uint32, int) {
	free := out[len(out):cap(out)]
	n := min((len(raw)-i-1)/simdBlock, maxSIMDBlocks)
	_ = raw[i-8 : i+n*simdBlock]
	blocks, ends, read := wideArray(&raw[i], n, unsafe.SliceData(free), len(free))
	if end := i + blocks*simdBlock; ends != 0 {
		i = end + bits.Len64(ends)
	} else if blocks > 0 {
		i = bytes.LastIndexByte(raw[i:end], ',') + i + 1
	}
	return out[:len(out)+read], i
}

// skipWide is skipIDs in blocks of 64 bytes.
func skipWide(b []byte, i int) int {
	start := i
	for p := (simdCarry{}); i+simdBlock <= len(b); i += simdBlock {
		wrong, ends, _ := wideForm(&b[i : i+simdBlock][0], &p)
		if wrong != 0 {
			ends &= wrong&-wrong - 1
		}
		if ends != 0 {
			start = i + bits.Len64(ends)
		}
		if wrong != 0 {
			break
		}
	}
	if start < len(b) && b[start] == ' ' {
		start++
	}
	return start
}

func endIDs(raw []byte, i int) error {
	if i = skipSpace(raw, i); i < len(raw) {
		return badIDs(raw, i, "nothing after the array")
	}
	return nil
}

func badIDs(raw []byte, i int, want string) error {
	return &SyntaxError{Offset: i, Got: unexpected(raw, i), Want: want}
}

// AppendTokenIDs appends ids as a JSON array.
func AppendTokenIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}
