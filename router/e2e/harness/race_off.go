//go:build !race

package harness

// RaceEnabled: the race detector is off.
const RaceEnabled = false
