package patrol

import (
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type thing struct {
	on    atomic.Bool
	looks atomic.Int64
	_     [64]byte // not among the tiny objects, which are collected together
}

func look(t *thing, _ time.Time) bool { t.looks.Add(1); return t.on.Load() }

// Looks come at the interval while something is on duty, and end by themselves.
func TestRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(time.Second, look)
		a, b := new(thing), new(thing)
		p.Join(a)
		p.Join(b)
		time.Sleep(10 * time.Second)
		if a.looks.Load() != 0 {
			t.Error("looked at while none is on duty")
		}
		a.on.Store(true)
		p.OnDuty()
		p.OnDuty()
		time.Sleep(3*time.Second + time.Millisecond)
		if n := a.looks.Load(); n != 3 || b.looks.Load() != 3 {
			t.Errorf("%d and %d looks in 3 s", n, b.looks.Load())
		}
		a.on.Store(false)
		time.Sleep(10 * time.Second)
		if n := a.looks.Load(); n > 5 || p.active.Load() {
			t.Errorf("%d looks, active %v: it went on for nobody", n, p.active.Load())
		}
		b.on.Store(true)
		p.OnDuty()
		time.Sleep(time.Second + time.Millisecond)
		if !p.active.Load() {
			t.Error("it did not begin again")
		}
		b.on.Store(false)
		time.Sleep(2 * time.Second)
	})
}

// Who is collected is looked at no more.
func TestCollected(t *testing.T) {
	p := New(time.Hour, look)
	kept := new(thing)
	p.Join(kept)
	func() { p.Join(new(thing)) }()
	for range 10 {
		runtime.GC()
	}
	kept.on.Store(true)
	if !p.lookAtAll() || len(p.joined) != 1 {
		t.Errorf("%d are looked at, want 1", len(p.joined))
	}
	runtime.KeepAlive(kept)
}
