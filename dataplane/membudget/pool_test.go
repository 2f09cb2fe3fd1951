package membudget

import (
	"strings"
	"sync"
	"testing"

	"sluice/dataplane/objpool"
)

func TestSizes(t *testing.T) {
	for n, want := range map[int]int{
		0: MinBuffer, 1: MinBuffer, MinBuffer: MinBuffer, MinBuffer + 1: 2 * MinBuffer, 1 << 14: 1 << 14, 1<<14 + 1: 20 << 10, 20<<10 + 1: 24 << 10, 28<<10 + 1: 32 << 10,
		65536: 65536, 65537: 80 << 10, 1 << 20: 1 << 20, 1<<20 + 1: 1280 << 10, 1536<<10 + 1: 1792 << 10, 28<<20 + 1: MaxBuffer,
		MaxBuffer - 1: MaxBuffer, MaxBuffer: MaxBuffer, MaxBuffer + 1: MaxBuffer + Page,
	} {
		p := new(Pool)
		b := p.Get(n)
		if len(b.B) != n || cap(b.B) != want || SizeOf(n) != want {
			t.Errorf("Get(%d): len %d cap %d, SizeOf %d, want %d", n, len(b.B), cap(b.B), SizeOf(n), want)
		}
		p.Put(b)
	}
	new(Pool).Put(nil)
}

// A buffer comes back whole, whatever its holder made of B.
func TestReuse(t *testing.T) {
	p := new(Pool)
	b := p.Get(230 << 10)
	first := &b.B[0]
	b.B = b.B[100:200:300]
	p.Put(b)
	b = p.Get(256 << 10)
	if &b.B[0] != first || len(b.B) != 256<<10 {
		t.Error("the buffer was not reused whole")
	}
}

// Idle buffers are bounded over all sizes together, and Trim releases them.
func TestRetentionIsBounded(t *testing.T) {
	p := new(Pool)
	for _, most := range []int{defaultRetain, 3 << 20} {
		if most != defaultRetain {
			p.SetRetain(int64(most))
		}
		for _, size := range []int{128 << 10, 300 << 10, MaxBuffer, MaxBuffer + 1} {
			var held []*Buffer
			for range most/min(size, MaxBuffer) + 2 {
				held = append(held, p.Get(size))
			}
			for _, b := range held {
				p.Put(b)
			}
			if n := p.Retained(); n > most {
				t.Errorf("after buffers of %d: %d bytes retained, over %d", size, n, most)
			}
		}
		if p.Retained() == 0 {
			t.Error("nothing is kept for the next")
		}
	}
	if p.Trim(); p.Retained() != 0 {
		t.Errorf("%d bytes retained after Trim", p.Retained())
	}
}

// A size that is used takes the place of one that is not.
func TestRetentionFollowsUse(t *testing.T) {
	p := new(Pool)
	p.SetRetain(4 << 20)
	fill := func(size int) {
		var held []*Buffer
		for range 4 << 20 / size {
			held = append(held, p.Get(size))
		}
		for _, b := range held {
			p.Put(b)
		}
	}
	fill(64 << 10)
	for range 3 {
		fill(1 << 20)
	}
	if n := len(p.large[sizeClassOf(1<<20)-numSmall].resident); n != 4 {
		t.Errorf("%d buffers of 1 MiB are kept of the 4 that are used again and again", n)
	}
}

// A large buffer that was returned to the system contains zeros, for its reader and for
// the next goroutine that gets it.
func TestDiscardedPagesAreZero(t *testing.T) {
	if !mapped || objpool.ChecksEnabled() {
		t.Skip("buffers are the garbage collector's here, or keep their pattern")
	}
	for _, size := range []int{32 << 10, 200 << 10, 3 << 20, MaxBuffer + 1} {
		p := new(Pool)
		b := p.Get(size)
		copy(b.B, "another client's prompt")
		stale := b.B
		p.Put(b)
		p.Trim()
		if stale[0] != 0 {
			t.Errorf("%d bytes: a reader of what was given back sees %q", size, stale[:10])
		}
		if b := p.Get(size); &b.B[0] != &stale[0] || b.B[0] != 0 {
			t.Errorf("%d bytes: the addresses were not used again", size)
		}
	}
}

// A write to a buffer after its release is found when it is lent again.
func TestWriteAfterRelease(t *testing.T) {
	if !objpool.ChecksEnabled() {
		t.Skip("under the race detector only")
	}
	for _, size := range []int{64 << 10, 1 << 20} {
		p := new(Pool)
		b := p.Get(size)
		stale := b.B
		p.Put(b)
		stale[size/2] = 'x'
		func() {
			defer func() {
				if text, _ := recover().(string); !strings.Contains(text, "membudget.Buffer was written to after its release") {
					t.Errorf("%d bytes: panic %q", size, text)
				}
			}()
			p.Get(size)
		}()
	}
}

// No two holders ever share memory.
func TestPoolConcurrent(t *testing.T) {
	p := new(Pool)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 500 {
				b := p.Get((i%5 + 1) * 40 << 10)
				mark := byte(w + 1)
				for j := 0; j < len(b.B); j += 1024 {
					b.B[j] = mark
				}
				for j := 0; j < len(b.B); j += 1024 {
					if b.B[j] != mark {
						t.Errorf("another's mark %d", b.B[j])
						return
					}
				}
				p.Put(b)
			}
		}()
	}
	wg.Wait()
}

func TestLease(t *testing.T) {
	b, p := NewBudget(64<<10), new(Pool)
	l, ok := p.Lease(b, 10<<10)
	if !ok || len(l.Bytes()) != 10<<10 || l.Size() != 16<<10 || b.Used() != 16<<10 {
		t.Fatalf("ok %v, %d bytes, held %d, used %d", ok, len(l.Bytes()), l.Size(), b.Used())
	}
	l.Bytes()[0] = 'x'
	if !l.Grow(16<<10) || b.Used() != 16<<10 || !l.Grow(30<<10) || b.Used() != 32<<10 || l.Bytes()[0] != 'x' || len(l.Bytes()) != 30<<10 {
		t.Errorf("grown: %d bytes, used %d", len(l.Bytes()), b.Used())
	}
	if l.Grow(64 << 10) { // both are held while one is copied to the other
		t.Error("grown over the budget")
	}
	if _, ok := p.Lease(b, 40<<10); ok {
		t.Error("lent over the budget")
	}
	l.Release()
	l.Release()
	if b.Used() != 0 || l.Bytes() != nil || l.Grow(1) || l.Size() != 0 {
		t.Errorf("used %d after Release", b.Used())
	}
}

func TestLeaseAllocatesNothing(t *testing.T) {
	b, p := NewBudget(1<<30), new(Pool)
	for _, n := range []int{4 << 10, 1 << 20} {
		if got := testing.AllocsPerRun(200, func() {
			l, _ := p.Lease(b, n)
			l.Release()
		}); got >= 1 && !raceEnabled {
			t.Errorf("%d bytes: %v allocations", n, got)
		}
	}
}

func BenchmarkLease(b *testing.B) {
	budget, p := NewBudget(1<<40), new(Pool)
	for name, n := range map[string]int{"16K": 16 << 10, "1M": 1 << 20} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				l, _ := p.Lease(budget, n)
				l.Release()
			}
		})
	}
}
