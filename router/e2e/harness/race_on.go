//go:build race

package harness

// RaceEnabled: the race detector is on.
const RaceEnabled = true
