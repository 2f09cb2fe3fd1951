//go:build !race

package objpool

const raceEnabled = false
