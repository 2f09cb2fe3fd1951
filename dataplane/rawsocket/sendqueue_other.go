//go:build !linux

package rawsocket

// Unsent is not known here.
func Unsent(int) int { return -1 }

// SendSpace is not known here.
func SendSpace(int) (space int, writable bool) { return 0, true }
