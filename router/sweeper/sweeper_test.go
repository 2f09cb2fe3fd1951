package sweeper

import (
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type item struct {
	active atomic.Bool
	checks atomic.Int64
	_      [64]byte // not among the tiny objects, which are collected together
}

func check(t *item, _ time.Time) bool { t.checks.Add(1); return t.active.Load() }

// Looks come at the interval while something is on duty, and end by themselves.
func TestSweeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(time.Second, check)
		a, b := new(item), new(item)
		p.Add(a)
		p.Add(b)
		time.Sleep(10 * time.Second)
		if a.checks.Load() != 0 {
			t.Error("looked at while none is on duty")
		}
		a.active.Store(true)
		p.Wake()
		p.Wake()
		time.Sleep(3*time.Second + time.Millisecond)
		if n := a.checks.Load(); n != 3 || b.checks.Load() != 3 {
			t.Errorf("%d and %d looks in 3 s", n, b.checks.Load())
		}
		a.active.Store(false)
		time.Sleep(10 * time.Second)
		if n := a.checks.Load(); n > 5 || p.active.Load() {
			t.Errorf("%d looks, active %v: it went on for nobody", n, p.active.Load())
		}
		b.active.Store(true)
		p.Wake()
		time.Sleep(time.Second + time.Millisecond)
		if !p.active.Load() {
			t.Error("it did not begin again")
		}
		b.active.Store(false)
		time.Sleep(2 * time.Second)
	})
}

// A collected entry is not visited again.
func TestCollected(t *testing.T) {
	p := New(time.Hour, check)
	kept := new(item)
	p.Add(kept)
	func() { p.Add(new(item)) }()
	for range 10 {
		runtime.GC()
	}
	kept.active.Store(true)
	if !p.checkAll() || len(p.items) != 1 {
		t.Errorf("%d are looked at, want 1", len(p.items))
	}
	runtime.KeepAlive(kept)
}
