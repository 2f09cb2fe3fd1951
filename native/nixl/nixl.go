//go:build cgo && linux

package nixl

/*
#cgo CFLAGS: -I${SRCDIR}/.. -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "nixl/nixl.h"
*/
import "C"

import (
	"syscall"
	"time"
	"unsafe"

	_ "sluice/native/cuda" // its C code is called by this package's
	"sluice/native/dl"
	_ "sluice/native/rings"
	_ "sluice/native/ucx"
)

// Load loads libnixl_capi from path: a file, or a bare name for the loader's own
// search. It returns the outcome, and the resolved file or the reason of a failure.
// It returns when the library's constructors have run. That takes seconds from a cold
// disk, and never ends if one of them hangs, so call it in a goroutine that can be
// abandoned.
func Load(path string) (dl.LoadCode, string) {
	p, why := C.CString(path), (*C.char)(C.malloc(dl.ReasonSize))
	defer C.free(unsafe.Pointer(p))
	defer C.free(unsafe.Pointer(why))
	code := C.sluice_nixl_load(p, why, dl.ReasonSize)
	return dl.LoadCode(code), C.GoString(why)
}

// StartAgent starts the thread that owns a NIXL agent over a shared block: the head
// (struct sluice_shared), the command slots, the event slots, and spill bytes for each
// slot (0: payloads that do not fit are allocated). The block and both descriptors must
// exist until the head's gone is 1. It fails with ENOENT if no NIXL is loaded.
func StartAgent(shared unsafe.Pointer, commands, events, spill uint32, wakeFD, eventFD int, poll PollIntervals) error {
	p := C.struct_sluice_poll_intervals{
		spin_ns: C.uint64_t(poll.Spin / time.Nanosecond),
		busy_ns: C.uint64_t(poll.Busy / time.Nanosecond),
		idle_ns: C.uint64_t(poll.Idle / time.Nanosecond),
	}
	e := C.sluice_agent_start((*C.struct_sluice_shared)(shared), C.uint32_t(commands), C.uint32_t(events), C.uint32_t(spill), C.int(wakeFD), C.int(eventFD), &p)
	if e != 0 {
		return syscall.Errno(e)
	}
	return nil
}

// Layout returns the sizes and offsets of the C structs that Go mirrors, by name.
func Layout() map[string]uintptr {
	var r C.struct_sluice_record
	return map[string]uintptr{
		"record":            unsafe.Sizeof(r),
		"record.sequence":   unsafe.Offsetof(r.sequence),
		"slot_cell":         unsafe.Sizeof(C.struct_sluice_slot_cell{}),
		"slot_cell.request": unsafe.Offsetof(C.struct_sluice_slot_cell{}.request),
		"board":             unsafe.Sizeof(C.struct_sluice_board{}),
		"transfer":          unsafe.Sizeof(C.struct_sluice_transfer{}),
		"desc":              unsafe.Sizeof(C.struct_sluice_desc{}),
	}
}
