//go:build race

package membudget

const raceEnabled = true
