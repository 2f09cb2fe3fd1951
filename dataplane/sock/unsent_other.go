//go:build !linux

package sock

// Unsent is not known here.
func Unsent(int) int { return -1 }

// Room is not known here.
func Room(int) (room int, writable bool) { return 0, true }
