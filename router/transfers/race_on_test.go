//go:build race

package transfers

const raceOn = true // sync.Pool drops at random then
