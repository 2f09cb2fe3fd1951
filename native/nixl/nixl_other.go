//go:build !cgo || !linux

package nixl

import (
	"unsafe"

	"sluice/native/dl"
)

// Load always fails in a build without C code.
func Load(string) (dl.LoadCode, string) { return dl.LoadNoNative, dl.ErrNoCgo.Error() }

// StartAgent always fails in a build without C code.
func StartAgent(unsafe.Pointer, uint32, uint32, uint32, int, int, PollIntervals) error {
	return dl.ErrNoCgo
}

// Layout is nil in a build without C code.
func Layout() map[string]uintptr { return nil }
