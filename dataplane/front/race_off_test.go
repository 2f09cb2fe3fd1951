//go:build !race

package front

const raceOn = false
