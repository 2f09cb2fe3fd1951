package objpool

import (
	"bytes"
	"strings"
	"testing"
)

type object struct {
	kept    []byte // its length stays over a release
	scratch []byte
	ids     []uint32
	name    string
	inner   struct{ room []byte }
	small   [8]byte // its owner's to clear
	shared  *[]byte
}

func newObject() *object {
	o := &object{kept: append(make([]byte, 0, 16), "kept"...), scratch: make([]byte, 0, 100), ids: make([]uint32, 0, 10), name: "name"}
	o.inner.room = make([]byte, 0, 10)
	outside := []byte("of others")
	o.shared = &outside
	return o
}

// again releases an object to a pool that surely keeps it, and hands it out again.
func again(t *testing.T, o *object, between func()) (lent *object, panicked any) {
	t.Helper()
	defer func() { panicked = recover() }()
	for range 100 { // under the race detector a sync.Pool drops some
		var p Pool[object]
		p.Put(o)
		between()
		if lent = p.Get(); lent != nil {
			return lent, nil
		}
	}
	t.Fatal("the pool keeps nothing")
	return nil, nil
}

func TestPool(t *testing.T) {
	EnableChecks()
	o := newObject()
	o.scratch = append(o.scratch, "a client's prompt"...)
	stale := o.scratch
	o.scratch = o.scratch[:0]
	lent, panicked := again(t, o, func() {
		if bytes.ContainsAny(stale, "client") {
			t.Errorf("what was released still reads %q", stale)
		}
	})
	if panicked != nil || lent != o {
		t.Fatalf("lent %p of %p, panic %v", lent, o, panicked)
	}
	if string(o.kept) != "kept" || o.name != "name" || string(*o.shared) != "of others" {
		t.Errorf("%q, %q, %q: what lies within lengths, or is shared, stays", o.kept, o.name, *o.shared)
	}
	for name, write := range map[string]func(*object){
		"a slice":         func(o *object) { o.scratch[:50][49] = 'x' },
		"ids":             func(o *object) { _ = append(o.ids, 7) },
		"an inner slice":  func(o *object) { _ = append(o.inner.room, 'x') },
		"behind the kept": func(o *object) { _ = append(o.kept, 'x') },
	} {
		o := newObject()
		_, panicked := again(t, o, func() { write(o) })
		if text, _ := panicked.(string); !strings.Contains(text, "objpool.object was written to after its release") {
			t.Errorf("%s: panic %v", name, panicked)
		}
	}
	if o := newObject(); true {
		if _, panicked := again(t, o, func() {}); panicked != nil || o.small != [8]byte{} {
			t.Errorf("a struct's array is %v, panic %v", o.small, panicked)
		}
	}
	if p := new(Pool[object]); p.Get() != nil {
		t.Error("a pool without New hands out an object")
	}
	if p := (&Pool[object]{New: newObject}); p.Get() == nil {
		t.Error("a pool with New hands out nothing")
	}
}

// An array of bytes is a block that its next holder fills.
func TestPoolOfBlocks(t *testing.T) {
	EnableChecks()
	var panicked any
	for range 100 {
		var p Pool[[64]byte]
		b := new([64]byte)
		p.Put(b)
		b[63] = 0
		func() {
			defer func() { panicked = recover() }()
			p.Get()
		}()
		if panicked != nil {
			break
		}
	}
	if text, _ := panicked.(string); !strings.Contains(text, "[64]uint8 was written to after its release") {
		t.Errorf("panic %v", panicked)
	}
}

func TestPoison(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 1000, 4097} {
		b := make([]byte, n)
		Poison(b)
		VerifyPoison(b, "b")
	}
}
