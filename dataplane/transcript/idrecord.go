package transcript

import "encoding/binary"

// A record replaces an event that carries only token ids where the client is a part of this program
// (Transcript.Records), so that it need not parse the event again. It stands in place of a whole
// event, in the stream's chunk framing:
//
//	1 byte   0, with which no event begins
//	4 bytes  the number of ids, little-endian
//	4 bytes  each id, little-endian
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

// idRecordLen returns the length of the record at the beginning of p; 0: there is none.
func idRecordLen(p []byte) int {
	if len(p) < idRecordHeader || p[0] != idRecordMark {
		return 0
	}
	if n := idRecordHeader + 4*int64(binary.LittleEndian.Uint32(p[1:])); n <= int64(len(p)) {
		return int(n)
	}
	return 0
}

// ParseIDRecord returns the ids of the record at the beginning of p, 4 little-endian bytes each,
// borrowed from p, and the length of the record; 0: there is none.
func ParseIDRecord(p []byte) (ids []byte, n int) {
	if n = idRecordLen(p); n > 0 {
		ids = p[idRecordHeader:n]
	}
	return ids, n
}
