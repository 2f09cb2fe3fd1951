//go:build !race

package eventloop

const raceEnabled = false
