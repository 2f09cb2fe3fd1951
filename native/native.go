//go:build cgo && linux

package native

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "sluice_native.h"
*/
import "C"

import "unsafe"

// ABI is the version of the C surface this binary was built with.
func ABI() int { return int(C.sluice_native_abi()) }

// Resident says whether the shared library soname is in this process already.
// It never loads anything; an empty name is not resident.
func Resident(soname string) bool {
	s := C.CString(soname)
	defer C.free(unsafe.Pointer(s))
	return C.sluice_native_resident(s) == 1
}
