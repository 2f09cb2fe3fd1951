//go:build !cgo || !linux

package cuda

import "sluice/native/dl"

// Devices always fails in a build without C code.
func Devices() (int, error) { return 0, dl.ErrNoCgo }

// Open always fails in a build without C code.
func Open(int) (int, error) { return 0, dl.ErrNoCgo }

// Alloc always fails in a build without C code.
func Alloc(int, int) (uint64, error) { return 0, dl.ErrNoCgo }

// Free always fails in a build without C code.
func Free(int, uint64) error { return dl.ErrNoCgo }

// Write always fails in a build without C code.
func Write(int, uint64, []byte) error { return dl.ErrNoCgo }

// Read always fails in a build without C code.
func Read(int, []byte, uint64) error { return dl.ErrNoCgo }
