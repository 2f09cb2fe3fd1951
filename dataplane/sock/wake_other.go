//go:build !linux

package sock

// WakeAt does nothing here: pollers are told of every byte.
func WakeAt(_, _ int) {}
