package main

import (
	"fmt"
	"testing"
)

// figure prints what a test has measured of one of RELIABILITY.md's points, for
// scripts/reliability.py to gather.
func figure(t testing.TB, point int, format string, args ...any) {
	t.Helper()
	t.Logf("reliability %d: %s", point, fmt.Sprintf(format, args...))
}
