//go:build race

package kvtransfer

const raceOn = true // sync.Pool drops objects at random under the race detector
