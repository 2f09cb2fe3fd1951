package replay

import (
	"sluice/router/blockhash"
	"sluice/router/kvindex"
)

// cache holds the blocks of one rank in the model and evicts the least recently used. It evicts
// the end of a prompt before its beginning, as engines do.
type cache struct {
	capacity int
	index    map[blockhash.Seq]int32
	cells    []cell // 0 is the head of the list: next is the newest, prev the oldest
	free     []int32
	evicted  []kvindex.EngineHash
}

type cell struct {
	seq        blockhash.Seq
	prev, next int32
}

func newCache(capacity int) *cache {
	return &cache{capacity: capacity, index: make(map[blockhash.Seq]int32), cells: make([]cell, 1)}
}

// matchLength returns the number of leading blocks in the cache.
func (c *cache) matchLength(seqs []blockhash.Seq) int {
	for i, s := range seqs {
		if _, ok := c.index[s]; !ok {
			return i
		}
	}
	return len(seqs)
}

// insert makes a prompt the newest and returns the blocks evicted for it.
func (c *cache) insert(seqs []blockhash.Seq) (gone []kvindex.EngineHash) {
	seqs = seqs[:min(len(seqs), c.capacity)]
	for i := len(seqs) - 1; i >= 0; i-- {
		n, ok := c.index[seqs[i]]
		if ok {
			c.unlink(n)
		} else {
			n = c.cell()
			c.cells[n].seq = seqs[i]
			c.index[seqs[i]] = n
		}
		c.linkNewest(n)
	}
	c.evicted = c.evicted[:0]
	for len(c.index) > c.capacity {
		n := c.cells[0].prev
		seq := c.cells[n].seq
		c.unlink(n)
		delete(c.index, seq)
		c.free = append(c.free, n)
		c.evicted = append(c.evicted, kvindex.EngineHash(seq))
	}
	return c.evicted
}

func (c *cache) cell() int32 {
	if n := len(c.free); n > 0 {
		id := c.free[n-1]
		c.free = c.free[:n-1]
		return id
	}
	c.cells = append(c.cells, cell{})
	return int32(len(c.cells) - 1)
}

func (c *cache) unlink(n int32) {
	x := c.cells[n]
	c.cells[x.prev].next, c.cells[x.next].prev = x.next, x.prev
}

func (c *cache) linkNewest(n int32) {
	old := c.cells[0].next
	c.cells[n].prev, c.cells[n].next = 0, old
	c.cells[old].prev, c.cells[0].next = n, n
}
