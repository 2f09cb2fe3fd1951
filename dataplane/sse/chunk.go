package sse

import "strconv"

// ChunkHeaderSize is the space that FrameChunk needs for a chunk's size and its line end.
const ChunkHeaderSize = 16 + len("\r\n")

// FrameChunk makes a chunk in place of b[ChunkHeaderSize:] and returns where the chunk begins. An
// empty payload makes no chunk.
func FrameChunk(b []byte) (framed []byte, from int) {
	n := len(b) - ChunkHeaderSize
	if n == 0 {
		return b, ChunkHeaderSize
	}
	var digits [16]byte
	size := strconv.AppendUint(digits[:0], uint64(n), 16)
	from = ChunkHeaderSize - len(size) - len("\r\n")
	copy(b[from:], size)
	copy(b[ChunkHeaderSize-2:], "\r\n")
	return append(b, "\r\n"...), from
}

// AppendChunk appends payload, which must not be empty, as one chunk.
func AppendChunk(dst, payload []byte) []byte {
	dst = strconv.AppendInt(dst, int64(len(payload)), 16)
	dst = append(dst, "\r\n"...)
	dst = append(dst, payload...)
	return append(dst, "\r\n"...)
}

// LastChunk ends a chunked body without trailers.
const LastChunk = "0\r\n\r\n"
