//go:build !linux

package rawsocket

// Unsent returns -1: unknown on this system.
func Unsent(int) int { return -1 }

// SendSpace returns 0 and true on this system.
func SendSpace(int) (space int, writable bool) { return 0, true }
