//go:build !cgo || !linux

package native

// ABI is 0: this build has no C surface.
func ABI() int { return 0 }

// Resident is always false in a build without the C surface.
func Resident(string) bool { return false }
