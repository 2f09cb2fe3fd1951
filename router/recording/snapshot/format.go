package snapshot

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"

	"sluice/router/blockhash"
	"sluice/router/kvevents"
	"sluice/router/kvindex"
)

// A snapshot is a header, sections and an end section. The header is magic, the version as 16
// bits little-endian, and six zero bytes. A section is
//
//	kind     1 byte: rankSection, chainsSection or endSection
//	zeros    3 bytes
//	length   4 bytes, little-endian, of the body
//	checksum 8 bytes, little-endian: XXH3-64 of the body
//	body
//
// The body of a rank section is a Meta as JSON. The body of a chains section is one zstd frame
// with chains of the preceding rank. The body of the end section is the XXH3-64 of everything
// before it.
const (
	magic           = "SLUICEKV"
	version         = 1
	headerSize      = 16
	sectionHead     = 16
	maxSection      = 64 << 20
	maxUncompressed = 64 << 20
	// sectionBytes is the approximate size of a section before compression.
	sectionBytes = 1 << 20
)

const (
	rankSection byte = iota + 1
	chainsSection
	endSection
)

// Errors of Open, wrapped with the file's name and the cause.
var (
	ErrFormat    = errors.New("this is not a snapshot of sluice's index")
	ErrVersion   = errors.New("its version is not supported")
	ErrTruncated = errors.New("it is truncated")
	ErrCorrupted = errors.New("it is corrupt")
)

// Meta identifies the rank that holds the blocks and the position of its feed.
type Meta struct {
	Worker   string            `json:"worker"`
	Rank     uint16            `json:"rank"`
	Model    string            `json:"model"` // the hashes are salted with it
	Engine   string            `json:"engine"`
	Blocks   int               `json:"blocks"` // blocks held when the snapshot was written; a hint
	Position kvevents.Position `json:"position"`
}

func fileHeader() []byte {
	h := append(make([]byte, 0, headerSize), magic...)
	h = binary.LittleEndian.AppendUint16(h, version)
	return h[:headerSize]
}

func checkHeader(h []byte) error {
	if len(h) < len(magic) || string(h[:len(magic)]) != magic {
		return fmt.Errorf("%w: it does not begin with %q", ErrFormat, magic)
	}
	if len(h) < headerSize {
		return fmt.Errorf("%w: it has %d bytes; the header alone has %d", ErrTruncated, len(h), headerSize)
	}
	if v := binary.LittleEndian.Uint16(h[len(magic):]); v != version {
		return fmt.Errorf("%w: it has version %d; want %d", ErrVersion, v, version)
	}
	return nil
}

// section appends a section.
func section(dst []byte, kind byte, body []byte) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, sectionHead)...)
	dst = append(dst, body...)
	return finishSection(dst, at, kind)
}

// appendChains appends a section of compressed chains.
func appendChains(dst []byte, enc *zstd.Encoder, chains []byte) []byte {
	at := len(dst)
	dst = enc.EncodeAll(chains, append(dst, make([]byte, sectionHead)...))
	return finishSection(dst, at, chainsSection)
}

func finishSection(dst []byte, at int, kind byte) []byte {
	head, body := dst[at:at+sectionHead], dst[at+sectionHead:]
	head[0] = kind
	binary.LittleEndian.PutUint32(head[4:], uint32(len(body)))
	binary.LittleEndian.PutUint64(head[8:], xxh3.Hash(body))
	return dst
}

// readSectionHead parses the head of a section.
func readSectionHead(h []byte) (kind byte, size int, sum uint64, err error) {
	n := binary.LittleEndian.Uint32(h[4:])
	if kind = h[0]; kind < rankSection || kind > endSection || h[1]|h[2]|h[3] != 0 || n > maxSection {
		return 0, 0, 0, fmt.Errorf("%w: the header of a section is invalid", ErrCorrupted)
	}
	return kind, int(n), binary.LittleEndian.Uint64(h[8:]), nil
}

func appendMeta(dst []byte, m *Meta) []byte {
	b, err := json.Marshal(m)
	if err != nil { // impossible for this type
		panic(err)
	}
	return section(dst, rankSection, b)
}

func readMeta(body []byte) (m Meta, err error) {
	if err := json.Unmarshal(body, &m); err != nil || m.Worker == "" {
		return m, fmt.Errorf("%w: cannot parse the section of a rank", ErrCorrupted)
	}
	return m, nil
}

func appendChain(b []byte, x *kvindex.Exported) []byte {
	parent := byte(0)
	if x.HasParent {
		parent = 1
	}
	b = append(b, byte(x.Tier), parent)
	b = binary.LittleEndian.AppendUint64(b, uint64(x.Parent))
	b = binary.LittleEndian.AppendUint64(b, uint64(x.ParentSeq))
	b = binary.AppendUvarint(b, uint64(len(x.Engine)))
	for _, h := range x.Engine {
		b = binary.LittleEndian.AppendUint64(b, uint64(h))
	}
	for _, s := range x.Seqs {
		b = binary.LittleEndian.AppendUint64(b, uint64(s))
	}
	return b
}

// readChain parses one chain of b and reuses the slices of x.
func readChain(b []byte, x *kvindex.Exported) (rest []byte, err error) {
	bad := fmt.Errorf("%w: a chain of blocks ends too early", ErrCorrupted)
	if len(b) < 18 || b[0] >= byte(kvindex.NumTiers) || b[1] > 1 {
		return nil, bad
	}
	x.Tier, x.HasParent = kvindex.Tier(b[0]), b[1] == 1
	x.Parent = kvindex.EngineHash(binary.LittleEndian.Uint64(b[2:]))
	x.ParentSeq = blockhash.Seq(binary.LittleEndian.Uint64(b[10:]))
	n, size := binary.Uvarint(b[18:])
	if size <= 0 || n > math.MaxInt32 || uint64(len(b)-18-size) < 16*n {
		return nil, bad
	}
	b = b[18+size:]
	x.Engine, x.Seqs = x.Engine[:0], x.Seqs[:0]
	for i := range int(n) {
		x.Engine = append(x.Engine, kvindex.EngineHash(binary.LittleEndian.Uint64(b[8*i:])))
	}
	b = b[8*n:]
	for i := range int(n) {
		x.Seqs = append(x.Seqs, blockhash.Seq(binary.LittleEndian.Uint64(b[8*i:])))
	}
	return b[8*n:], nil
}
