//go:build !race

package kvtransfer

const raceOn = false
