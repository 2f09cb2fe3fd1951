package blockhash

import (
	"math/bits"

	"github.com/zeebo/xxh3"
)

// Seq identifies a block and all blocks before it. It is the key of the index.
type Seq uint64

// Salt separates prompts that share tokens but not KV: see NewSalt.
type Salt uint64

// NewSalt returns the salt of a model, a LoRA adapter name and a cache salt; the empty string means
// none. Different triples have different salts: each name seeds the hash of the next, so moving a
// character from one to its neighbour changes the result.
func NewSalt(model, lora, cacheSalt string) Salt {
	s := xxh3.HashStringSeed(model, 1)
	s = xxh3.HashStringSeed(lora, mix(s))
	return Salt(xxh3.HashStringSeed(cacheSalt, mix(s)))
}

// Next returns the sequence hash of a block after parent.
func Next(parent Seq, l Local) Seq {
	return Seq(mix(uint64(parent) ^ bits.RotateLeft64(uint64(l), 31)))
}

// First returns the sequence hash of a prompt's first block.
func First(salt Salt, l Local) Seq { return Next(Seq(salt), l) }

// Seqs appends the sequence hash of every full block of tokens to dst, in one pass; the result is
// that of Locals, First and Next together. It allocates only to grow dst.
func Seqs(dst []Seq, salt Salt, tokens []uint32, blockSize int) []Seq {
	if blockSize <= 0 {
		return dst
	}
	if blockSize == 16 {
		return seqs16(dst, uint64(salt), tokens)
	}
	h := Seq(salt)
	for len(tokens) >= blockSize {
		h = Next(h, localOf(tokens[:blockSize]))
		dst = append(dst, h)
		tokens = tokens[blockSize:]
	}
	return dst
}

// ContinueSeqs is Seqs for tokens of which the first blocks are hashed: dst[from:] has their sequence
// hashes, with the same salt and block size, and gets those of the other full blocks.
func ContinueSeqs(dst []Seq, from int, salt Salt, tokens []uint32, blockSize int) []Seq {
	if len(dst) > from && blockSize > 0 {
		salt, tokens = Salt(dst[len(dst)-1]), tokens[(len(dst)-from)*blockSize:]
	}
	return Seqs(dst, salt, tokens, blockSize)
}

// TextSeqs is Seqs over raw bytes, for text mode, in blocks of blockBytes bytes. Text and tokens
// never have equal hashes.
func TextSeqs(dst []Seq, salt Salt, text []byte, blockBytes int) []Seq {
	if blockBytes <= 0 {
		return dst
	}
	h := Seq(salt)
	for len(text) >= blockBytes {
		h = Next(h, Local(xxh3.HashSeed(text[:blockBytes], textSeed)))
		dst = append(dst, h)
		text = text[blockBytes:]
	}
	return dst
}

// mix is the finaliser of splitmix64: a bijection, so a chain loses no information.
func mix(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return z ^ (z >> 31)
}
