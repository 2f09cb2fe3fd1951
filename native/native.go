//go:build cgo && linux

package native

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include <string.h>
#include "sluice_native.h"

static void *sluice_at(uint64_t a) { return (void *)(uintptr_t)a; }
static uint64_t sluice_address(const void *p) { return (uint64_t)(uintptr_t)p; }
*/
import "C"

import (
	"syscall"
	"time"
	"unsafe"
)

// ABI is the version of the C surface this binary was built with.
func ABI() int { return int(C.sluice_native_abi()) }

// Resident says whether the shared library soname is in this process already.
// It never loads anything; an empty name is not resident.
func Resident(soname string) bool {
	s := C.CString(soname)
	defer C.free(unsafe.Pointer(s))
	return C.sluice_native_resident(s) == 1
}

const whyLen = 4096

// Load loads libnixl_capi from path: a file, or a bare name for the loader's own
// search. It answers the code and either the resolved file or what was wrong. It
// lasts as long as the library's constructors do: seconds when cold, for ever when
// one of them hangs, so it belongs in a goroutine that may be left behind.
func Load(path string) (LoadCode, string) {
	p, why := C.CString(path), (*C.char)(C.malloc(whyLen))
	defer C.free(unsafe.Pointer(p))
	defer C.free(unsafe.Pointer(why))
	code := C.sluice_nixl_load(p, why, whyLen)
	return LoadCode(code), C.GoString(why)
}

// LoadUCX loads libucp from path, or takes the one that is in the process already,
// which path must then name too; an empty path takes that one alone. It answers,
// and may hang, as Load does.
func LoadUCX(path string) (LoadCode, string) {
	p, why := C.CString(path), (*C.char)(C.malloc(whyLen))
	defer C.free(unsafe.Pointer(p))
	defer C.free(unsafe.Pointer(why))
	code := C.sluice_ucx_load(p, why, whyLen)
	return LoadCode(code), C.GoString(why)
}

// UCXEnvironment sets, in the C environment, what UCX must be told before its
// first load, and remembers the process's signal handlers. Load does both too.
func UCXEnvironment() {
	C.sluice_ucx_environment()
	C.sluice_signals_remember()
}

// RestoreSignals puts back each signal handler that a shared library has taken
// since it was remembered, and answers them as a bit set of signal numbers.
func RestoreSignals() uint64 { return uint64(C.sluice_signals_restore()) }

// Environment is the C environment's value of a variable, which Go's need not be.
func Environment(name string) (string, bool) {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	v := C.getenv(n)
	if v == nil {
		return "", false
	}
	return C.GoString(v), true
}

// UCXVersion asks the libucp that is resident at path for its version.
func UCXVersion(path string) (major, minor, patch int, ok bool) {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var a, b, c C.uint
	if C.sluice_ucx_version(p, &a, &b, &c) == 0 {
		return 0, 0, 0, false
	}
	return int(a), int(b), int(c), true
}

// StartAgent starts the thread that owns a NIXL agent over a shared block: the
// head (struct sluice_shared), commands slots, events slots, and spill bytes for each
// slot (0: payloads that do not fit are allocated). The block and both descriptors must
// stay until the head's gone is 1.
func StartAgent(shared unsafe.Pointer, commands, events, spill uint32, wakeFD, eventFD int, pace Pace) error {
	p := C.struct_sluice_pace{
		spin_ns: C.uint64_t(pace.Spin / time.Nanosecond),
		busy_ns: C.uint64_t(pace.Busy / time.Nanosecond),
		idle_ns: C.uint64_t(pace.Idle / time.Nanosecond),
	}
	e := C.sluice_agent_start((*C.struct_sluice_shared)(shared), C.uint32_t(commands), C.uint32_t(events), C.uint32_t(spill), C.int(wakeFD), C.int(eventFD), &p)
	if e != 0 {
		return syscall.Errno(e)
	}
	return nil
}

// UCX is a worker of the loaded libucp over a shared block, as StartAgent's.
type UCX struct{ worker unsafe.Pointer }

// NewUCX makes a worker; ok is false when memory lacks or no libucp is loaded.
// eventFD wakes a reader of events elsewhere; -1 where the one who steps reads them.
func NewUCX(shared unsafe.Pointer, commands, events, spill uint32, eventFD int) (u UCX, ok bool) {
	u.worker = C.sluice_ucx_new((*C.struct_sluice_shared)(shared), C.uint32_t(commands), C.uint32_t(events), C.uint32_t(spill), C.int(eventFD))
	return u, u.worker != nil
}

// Step works a bounded while and says what is next; after UCXStopped the worker is no
// more. One caller at a time.
func (u UCX) Step() UCXNext { return UCXNext(C.sluice_ucx_step(u.worker)) }

// FD is the descriptor of the open worker, its own; -1 before.
func (u UCX) FD() int { return int(C.sluice_ucx_fd(u.worker)) }

// Give copies data into memory from malloc and answers its address; 0 when memory
// lacks. The one who reads it frees it.
func Give(data []byte) uint64 {
	p := C.sluice_alloc(C.size_t(len(data)))
	if p == nil {
		return 0
	}
	if len(data) > 0 {
		C.memcpy(p, unsafe.Pointer(&data[0]), C.size_t(len(data)))
	}
	return uint64(C.sluice_address(p))
}

// Take copies n bytes from an address that Give or the agent's thread made, and
// frees it.
func Take(address uint64, n int) []byte {
	p := C.sluice_at(C.uint64_t(address))
	b := C.GoBytes(p, C.int(n))
	C.sluice_free(p)
	return b
}

// Layout names the sizes and offsets of the C structs that Go mirrors.
func Layout() map[string]uintptr {
	var s C.struct_sluice_shared
	var slot C.struct_sluice_slot
	var r C.struct_sluice_record
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
		"record":             unsafe.Sizeof(r),
		"record.sequence":    unsafe.Offsetof(r.sequence),
		"ticket":             unsafe.Sizeof(C.struct_sluice_ticket{}),
		"ticket.request":     unsafe.Offsetof(C.struct_sluice_ticket{}.request),
		"board":              unsafe.Sizeof(C.struct_sluice_board{}),
		"transfer":           unsafe.Sizeof(C.struct_sluice_transfer{}),
		"desc":               unsafe.Sizeof(C.struct_sluice_desc{}),
	}
}
