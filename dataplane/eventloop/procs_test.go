package eventloop

import (
	"runtime"
	"testing"
)

// While threads have Ps of their own, the rest of the program's follow the limits of
// the container as they would without.
func TestProcessorsFollowLimits(t *testing.T) {
	if procs.fixed {
		t.Skip("GOMAXPROCS is set")
	}
	own := runtime.GOMAXPROCS(0)
	limits := "one"
	p := processorCount{limits: func() string { return limits }}
	p.add(2)
	if n := runtime.GOMAXPROCS(0); n != own+2 || p.base() != own {
		t.Errorf("%d, own %d, want %d and %d", n, p.base(), own+2, own)
	}
	runtime.GOMAXPROCS(own + 7) // as if the limit had been so much higher
	p.refresh()
	if n := runtime.GOMAXPROCS(0); n != own+7 {
		t.Errorf("%d although no limit has changed", n)
	}
	limits = "another"
	p.refresh()
	if n := runtime.GOMAXPROCS(0); n != own+2 {
		t.Errorf("%d behind a change, want %d", n, own+2)
	}
	p.add(-2)
	if n := runtime.GOMAXPROCS(0); n != own || p.timer != nil {
		t.Errorf("%d when nothing is added, want %d", n, own)
	}
	p.refresh() // of a timer that fired before it was stopped
	if runtime.GOOS == "linux" && cpuLimits() == "" {
		t.Error("no limits are read")
	}
}
