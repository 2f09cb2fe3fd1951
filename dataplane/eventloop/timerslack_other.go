//go:build !linux

package eventloop

func setTimerSlack() {}
