package membudget

import (
	"math/bits"
	"sync"
)

// The levels: powers of two from MinBuffer to MaxBuffer bytes.
const (
	minShift  = 8
	maxShift  = 25
	numLevels = maxShift - minShift + 1

	MinBuffer = 1 << minShift // 256 bytes: what a stream keeps of an event that has not come whole
	Page      = 4 << 10       // what most heads and short bodies fit in
	MaxBuffer = 1 << maxShift // 32 MiB

	// Up to smallMax buffers lie in sync.Pools, which the garbage collector
	// empties; larger ones in lists of at most retain bytes a level.
	smallShift = 16
	retain     = 32 << 20
)

// Buffer is a lent piece of memory. B has the length that was asked for and
// the capacity of its level; the holder may reslice it, but not keep it after
// Put.
type Buffer struct {
	B     []byte
	full  []byte
	level int8 // -1: beyond MaxBuffer, belongs to no level
}

// Pool lends buffers by level. The zero value is ready and safe for concurrent
// use. Default is the process's own.
type Pool struct {
	small [smallShift - minShift + 1]sync.Pool
	large [numLevels]struct {
		mu   sync.Mutex
		free []*Buffer
	}
}

// Default is the pool the data plane shares.
var Default = new(Pool)

// levelOf is the smallest level that holds n bytes, -1 when none does.
func levelOf(n int) int {
	if n <= MinBuffer {
		return 0
	}
	if n > MaxBuffer {
		return -1
	}
	return bits.Len(uint(n-1)) - minShift
}

// SizeOf is the memory that Get(n) takes, in bytes: what a Budget should count.
func SizeOf(n int) int {
	if level := levelOf(n); level >= 0 {
		return MinBuffer << level
	}
	return n
}

// Get lends a buffer with len(B) == n; its content is arbitrary. Beyond
// MaxBuffer it is made for the occasion and not kept.
func (p *Pool) Get(n int) *Buffer {
	level := levelOf(n)
	if level < 0 {
		b := make([]byte, n)
		return &Buffer{B: b, full: b, level: -1}
	}
	buf := p.take(level)
	if buf == nil {
		buf = &Buffer{full: make([]byte, MinBuffer<<level), level: int8(level)}
	}
	buf.B = buf.full[:n]
	return buf
}

func (p *Pool) take(level int) *Buffer {
	if level < len(p.small) {
		buf, _ := p.small[level].Get().(*Buffer)
		return buf
	}
	l := &p.large[level]
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.free) == 0 {
		return nil
	}
	last := len(l.free) - 1
	buf := l.free[last]
	l.free[last] = nil
	l.free = l.free[:last]
	return buf
}

// Put takes a buffer back; nil is allowed. The buffer must not be used again.
func (p *Pool) Put(buf *Buffer) {
	if buf == nil || buf.level < 0 {
		return
	}
	buf.B = nil
	level := int(buf.level)
	if level < len(p.small) {
		p.small[level].Put(buf)
		return
	}
	l := &p.large[level]
	l.mu.Lock()
	if len(l.free) < max(1, retain/(MinBuffer<<level)) {
		l.free = append(l.free, buf)
	}
	l.mu.Unlock()
}

// Retained is how many bytes the pool keeps in its large levels.
func (p *Pool) Retained() int {
	total := 0
	for level := range p.large {
		l := &p.large[level]
		l.mu.Lock()
		total += len(l.free) * (MinBuffer << level)
		l.mu.Unlock()
	}
	return total
}
