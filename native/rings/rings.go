//go:build cgo && linux

package rings

/*
#cgo CFLAGS: -I${SRCDIR}/.. -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#include <string.h>
#include "rings/rings.h"

static void *sluice_at(uint64_t a) { return (void *)(uintptr_t)a; }
static uint64_t sluice_address(const void *p) { return (uint64_t)(uintptr_t)p; }
*/
import "C"

import "unsafe"

// CopyToC copies data into memory from malloc and returns its address, or 0 if
// memory is exhausted. The reader of the slot that carries the address frees it.
func CopyToC(data []byte) uint64 {
	p := C.sluice_alloc(C.size_t(len(data)))
	if p == nil {
		return 0
	}
	if len(data) > 0 {
		C.memcpy(p, unsafe.Pointer(&data[0]), C.size_t(len(data)))
	}
	return uint64(C.sluice_address(p))
}

// TakeFromC copies n bytes from an address that CopyToC or a driver allocated, and
// frees the memory there.
func TakeFromC(address uint64, n int) []byte {
	p := C.sluice_at(C.uint64_t(address))
	b := C.GoBytes(p, C.int(n))
	C.sluice_free(p)
	return b
}

// Layout returns the sizes and offsets of the C structs that Go mirrors, by name.
func Layout() map[string]uintptr {
	var s C.struct_sluice_shared
	var slot C.struct_sluice_slot
	return map[string]uintptr{
		"shared":             unsafe.Sizeof(s),
		"shared.evtTail":     unsafe.Offsetof(s.evt_tail),
		"shared.asleep":      unsafe.Offsetof(s.asleep),
		"shared.outstanding": unsafe.Offsetof(s.outstanding),
		"shared.busySince":   unsafe.Offsetof(s.busy_since),
		"shared.stuck":       unsafe.Offsetof(s.stuck),
		"slot":               unsafe.Sizeof(slot),
		"slot.arg":           unsafe.Offsetof(slot.arg),
		"slot.data":          unsafe.Offsetof(slot.data),
	}
}
