// Package testwait waits in tests for a condition instead of sleeping for a fixed time, and takes medians of
// what tests measure.
//
// It imports no other package of this module, so that tests of every layer may use it. Only tests and
// their harness may import it.
package testwait

import (
	"runtime"
	"testing"
	"time"
)

// DefaultLimit is the limit of Until. It only bounds a test that fails: it is long so that a loaded
// machine does not fail a test that is right.
const DefaultLimit = 30 * time.Second

// maxPause bounds the pause between two calls of a condition.
const maxPause = 5 * time.Millisecond

// Until returns once ok reports true and fails t if that takes longer than DefaultLimit. What names the
// condition in the failure. It must be called from the test's own goroutine.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	UntilWithin(t, DefaultLimit, what, ok)
}

// UntilWithin is Until with a limit of its own.
func UntilWithin(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	if !Poll(limit, ok) {
		stacks := make([]byte, 256<<10)
		stacks = stacks[:runtime.Stack(stacks, true)]
		t.Fatalf("not within %v: %s\n%s", limit, what, stacks)
	}
}

// Poll calls ok until it reports true or limit has passed, and reports whether it did. The last call
// begins after the limit, so a condition that holds at the limit is always seen. It is for goroutines
// other than the test's own and for failures that say more than Until does.
func Poll(limit time.Duration, ok func() bool) bool {
	end := time.Now().Add(limit)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, maxPause) {
		late := !time.Now().Before(end)
		if ok() {
			return true
		}
		if late {
			return false
		}
		time.Sleep(min(pause, max(time.Until(end), 0)))
	}
}
