package schedule

import (
	"testing"
	"unsafe"
)

// TestRecordSize: there are as many records as streams, up to what the ring holds, and all
// of them are touched once it has gone round.
func TestRecordSize(t *testing.T) {
	if size := unsafe.Sizeof(record{}); size > 120 {
		t.Errorf("a record has %d bytes", size)
	}
	if size := unsafe.Sizeof(Reservation{}); size > 144 {
		t.Errorf("a reservation has %d bytes; a size class ends at 144", size)
	}
}

// TestRecordClips: what an engine says of tokens may be any number.
func TestRecordClips(t *testing.T) {
	var r record
	r.end(&Outcome{Status: 200, CachedTokens: -1, PromptTokens: 1 << 40, OutputTokens: 7})
	if o := r.outcome; !r.ended || o.status != 200 || o.cached != -1 || o.prompt != 1<<31-1 || o.output != 7 {
		t.Errorf("%+v", o)
	}
}
