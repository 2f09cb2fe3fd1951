package nixl

import (
	"maps"
	"testing"
	"unsafe"

	"sluice/native/dl"
	nativenixl "sluice/native/nixl"
	"sluice/native/rings"
)

// TestLayout compares the Go mirrors with the C structs.
func TestLayout(t *testing.T) {
	c := rings.Layout()
	if c == nil {
		t.Skip("built without cgo: there is nothing to compare with")
	}
	maps.Copy(c, nativenixl.Layout())
	var h sharedHead
	var s slot
	for name, want := range map[string]uintptr{
		"shared":             unsafe.Sizeof(h),
		"shared.evtTail":     unsafe.Offsetof(h.evtTail),
		"shared.asleep":      unsafe.Offsetof(h.asleep),
		"shared.outstanding": unsafe.Offsetof(h.outstanding),
		"shared.busySince":   unsafe.Offsetof(h.busySince),
		"shared.stuck":       unsafe.Offsetof(h.stuck),
		"slot":               unsafe.Sizeof(s),
		"slot.arg":           unsafe.Offsetof(s.arg),
		"slot.data":          unsafe.Offsetof(s.data),
		"record":             recordBytes,
		"record.sequence":    56,
		"slot_cell":          unsafe.Sizeof(slotCell{}),
		"slot_cell.request":  unsafe.Offsetof(slotCell{}.request),
		"board":              boardHead,
		"transfer":           16,
		"desc":               24,
	} {
		if c[name] != want {
			t.Errorf("%s: %d in C, %d in Go", name, c[name], want)
		}
	}
	if n := dl.ABI(); n != 5 {
		t.Errorf("the C surface has version %d, want 5: compare the constants of driver.go with native/rings/rings.h", n)
	}
}
