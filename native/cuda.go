//go:build cgo && linux

package native

// #include <stdlib.h>
// #include "sluice_native.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// CudaDevices is how many GPUs the CUDA driver sees; an error says why there is
// no driver.
func CudaDevices() (int, error) {
	var n C.int
	why := (*C.char)(C.calloc(1, whyLen))
	defer C.free(unsafe.Pointer(why))
	if r := C.sluice_cuda_count(&n, why, whyLen); r != 0 {
		return 0, fmt.Errorf("native: no CUDA driver: %s", C.GoString(why))
	}
	return int(n), nil
}

// CudaOpen retains the device's primary context, for good, and answers the
// driver's version (12040 is 12.4).
func CudaOpen(device int) (int, error) {
	why := (*C.char)(C.calloc(1, whyLen))
	defer C.free(unsafe.Pointer(why))
	if r := C.sluice_cuda_open(C.int(device), why, whyLen); r != 0 {
		return 0, fmt.Errorf("native: cannot open CUDA device %d: %s", device, C.GoString(why))
	}
	var v C.int
	if r := C.sluice_cuda_driver(&v); r != 0 {
		return 0, fmt.Errorf("native: the CUDA driver does not tell its version: CUresult %d", -r)
	}
	return int(v), nil
}

// CudaAlloc allocates bytes on an open device.
func CudaAlloc(device, bytes int) (uint64, error) {
	var a C.uint64_t
	if r := C.sluice_cuda_alloc(C.int(device), C.size_t(bytes), &a); r != 0 {
		return 0, fmt.Errorf("native: cannot allocate %d bytes on CUDA device %d: CUresult %d", bytes, device, -r)
	}
	return uint64(a), nil
}

// CudaFree gives back what CudaAlloc allocated.
func CudaFree(device int, address uint64) error {
	if r := C.sluice_cuda_free(C.int(device), C.uint64_t(address)); r != 0 {
		return fmt.Errorf("native: cannot free memory of CUDA device %d: CUresult %d", device, -r)
	}
	return nil
}

// CudaWrite copies b to an address on the device, and waits for it.
func CudaWrite(device int, to uint64, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if r := C.sluice_cuda_write(C.int(device), C.uint64_t(to), unsafe.Pointer(&b[0]), C.size_t(len(b))); r != 0 {
		return fmt.Errorf("native: cannot copy %d bytes to CUDA device %d: CUresult %d", len(b), device, -r)
	}
	return nil
}

// CudaRead fills b from an address on the device.
func CudaRead(device int, b []byte, from uint64) error {
	if len(b) == 0 {
		return nil
	}
	if r := C.sluice_cuda_read(C.int(device), unsafe.Pointer(&b[0]), C.uint64_t(from), C.size_t(len(b))); r != 0 {
		return fmt.Errorf("native: cannot copy %d bytes from CUDA device %d: CUresult %d", len(b), device, -r)
	}
	return nil
}
