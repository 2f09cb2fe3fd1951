//go:build cgo && linux

package ucx

/*
#cgo CFLAGS: -I${SRCDIR}/.. -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "ucx/ucx.h"
*/
import "C"

import (
	"unsafe"

	"sluice/native/dl"
	_ "sluice/native/rings" // its C code is called by this package's
)

// Load loads libucp from path. If a libucp is mapped into the process already, that
// one is used; path must then be empty or name the same file. With an empty path only
// a mapped one is used. The results, and that the call may hang, are those of
// nixl.Load.
func Load(path string) (dl.LoadCode, string) {
	p, why := C.CString(path), (*C.char)(C.malloc(dl.ReasonSize))
	defer C.free(unsafe.Pointer(p))
	defer C.free(unsafe.Pointer(why))
	code := C.sluice_ucx_load(p, why, dl.ReasonSize)
	return dl.LoadCode(code), C.GoString(why)
}

// SetEnvironment sets, in the C environment, the variables that keep UCX from
// installing signal handlers and patching libc when it is first loaded. Load and
// nixl.Load call it too.
func SetEnvironment() { C.sluice_ucx_environment() }

// Version returns the version of the libucp that is loaded from path.
func Version(path string) (major, minor, patch int, ok bool) {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var a, b, c C.uint
	if C.sluice_ucx_version(p, &a, &b, &c) == 0 {
		return 0, 0, 0, false
	}
	return int(a), int(b), int(c), true
}

// Worker is a UCP worker of the loaded libucp over a shared block, as of
// nixl.StartAgent.
type Worker struct{ worker unsafe.Pointer }

// NewWorker makes a worker. It returns false if memory is exhausted or no libucp is
// loaded. eventFD wakes a reader of events in another thread; it is -1 if the caller
// of Step reads them.
func NewWorker(shared unsafe.Pointer, commands, events, spill uint32, eventFD int) (w Worker, ok bool) {
	w.worker = C.sluice_ucx_new((*C.struct_sluice_shared)(shared), C.uint32_t(commands), C.uint32_t(events), C.uint32_t(spill), C.int(eventFD))
	return w, w.worker != nil
}

// Step works for a bounded time and returns what to do next. After Stopped the worker
// is freed. Only one goroutine may call it at a time.
func (w Worker) Step() Next { return Next(C.sluice_ucx_step(w.worker)) }

// FD returns the event descriptor of the open worker, which owns it; -1 before.
func (w Worker) FD() int { return int(C.sluice_ucx_fd(w.worker)) }
