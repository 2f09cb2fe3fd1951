//go:build !linux

package rawsocket

// SetReceiveLowWater does nothing here: pollers are told of every byte.
func SetReceiveLowWater(_, _ int) {}
