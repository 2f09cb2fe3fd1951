package membudget

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"sluice/dataplane/objpool"
)

// The size classes: powers of two from MinBuffer to 1<<smallShift bytes, and four classes for
// each doubling from there to MaxBuffer, so that a long body takes at most a quarter more
// memory than its length.
const (
	minShift = 8
	maxShift = 25

	MinBuffer = 1 << minShift // 256 bytes: what a stream keeps of an incomplete event
	Page      = 4 << 10       // fits most heads and short bodies
	MaxBuffer = 1 << maxShift // 32 MiB

	// Free buffers of up to 1<<smallShift bytes are in sync.Pools, which the garbage
	// collector empties. Larger ones are outside Go's heap, in the lists of their classes:
	// their memory is exactly what is in use and retained, and depends on no collection.
	smallShift = 14
	numSmall   = smallShift - minShift + 1
	steps      = 4
	numLarge   = steps * (maxShift - smallShift)

	// defaultRetain is how many bytes of free large buffers a Pool retains, see SetRetain.
	defaultRetain = 32 << 20
)

// Buffer is a buffer of a Pool. B has the requested length and the capacity of its size
// class. The holder may reslice B but must not use it after Put.
type Buffer struct {
	B     []byte
	full  []byte
	level int8 // the size class; numSmall+numLarge: beyond MaxBuffer
	// poisoned says that full is filled with objpool.Pattern.
	poisoned bool
}

// Pool provides buffers by size class. The zero value is ready to use. It is safe for
// concurrent use.
type Pool struct {
	small       [numSmall]sync.Pool
	large       [numLarge + 1]sizeClass // the last has buffers beyond MaxBuffer, of different sizes
	maxRetained atomic.Int64            // set by SetRetain; 0: defaultRetain
	retained    atomic.Int64            // bytes in the resident lists
}

// sizeClass has the free large buffers of one size.
type sizeClass struct {
	mu            sync.Mutex
	resident      []*Buffer // with memory
	discarded     []*Buffer // address ranges without memory; accessed pages become zero pages
	used          bool      // since evict last visited it
	usedSinceTrim bool      // since the last TrimIdle
}

// Default is the pool that the whole process shares.
var Default = new(Pool)

// sizeClassOf returns the smallest class that fits n bytes.
func sizeClassOf(n int) int {
	switch {
	case n <= MinBuffer:
		return 0
	case n > MaxBuffer:
		return numSmall + numLarge
	}
	shift := bits.Len(uint(n-1)) - 1 // 1<<shift < n <= 2<<shift
	if shift < smallShift {
		return shift + 1 - minShift
	}
	return numSmall + steps*(shift-smallShift) + (n-1-1<<shift)/(1<<shift/steps)
}

// levelSize returns the size of a class's buffers in bytes.
func levelSize(at int) int {
	if at < numSmall {
		return MinBuffer << at
	}
	at -= numSmall
	base := 1 << (smallShift + at/steps)
	return base + (at%steps+1)*(base/steps)
}

// SizeOf returns the bytes of memory that Get(n) takes, which a Budget should count.
func SizeOf(n int) int {
	if n <= MaxBuffer {
		return levelSize(sizeClassOf(n))
	}
	return (n + Page - 1) &^ (Page - 1)
}

// Get returns a buffer with len(B) == n and arbitrary content. The caller must Put it.
func (p *Pool) Get(n int) *Buffer {
	at := sizeClassOf(n)
	var buf *Buffer
	if at < numSmall {
		if buf, _ = p.small[at].Get().(*Buffer); buf == nil {
			buf = &Buffer{full: make([]byte, MinBuffer<<at), level: int8(at)}
		}
	} else if buf = p.acquireFree(at-numSmall, n); buf == nil {
		buf = p.allocate(at, n)
	}
	if buf.poisoned {
		buf.poisoned = false
		objpool.VerifyPoison(buf.full, "membudget.Buffer")
	}
	buf.B = buf.full[:n:min(len(buf.full), SizeOf(n))]
	return buf
}

// acquireFree returns a free large buffer of at least n bytes, nil if there is none.
func (p *Pool) acquireFree(at, n int) *Buffer {
	l := &p.large[at]
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used, l.usedSinceTrim = true, true
	if last := len(l.resident) - 1; last >= 0 {
		buf := l.resident[last]
		l.resident[last] = nil
		l.resident = l.resident[:last]
		p.retained.Add(-int64(len(buf.full)))
		return buf
	}
	for i := len(l.discarded) - 1; i >= 0; i-- {
		if buf := l.discarded[i]; len(buf.full) >= n {
			last := len(l.discarded) - 1
			l.discarded[i], l.discarded[last] = l.discarded[last], nil
			l.discarded = l.discarded[:last]
			return buf
		}
	}
	return nil
}

// slab is the size of a mapping that is divided into several buffers.
const slab = 1 << 20

// allocate makes a large buffer for n bytes, and further free ones if several fit in a slab.
func (p *Pool) allocate(at, n int) *Buffer {
	size := SizeOf(n)
	if n > MaxBuffer {
		size = (n + MaxBuffer - 1) &^ (MaxBuffer - 1) // so that other lengths can reuse it
	}
	if !mapped || size >= slab {
		return &Buffer{full: newMemory(size), level: int8(at)}
	}
	memory := newMemory(slab)
	var more []*Buffer
	for from := size; from+size <= len(memory); from += size {
		more = append(more, &Buffer{full: memory[from : from+size : from+size], level: int8(at)})
	}
	l := &p.large[at-numSmall]
	l.mu.Lock()
	l.discarded = append(l.discarded, more...)
	l.mu.Unlock()
	return &Buffer{full: memory[:size:size], level: int8(at)}
}

// Put releases a buffer, which must not be used afterwards. A nil buffer is ignored.
func (p *Pool) Put(buf *Buffer) {
	if buf == nil {
		return
	}
	buf.B = nil
	if objpool.ChecksEnabled() {
		objpool.Poison(buf.full)
		buf.poisoned = true
	}
	if at := int(buf.level); at < numSmall {
		p.small[at].Put(buf)
		return
	}
	at := int(buf.level) - numSmall
	size := int64(len(buf.full))
	l := &p.large[at]
	if at < numLarge && (p.retained.Load()+size <= p.retainLimit() || p.evict(at, size)) {
		p.retained.Add(size)
		l.mu.Lock()
		l.resident = append(l.resident, buf)
		l.mu.Unlock()
		return
	}
	p.discardPages(l, buf)
}

// discardPages returns a buffer's memory to the system. The address range stays mapped, so
// that a read after release finds zeros and does not crash.
func (p *Pool) discardPages(l *sizeClass, buf *Buffer) {
	if !releasePages(buf.full) {
		return // the garbage collector frees it
	}
	l.mu.Lock()
	l.discarded = append(l.discarded, buf)
	l.mu.Unlock()
}

func (p *Pool) retainLimit() int64 {
	if n := p.maxRetained.Load(); n > 0 {
		return n
	}
	return defaultRetain
}

// SetRetain bounds the memory of free large buffers, in bytes. If the pool retains more than
// n, it returns all of it to the system at once.
func (p *Pool) SetRetain(n int64) {
	p.maxRetained.Store(max(n, 1))
	if p.retained.Load() > n {
		p.Trim()
	}
}

// evict discards free buffers of classes that have not been used since its last visit, until
// size more bytes fit in the retain limit for class at. It returns false if that does not
// suffice.
func (p *Pool) evict(at int, size int64) bool {
	limit := p.retainLimit()
	if size > limit {
		return false
	}
	for i := range p.large[:numLarge] {
		l := &p.large[i]
		for i != at {
			l.mu.Lock()
			last := len(l.resident) - 1
			if last < 0 || l.used {
				l.used = false
				l.mu.Unlock()
				break
			}
			buf := l.resident[last]
			l.resident[last] = nil
			l.resident = l.resident[:last]
			l.mu.Unlock()
			p.retained.Add(-int64(len(buf.full)))
			p.discardPages(l, buf)
			if p.retained.Load()+size <= limit {
				return true
			}
		}
	}
	return false
}

// Trim returns the memory of all free large buffers to the system.
func (p *Pool) Trim() { p.trim(true) }

// TrimIdle trims the size classes that nothing has used since the last TrimIdle. Package
// memtuner calls it every few seconds.
func (p *Pool) TrimIdle() { p.trim(false) }

func (p *Pool) trim(all bool) {
	for i := range p.large {
		l := &p.large[i]
		var kept []*Buffer
		l.mu.Lock()
		if all || !l.usedSinceTrim {
			kept, l.resident = l.resident, nil
		}
		l.usedSinceTrim = false
		l.mu.Unlock()
		for _, buf := range kept {
			p.retained.Add(-int64(len(buf.full)))
			p.discardPages(l, buf)
		}
	}
}

// Retained returns the bytes of free large buffers that the pool has in memory.
func (p *Pool) Retained() int { return int(p.retained.Load()) }
