package nixl

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"time"
	"unsafe"
)

// A record reports the end of one transfer: 64 bytes, little endian. It is
// written into a slot of a CompletionBoard by a one-sided WRITE.
//
//	 0  u32  version       0x01424c53, "SLB" and 1
//	 4  i32  status        0 the KV is there; otherwise the writer's code
//	 8  u64  nonce         of the CompletionSlot
//	16  u64  request       of the CompletionSlot
//	24  u64  bytes         moved
//	32  u64  microseconds  that took
//	40  u32  worker        the writer's number of itself
//	44  u32  rank
//	48  u64  check         exclusive or of the other seven words
//	56  u64  sequence      of the CompletionSlot; last, so that it lands last
const (
	recordBytes   = 64
	recordVersion = 0x01424c53
)

// Completion is the end of one transfer, as the writer of the record saw it.
type Completion struct {
	Request      uint64
	Worker, Rank uint32
	Status       int32 // 0: the KV is there
	Bytes        uint64
	Duration     time.Duration // resolution: microseconds
}

// CompletionSlot is a slot lent to one request. Nonce proves that the writer received
// it.
type CompletionSlot struct {
	Index    uint32
	Sequence uint64
	Nonce    uint64
	Request  uint64
}

// rawRecord is a record in memory.
type rawRecord [8]uint64

func (t CompletionSlot) encode(c Completion) rawRecord {
	w := rawRecord{
		recordVersion | uint64(uint32(c.Status))<<32, t.Nonce, c.Request, c.Bytes,
		uint64(max(0, c.Duration.Microseconds())), uint64(c.Worker) | uint64(c.Rank)<<32, 0, t.Sequence,
	}
	w[6] = w.check()
	return w
}

// rawRecordOf parses the bytes of a record.
func rawRecordOf(b []byte) (w rawRecord) {
	for i := range w {
		w[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return w
}

func (w *rawRecord) check() uint64 { return w[0] ^ w[1] ^ w[2] ^ w[3] ^ w[4] ^ w[5] ^ w[7] }

func (w *rawRecord) completion() Completion {
	return Completion{
		Request: w[2], Worker: uint32(w[5]), Rank: uint32(w[5] >> 32), Status: int32(uint32(w[0] >> 32)),
		Bytes: w[3], Duration: time.Duration(min(w[4], 1<<50)) * time.Microsecond,
	}
}

// Reasons why a record is rejected.
var (
	ErrRecord = errors.New("nixl: the record is incomplete or damaged")              // version, check or length
	ErrLate   = errors.New("nixl: the record's completion slot has a later request") // an older sequence
	ErrForged = errors.New("nixl: the record does not match its completion slot")
)

// verify compares a record with the CompletionSlot of its slot.
func (w *rawRecord) verify(t CompletionSlot) error {
	switch {
	case uint32(w[0]) != recordVersion || w[6] != w.check():
		return ErrRecord
	case w[7] < t.Sequence:
		return ErrLate
	case w[7] != t.Sequence || w[1] != t.Nonce || w[2] != t.Request:
		return ErrForged
	}
	return nil
}

// load reads a slot while a network card may write to it: sequence first, then the
// rest. A torn record fails its check.
func (w *rawRecord) load(slot *[8]atomic.Uint64) {
	w[7] = slot[7].Load()
	for i := range 7 {
		w[i] = slot[i].Load()
	}
}

// Record returns the completion as the bytes to write to the slot.
func (t CompletionSlot) Record(c Completion) [recordBytes]byte {
	w := t.encode(c)
	var b [recordBytes]byte
	for i, v := range w {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	return b
}

// slotsOf returns slots over mapped memory.
func slotsOf(b []byte) [][8]atomic.Uint64 {
	return unsafe.Slice((*[8]atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/recordBytes)
}
