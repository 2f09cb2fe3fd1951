package blockhash

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// Local identifies the tokens of one block, independent of the blocks before it: XXH3-64 of its
// tokens as 32-bit little-endian integers.
type Local uint64

// The seeds give other content than plain tokens different hashes for the same bytes.
const (
	textSeed = 0x7465787420626c6b
	tagSeed  = 0x7461672065787472
)

// littleEndian reports whether tokens in memory have the byte order that is hashed.
var littleEndian = func() bool {
	one := [2]byte{1, 0}
	return *(*uint16)(unsafe.Pointer(&one)) == 1
}()

// Locals appends the local hash of every full block of tokens to dst. blockSize is in tokens; if it
// is not positive, nothing is appended.
func Locals(dst []Local, tokens []uint32, blockSize int) []Local {
	if blockSize <= 0 {
		return dst
	}
	for len(tokens) >= blockSize {
		dst = append(dst, localOf(tokens[:blockSize]))
		tokens = tokens[blockSize:]
	}
	return dst
}

// Tagged returns the local hash of a block whose KV depends on more than its tokens, such as an
// image, which tag identifies. A tagged hash never equals an untagged one. Tags may be nested;
// their order matters.
func Tagged(l Local, tag []byte) Local {
	return Local(mix(uint64(l) ^ bits.RotateLeft64(xxh3.HashSeed(tag, tagSeed), 17)))
}

func localOf(block []uint32) Local {
	if littleEndian {
		return Local(xxh3.Hash(unsafe.Slice((*byte)(unsafe.Pointer(&block[0])), 4*len(block))))
	}
	return localPortable(block)
}

// localPortable hashes the same bytes on a machine of any byte order.
func localPortable(block []uint32) Local {
	var stack [512]byte
	b := stack[:0]
	for _, t := range block {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return Local(xxh3.Hash(b))
}
