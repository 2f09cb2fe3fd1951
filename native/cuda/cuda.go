//go:build cgo && linux

package cuda

/*
#cgo CFLAGS: -I${SRCDIR}/.. -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "cuda/cuda.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"sluice/native/dl"
)

// Devices returns the number of GPUs of the CUDA driver, or why the driver cannot
// be used.
func Devices() (int, error) {
	var n C.int
	why := (*C.char)(C.calloc(1, dl.ReasonSize))
	defer C.free(unsafe.Pointer(why))
	if r := C.sluice_cuda_count(&n, why, dl.ReasonSize); r != 0 {
		return 0, fmt.Errorf("cuda: cannot use the driver: %s", C.GoString(why))
	}
	return int(n), nil
}

// Open retains the device's primary context for the life of the process and returns
// the driver's version (12040 is 12.4).
func Open(device int) (int, error) {
	why := (*C.char)(C.calloc(1, dl.ReasonSize))
	defer C.free(unsafe.Pointer(why))
	if r := C.sluice_cuda_open(C.int(device), why, dl.ReasonSize); r != 0 {
		return 0, fmt.Errorf("cuda: cannot open device %d: %s", device, C.GoString(why))
	}
	var v C.int
	if r := C.sluice_cuda_driver(&v); r != 0 {
		return 0, fmt.Errorf("cuda: cannot read the driver's version: CUresult %d", -r)
	}
	return int(v), nil
}

// Alloc allocates bytes on an open device.
func Alloc(device, bytes int) (uint64, error) {
	var a C.uint64_t
	if r := C.sluice_cuda_alloc(C.int(device), C.size_t(bytes), &a); r != 0 {
		return 0, fmt.Errorf("cuda: cannot allocate %d bytes on device %d: CUresult %d", bytes, device, -r)
	}
	return uint64(a), nil
}

// Free frees memory that Alloc allocated.
func Free(device int, address uint64) error {
	if r := C.sluice_cuda_free(C.int(device), C.uint64_t(address)); r != 0 {
		return fmt.Errorf("cuda: cannot free memory of device %d: CUresult %d", device, -r)
	}
	return nil
}

// Write copies b to an address on the device and returns when the bytes are there.
func Write(device int, to uint64, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if r := C.sluice_cuda_write(C.int(device), C.uint64_t(to), unsafe.Pointer(&b[0]), C.size_t(len(b))); r != 0 {
		return fmt.Errorf("cuda: cannot copy %d bytes to device %d: CUresult %d", len(b), device, -r)
	}
	return nil
}

// Read fills b from an address on the device.
func Read(device int, b []byte, from uint64) error {
	if len(b) == 0 {
		return nil
	}
	if r := C.sluice_cuda_read(C.int(device), unsafe.Pointer(&b[0]), C.uint64_t(from), C.size_t(len(b))); r != 0 {
		return fmt.Errorf("cuda: cannot copy %d bytes from device %d: CUresult %d", len(b), device, -r)
	}
	return nil
}
