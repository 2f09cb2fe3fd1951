package membudget

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"sluice/dataplane/objpool"
)

// The levels: powers of two from MinBuffer to 1<<smallShift bytes, and four steps to each
// doubling from there to MaxBuffer, so that a long body takes at most a quarter more than it has.
const (
	minShift = 8
	maxShift = 25

	MinBuffer = 1 << minShift // 256 bytes: what a stream keeps of an event that has not come whole
	Page      = 4 << 10       // what most heads and short bodies fit in
	MaxBuffer = 1 << maxShift // 32 MiB

	// Buffers of up to 1<<smallShift bytes lie in sync.Pools, which the garbage collector
	// empties. Larger ones lie outside of Go's heap, in the lists of their levels: what
	// they take is exactly what is lent and kept, and does not wait for a collection.
	smallShift = 14
	numSmall   = smallShift - minShift + 1
	steps      = 4
	numLarge   = steps * (maxShift - smallShift)

	// defaultRetain is how many bytes of large buffers a Pool keeps in memory while nobody
	// has them, see Retain.
	defaultRetain = 32 << 20
)

// Buffer is a lent piece of memory. B has the length that was asked for and
// the capacity of its level; the holder may reslice it, but not keep it after
// Put.
type Buffer struct {
	B     []byte
	full  []byte
	level int8 // numSmall+numLarge: beyond MaxBuffer
	// poisoned says that full is filled with reuse's pattern: it was released while
	// checking is on.
	poisoned bool
}

// Pool lends buffers by level. The zero value is ready and safe for concurrent
// use. Default is the process's own.
type Pool struct {
	small       [numSmall]sync.Pool
	large       [numLarge + 1]sizeClass // the last one's are beyond MaxBuffer, of different sizes
	maxRetained atomic.Int64            // what Retain said; 0: nothing
	retained    atomic.Int64            // bytes in the kept lists
}

// sizeClass has the large buffers of one size that nobody holds.
type sizeClass struct {
	mu            sync.Mutex
	resident      []*Buffer // in memory
	discarded     []*Buffer // addresses without memory: a page that is touched is made anew, of zeros
	used          bool      // since another level last wanted its memory
	usedSinceTrim bool      // used since the last TrimIdle
}

// Default is the pool the data plane shares.
var Default = new(Pool)

// sizeClassOf is the smallest level that holds n bytes.
func sizeClassOf(n int) int {
	switch {
	case n <= MinBuffer:
		return 0
	case n > MaxBuffer:
		return numSmall + numLarge
	}
	shift := bits.Len(uint(n-1)) - 1 // n is above 1<<shift, and at most twice that
	if shift < smallShift {
		return shift + 1 - minShift
	}
	return numSmall + steps*(shift-smallShift) + (n-1-1<<shift)/(1<<shift/steps)
}

// levelSize is the bytes of a level's buffers.
func levelSize(at int) int {
	if at < numSmall {
		return MinBuffer << at
	}
	at -= numSmall
	base := 1 << (smallShift + at/steps)
	return base + (at%steps+1)*(base/steps)
}

// SizeOf is the memory that Get(n) takes, in bytes: what a Budget should count.
func SizeOf(n int) int {
	if n <= MaxBuffer {
		return levelSize(sizeClassOf(n))
	}
	return (n + Page - 1) &^ (Page - 1)
}

// Get lends a buffer with len(B) == n; its content is arbitrary. One beyond MaxBuffer has
// the capacity that SizeOf says.
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

// acquireFree lends a large buffer that was released; nil: there is none of n bytes.
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

// slab is how many bytes of small buffers are mapped at once.
const slab = 1 << 20

// allocate makes a large buffer for n bytes, and more where several fit in a slab.
func (p *Pool) allocate(at, n int) *Buffer {
	size := SizeOf(n)
	if n > MaxBuffer {
		size = (n + MaxBuffer - 1) &^ (MaxBuffer - 1) // so that it will do for others
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

// Put takes a buffer back; nil is allowed. The buffer must not be used again.
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

// discardPages gives a buffer's memory back to the system; its addresses stay, so whoever
// reads a released buffer reads zeros.
func (p *Pool) discardPages(l *sizeClass, buf *Buffer) {
	if !releasePages(buf.full) {
		return // to the garbage collector
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

// SetRetain bounds the large buffers that are kept in memory while nobody has them, in bytes;
// what is kept beyond a lower bound goes back at once.
func (p *Pool) SetRetain(n int64) {
	p.maxRetained.Store(max(n, 1))
	if p.retained.Load() > n {
		p.Trim()
	}
}

// evict gives kept buffers of levels back that have not been used since it last came by,
// until size bytes more may be kept of level at; false where that is not enough.
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

// Trim gives the memory of all large buffers that nobody has back to the system.
func (p *Pool) Trim() { p.trim(true) }

// TrimIdle is Trim of the sizes that nobody has asked for since the last TrimIdle. It is
// called every few seconds, see package lean.
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

// Retained is how many bytes of large buffers the pool keeps in memory.
func (p *Pool) Retained() int { return int(p.retained.Load()) }
