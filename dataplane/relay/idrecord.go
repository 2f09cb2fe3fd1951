package relay

import "encoding/binary"

// A record stands in the place of an event that tells token ids and nothing else, where
// the client is a part of this program (Transcript.Records): what a Transcript has found
// in an event its client need not find once more. It stands where an event could, whole,
// in the stream's framing:
//
//	1 byte   0, with which no event begins
//	4 bytes  how many ids follow, little-endian
//	4 bytes  each of them, likewise
const (
	idRecordMark   = 0
	idRecordHeader = 5
)

func appendIDRecord(dst []byte, ids []uint32) []byte {
	dst = binary.LittleEndian.AppendUint32(append(dst, idRecordMark), uint32(len(ids)))
	for _, id := range ids {
		dst = binary.LittleEndian.AppendUint32(dst, id)
	}
	return dst
}

// idRecordLen is the length of the record that p begins with, 0 where it begins with none.
func idRecordLen(p []byte) int {
	if len(p) < idRecordHeader || p[0] != idRecordMark {
		return 0
	}
	if n := idRecordHeader + 4*int64(binary.LittleEndian.Uint32(p[1:])); n <= int64(len(p)) {
		return int(n)
	}
	return 0
}

// ParseIDRecord gives the ids of the record that p begins with, as they stand in it, 4 bytes
// each, and its length; 0 where p begins with none.
func ParseIDRecord(p []byte) (ids []byte, n int) {
	if n = idRecordLen(p); n > 0 {
		ids = p[idRecordHeader:n]
	}
	return ids, n
}
