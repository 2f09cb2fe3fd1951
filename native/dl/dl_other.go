//go:build !cgo || !linux

package dl

// ABI is 0: this build has no C code.
func ABI() int { return 0 }

// Resident is always false in a build without C code.
func Resident(string) bool { return false }

// RememberSignals does nothing in a build without C code.
func RememberSignals() {}

// RestoreSignals does nothing in a build without C code.
func RestoreSignals() uint64 { return 0 }

// Environment finds no variable in a build without C code.
func Environment(string) (string, bool) { return "", false }
