// Package cuda allocates, copies and frees memory on a GPU through the CUDA driver.
//
// It loads libcuda.so.1 on the first call and uses each device's primary context, as
// the CUDA runtime and the engines do. Its callers are package sluice/nixl, for
// registered memory in tests and measurements, and `sluice doctor`. It launches no
// kernel. Every call may be made from any goroutine.
package cuda
