package testwait

import (
	"testing"
	"time"
)

// Pace is the time between two steps of a client, an engine or a load generator whose pace is part of
// what is tested: a reader that takes a little at a time, an engine that writes its response in parts,
// requests at a given rate. It is not for waiting until something has happened, which is Until, or for
// checking that nothing happens, which is Holds.
func Pace(d time.Duration) {
	time.Sleep(max(d, 0))
}

// Holds checks that ok reports true for d and fails t as soon as it does not. It takes d in every run
// that passes, and notices only what happens within d, so prefer an event after which the forbidden
// thing can no longer happen, or a synctest bubble.
func Holds(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	start := time.Now()
	if Poll(d, func() bool { return !ok() }) {
		t.Fatalf("no longer so after %v: %s", time.Since(start), what)
	}
}

// Settled returns what value returns once it has returned the same for quiet, and fails t if it changes
// for longer than DefaultLimit.
func Settled[T comparable](t testing.TB, quiet time.Duration, what string, value func() T) T {
	t.Helper()
	last, since := value(), time.Now()
	Until(t, what+" is settled", func() bool {
		if now := value(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) >= quiet
	})
	return last
}
