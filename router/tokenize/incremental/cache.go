package incremental

import (
	"encoding/binary"
	"sync"

	"github.com/zeebo/xxh3"

	"sluice/router/blockhash"
)

// key identifies a text and everything before it in the same prompt: each is the hash of the one
// before it and the bytes between. A collision has a probability of 2^-128, and a seed that differs
// in every process keeps a client from constructing one.
type key = xxh3.Uint128

// Cache contains the ids of segments of texts and the hashes of their blocks, bounded in bytes. Several Encoders share it. It is
// safe for concurrent use.
//
// The segments form trees: a segment's parent is the one before it. Only a segment without
// children is dropped, the least recently used first, so that a text whose last segment is cached
// is cached as a whole.
type Cache struct {
	mu      sync.Mutex
	entries map[key]*segment
	leaves  segment // the ring of segments without children: next is the newest, previous the oldest
	bytes   int64
	limit   int64

	hits, misses, dropped uint64
}

// segment is a part of a text between two cuts. All but links and children is immutable.
type segment struct {
	key    key
	parent *segment
	packed []byte // the ids, in three bytes each and a byte more, or in four if wide
	wide   bool
	count  int
	total  int             // ids from the beginning of the text to the end of the segment
	blocks []blockhash.Seq // of the blocks that end in the segment

	children       int
	next, previous *segment // in the ring, if children is 0
}

// segmentOverhead is approximately the memory of a segment besides its ids and hashes: the struct,
// its place in the map, the rounding of the slices.
const segmentOverhead = 256

func (s *segment) cost() int64 { return int64(cap(s.packed)+8*cap(s.blocks)) + segmentOverhead }

// NewCache returns a Cache that holds at most limit bytes; with 0 it holds nothing.
func NewCache(limit int64) *Cache {
	c := &Cache{entries: map[key]*segment{}, limit: limit}
	c.leaves.next, c.leaves.previous = &c.leaves, &c.leaves
	return c
}

// SetLimit changes the bound and drops what exceeds it.
func (c *Cache) SetLimit(bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.limit = max(0, bytes)
	c.trim()
}

// CacheStats are the counters of a Cache and its content.
type CacheStats struct {
	Hits, Misses, Dropped uint64 // texts that began with a cached one; that did not; segments that were dropped
	Segments              int
	Bytes                 int64
}

// Stats may be called from any goroutine.
func (c *Cache) Stats() CacheStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return CacheStats{c.hits, c.misses, c.dropped, len(c.entries), c.bytes}
}

// find appends the cached segments with which a text begins to dst, last first. keys are those of
// all segments of the text, in order; n is how many of them are cached.
func (c *Cache) find(dst []*segment, keys []key) (chain []*segment, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n = len(keys); n > 0; n-- {
		s := c.entries[keys[n-1]]
		if s == nil {
			continue
		}
		if s.children == 0 {
			s.unlink()
			c.pushNewest(s)
		}
		for ; s != nil; s = s.parent {
			dst = append(dst, s)
		}
		c.hits++
		return dst, n
	}
	c.misses++
	return dst, 0
}

// add inserts segments, each the parent of the next; the first one's parent is set. If another
// request has added some of them, its own are kept.
func (c *Cache) add(list []*segment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var parent *segment
	for i, s := range list {
		if i == 0 {
			parent = s.parent
			if parent != nil && c.entries[parent.key] != parent {
				return // dropped since
			}
		}
		if have := c.entries[s.key]; have != nil {
			parent = have
			continue
		}
		if s.cost() > c.limit {
			break
		}
		s.parent = parent
		if parent != nil {
			if parent.children == 0 {
				parent.unlink()
			}
			parent.children++
		}
		c.entries[s.key] = s
		c.pushNewest(s)
		c.bytes += s.cost()
		parent = s
	}
	c.trim()
}

// trim drops the segments that were used least recently until the rest is within the limit.
func (c *Cache) trim() {
	for c.bytes > c.limit {
		s := c.leaves.previous
		s.unlink()
		delete(c.entries, s.key)
		c.bytes -= s.cost()
		c.dropped++
		if p := s.parent; p != nil {
			if p.children--; p.children == 0 {
				c.pushOldest(p) // it was last used with s
			}
		}
	}
}

func (c *Cache) pushNewest(s *segment) { s.insert(&c.leaves, c.leaves.next) }
func (c *Cache) pushOldest(s *segment) { s.insert(c.leaves.previous, &c.leaves) }

func (s *segment) insert(before, after *segment) {
	s.previous, s.next = before, after
	before.next, after.previous = s, s
}

func (s *segment) unlink() {
	s.previous.next, s.next.previous = s.next, s.previous
	s.next, s.previous = nil, nil
}

// newSegment packs ids.
func newSegment(k key, parent *segment, ids []uint32, total int) *segment {
	s := &segment{key: k, parent: parent, count: len(ids), total: total}
	all := uint32(0)
	for _, id := range ids {
		all |= id
	}
	s.wide = all >= 1<<24
	if s.wide {
		s.packed = make([]byte, 0, 4*len(ids))
		for _, id := range ids {
			s.packed = append(s.packed, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
		}
		return s
	}
	s.packed = make([]byte, 0, 3*len(ids)+1)
	for _, id := range ids {
		s.packed = append(s.packed, byte(id), byte(id>>8), byte(id>>16))
	}
	s.packed = append(s.packed, 0) // unpack reads four bytes at a time
	return s
}

// unpack writes the ids to dst, which has count elements.
func (s *segment) unpack(dst []uint32) {
	dst = dst[:s.count]
	p := s.packed
	if s.wide {
		for i := range dst {
			dst[i] = binary.LittleEndian.Uint32(p[4*i:])
		}
		return
	}
	for i := range dst {
		dst[i] = binary.LittleEndian.Uint32(p[3*i:]) & (1<<24 - 1)
	}
}
