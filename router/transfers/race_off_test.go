//go:build !race

package transfers

const raceOn = false
