//go:build !cgo || !linux

package rings

// CopyToC always fails in a build without C code.
func CopyToC([]byte) uint64 { return 0 }

// TakeFromC returns nothing in a build without C code.
func TakeFromC(uint64, int) []byte { return nil }

// Layout is nil in a build without C code.
func Layout() map[string]uintptr { return nil }
