package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
)

// BlockHash is the digest of a full block and of all blocks before it: equal hashes
// mean equal prefixes and equal salts.
type BlockHash [32]byte

// Uint64 returns the form that vLLM publishes by default: the last 8 bytes, big-endian.
func (h *BlockHash) Uint64() uint64 { return binary.BigEndian.Uint64(h[24:]) }

// Int64 returns the form that SGLang publishes: the first 8 bytes, big-endian, signed.
func (h *BlockHash) Int64() int64 { return int64(binary.BigEndian.Uint64(h[:8])) }

// noneHash is the parent of first blocks in vLLM >= 0.29 with sha256_cbor: the
// digest of the CBOR text "vllm-none-hash".
var noneHash = sync.OnceValue(func() BlockHash {
	return sha256.Sum256(append([]byte{0x60 + 14}, "vllm-none-hash"...))
})

// Hasher computes the hashes of one engine. It is not safe for concurrent use.
type Hasher struct {
	SGLang bool
	buf    []byte
}

// Block hashes the tokens of a block after parent. root says that there is no parent;
// only then is salt hashed, as in vLLM, where cache_salt is part of the first block.
func (h *Hasher) Block(parent *BlockHash, root bool, tokens []uint32, salt string) BlockHash {
	b := h.buf[:0]
	if h.SGLang {
		if !root {
			b = append(b, parent[:]...)
		} else if salt != "" {
			sum := sha256.Sum256([]byte(salt))
			b = append(b, sum[:]...)
		}
		for _, t := range tokens {
			b = binary.LittleEndian.AppendUint32(b, t)
		}
		h.buf = b
		return sha256.Sum256(b)
	}
	// vLLM 0.31+, sha256_cbor: (parent bytes, (tokens…), None or (("cache_salt", salt),)).
	p := parent
	if root {
		none := noneHash()
		p = &none
	}
	b = append(b, 0x83, 0x58, 32)
	b = append(b, p[:]...)
	b = cborHead(b, 0x80, uint64(len(tokens)))
	for _, t := range tokens {
		b = cborHead(b, 0, uint64(t))
	}
	if root && salt != "" {
		b = append(b, 0x81, 0x82, 0x60+10)
		b = append(b, "cache_salt"...)
		b = cborHead(b, 0x60, uint64(len(salt)))
		b = append(b, salt...)
	} else {
		b = append(b, 0xf6)
	}
	h.buf = b
	return sha256.Sum256(b)
}

// cborHead appends the shortest head of a CBOR item of the given major type.
func cborHead(b []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n < 1<<8:
		return append(b, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	case n < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, major|27), n)
}
