package backoff

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestDelaysDouble(t *testing.T) {
	var b Backoff
	for n, want := range []time.Duration{100, 200, 400, 700, 700} {
		if got := b.Next(100, 700); got != want {
			t.Errorf("failure %d: Next %d; want %d", n, got, want)
		}
		if got := Delay(100, 700, n); got != want {
			t.Errorf("Delay(100, 700, %d) = %d; want %d", n, got, want)
		}
	}
	b.Reset()
	if got := b.Next(100, 700); got != 100 {
		t.Errorf("after a success: %d; want 100", got)
	}
	if got := Delay(time.Second, time.Hour, 1<<30); got != time.Hour {
		t.Errorf("after many failures: %v; want an hour", got)
	}
}

func TestJitterIsBounded(t *testing.T) {
	lo, hi := time.Hour, time.Duration(0)
	for range 10_000 {
		d := Jitter(1000)
		lo, hi = min(lo, d), max(hi, d)
	}
	if lo < 500 || lo > 520 || hi > 1499 || hi < 1480 {
		t.Errorf("from %d to %d; want 500 to 1499", lo, hi)
	}
}

func TestSleepEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if !Sleep(ctx, 300*time.Millisecond) || time.Since(start) != 300*time.Millisecond {
			t.Errorf("slept %v; want 300ms", time.Since(start))
		}
		if Sleep(ctx, time.Hour) || time.Since(start) != time.Second {
			t.Errorf("slept until %v; want the context's end after 1s", time.Since(start))
		}
		if Sleep(ctx, 0) {
			t.Error("true after the context's end")
		}
	})
}
