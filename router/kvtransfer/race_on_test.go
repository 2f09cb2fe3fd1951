//go:build race

package kvtransfer

const raceOn = true // sync.Pool drops at random then
