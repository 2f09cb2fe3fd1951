//go:build cgo && linux

package dl

/*
#cgo CFLAGS: -I${SRCDIR}/.. -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "dl/dl.h"
*/
import "C"

import "unsafe"

// ABI returns the version of the C surface that this binary was built with.
func ABI() int { return int(C.sluice_native_abi()) }

// Resident reports whether the shared library soname is mapped into this process.
// It loads nothing. It returns false for an empty name.
func Resident(soname string) bool {
	s := C.CString(soname)
	defer C.free(unsafe.Pointer(s))
	return C.sluice_dl_resident(s) == 1
}

// RememberSignals saves the signal handlers of the process for RestoreSignals.
// Only the first call has an effect.
func RememberSignals() { C.sluice_signals_remember() }

// RestoreSignals restores each signal handler that a shared library has replaced
// since RememberSignals. It returns the bit set of the restored signal numbers.
func RestoreSignals() uint64 { return uint64(C.sluice_signals_restore()) }

// Environment returns a variable of the C environment, which can differ from Go's.
func Environment(name string) (string, bool) {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	v := C.getenv(n)
	if v == nil {
		return "", false
	}
	return C.GoString(v), true
}
