//go:build !cgo || !linux

package ucx

import (
	"unsafe"

	"sluice/native/dl"
)

// Load always fails in a build without C code.
func Load(string) (dl.LoadCode, string) { return dl.LoadNoNative, dl.ErrNoCgo.Error() }

// SetEnvironment does nothing in a build without C code.
func SetEnvironment() {}

// Version finds no UCX in a build without C code.
func Version(string) (major, minor, patch int, ok bool) { return 0, 0, 0, false }

// Worker does nothing in a build without C code.
type Worker struct{}

// NewWorker always fails in a build without C code.
func NewWorker(unsafe.Pointer, uint32, uint32, uint32, int) (Worker, bool) { return Worker{}, false }

// Step is always Stopped in a build without C code.
func (Worker) Step() Next { return Stopped }

// FD is -1 in a build without C code.
func (Worker) FD() int { return -1 }
