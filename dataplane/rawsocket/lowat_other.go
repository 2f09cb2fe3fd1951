//go:build !linux

package rawsocket

// SetReceiveLowWater does nothing on this system.
func SetReceiveLowWater(_, _ int) {}
