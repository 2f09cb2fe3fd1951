//go:build !linux

package sock

// Unsent is not known here.
func Unsent(int) int { return -1 }
