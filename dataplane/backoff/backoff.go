// Package backoff computes the delays between retries: they double from a minimum to a
// maximum.
//
// Delay is the rule; Backoff applies it to consecutive failures, Jitter spreads retries of
// many callers, and Sleep waits unless a context ends. Every package of the module that
// retries uses it. The package decides neither what is retried nor when to give up.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// Delay returns the delay before retry n, counted from 0: lo doubled n times, at most hi.
func Delay(lo, hi time.Duration, n int) time.Duration {
	for ; n > 0 && lo < hi; n-- {
		lo *= 2
	}
	return min(lo, hi)
}

// Backoff is the delay of consecutive failures. The zero value has seen no failure. It belongs
// to one goroutine.
type Backoff struct {
	delay time.Duration
}

// Next returns the delay after another failure: lo at first, then twice the previous delay, at
// most hi.
func (b *Backoff) Next(lo, hi time.Duration) time.Duration {
	b.delay = min(max(2*b.delay, lo), hi)
	return b.delay
}

// Reset records a success: the next delay is lo again.
func (b *Backoff) Reset() { b.delay = 0 }

// Jitter returns a random duration from d/2 to 3d/2; d must be positive.
func Jitter(d time.Duration) time.Duration { return d/2 + rand.N(d) }

// Sleep waits for d and returns true, or returns false as soon as ctx ends. With a d of 0 or less it
// does not wait.
func Sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
