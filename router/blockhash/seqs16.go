package blockhash

import (
	"math/bits"
	"slices"
)

// seqs16 is Seqs for blocks of 16 tokens, the most common size. XXH3-64 of 64 bytes (xxh3.h,
// XXH3_len_17to128_64b) is inlined in the loop: a block's products are computed while the chain
// waits for the previous ones, and there is no call. Two tokens are one little-endian word of the
// input on a machine of any byte order.
func seqs16(dst []Seq, h uint64, tokens []uint32) []Seq {
	dst = slices.Grow(dst, len(tokens)/16)
	for len(tokens) >= 16 {
		b := (*[16]uint32)(tokens)
		l := uint64(lenAcc)
		l += mulFold(packTokens(b[0], b[1])^0xbe4ba423396cfeb8, packTokens(b[2], b[3])^0x1cad21f72c81017c)
		l += mulFold(packTokens(b[12], b[13])^0xdb979083e96dd4de, packTokens(b[14], b[15])^0x1f67b3b7a4a44072)
		l += mulFold(packTokens(b[4], b[5])^0x78e5c0cc4ee679cb, packTokens(b[6], b[7])^0x2172ffcc7dd05a82)
		l += mulFold(packTokens(b[8], b[9])^0x8e2443f7744608b8, packTokens(b[10], b[11])^0x4c263a81e69035e0)
		l = (l ^ l>>37) * 0x165667919E3779F9
		l ^= l >> 32
		h = mix(h ^ bits.RotateLeft64(l, 31)) // Next
		dst = append(dst, Seq(h))
		tokens = tokens[16:]
	}
	return dst
}

// lenAcc is the initial value of XXH3 for 64 bytes: 64 times its first 64-bit prime.
const lenAcc = 64 * 0x9E3779B185EBCA87 % (1 << 64)

func packTokens(a, b uint32) uint64 { return uint64(a) | uint64(b)<<32 }

func mulFold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}
