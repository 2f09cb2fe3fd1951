package kvcache

// block is one page of KV memory. A block with Ref 0 is in the free list and
// keeps its cached content until it is allocated again.
type block struct {
	Hash       BlockHash
	Hashed     bool
	Ref        int32
	prev, next int32 // free list
	// The next older and next newer block with the same hash; 0 for none. A prompt that is
	// repeated leaves another copy of its last block each time.
	older, newer int32
}

// Pool is the paged KV memory of one rank, owned by the rank's goroutine. Block 0 is
// vLLM's null block: it is never allocated, and here it is the head of the free list,
// whose front is the least recently used block.
type Pool struct {
	Blocks []block
	Free   int
	cached map[BlockHash]int32 // the newest copy; Block.older links the others
	Copies int                 // hashed blocks, copies counted each
	evict  func(*BlockHash)    // called for every copy that goes
}

// NewPool returns a pool of n blocks, block 0 included. It calls evict with the hash of
// every cached block that it reuses; the hash is valid only during the call.
func NewPool(n int, evict func(*BlockHash)) *Pool {
	p := &Pool{Blocks: make([]block, n), Free: n - 1, cached: make(map[BlockHash]int32), evict: evict}
	for i := range p.Blocks {
		p.Blocks[i].prev, p.Blocks[i].next = int32(i-1), int32(i+1)
	}
	p.Blocks[0].prev, p.Blocks[n-1].next = int32(n-1), 0
	return p
}

// Total returns the number of blocks that can be allocated.
func (p *Pool) Total() int { return len(p.Blocks) - 1 }

func (p *Pool) unlink(id int32) {
	b := &p.Blocks[id]
	p.Blocks[b.prev].next, p.Blocks[b.next].prev = b.next, b.prev
	p.Free--
}

// Allocate returns a free block with one reference and evicts its cached content. The
// caller has checked that Free is not 0.
func (p *Pool) Allocate() int32 {
	id := p.Blocks[0].next
	p.unlink(id)
	b := &p.Blocks[id]
	if b.Hashed {
		p.uncache(id)
		p.evict(&b.Hash)
	}
	b.Ref = 1
	return id
}

// uncache removes the block from the cache map.
func (p *Pool) uncache(id int32) {
	b := &p.Blocks[id]
	switch {
	case b.newer != 0:
		p.Blocks[b.newer].older = b.older
	case b.older != 0:
		p.cached[b.Hash] = b.older
	default:
		delete(p.cached, b.Hash)
	}
	if b.older != 0 {
		p.Blocks[b.older].newer = b.newer
	}
	b.Hashed, b.older, b.newer = false, 0, 0
	p.Copies--
}

// Lookup returns a cached block with hash h.
func (p *Pool) Lookup(h *BlockHash) (int32, bool) {
	id, ok := p.cached[*h]
	return id, ok
}

// Share adds a reference to a cached block.
func (p *Pool) Share(id int32) {
	if p.Blocks[id].Ref == 0 {
		p.unlink(id)
	}
	p.Blocks[id].Ref++
}

// Store caches the content of a block in use under its hash. Two requests that compute
// the same prefix at once each store a copy, as in vLLM.
func (p *Pool) Store(id int32, h *BlockHash) {
	b := &p.Blocks[id]
	b.Hash, b.Hashed, b.older, b.newer = *h, true, p.cached[*h], 0
	if b.older != 0 {
		p.Blocks[b.older].newer = id
	}
	p.cached[*h] = id
	p.Copies++
}

// Release drops one reference of each block. Blocks that become free are queued last
// block first, so that a prompt is evicted from its tail and its prefix stays longest.
func (p *Pool) Release(ids []int32) {
	for i := len(ids) - 1; i >= 0; i-- {
		id := ids[i]
		b := &p.Blocks[id]
		if b.Ref--; b.Ref > 0 {
			continue
		}
		last := p.Blocks[0].prev
		b.prev, b.next = last, 0
		p.Blocks[last].next, p.Blocks[0].prev = id, id
		p.Free++
	}
}

// Clear drops all cached content. It returns false and does nothing while a block is in
// use, as vLLM's reset_prefix_cache does.
func (p *Pool) Clear() bool {
	if p.Free != p.Total() {
		return false
	}
	for i := range p.Blocks {
		p.Blocks[i].Hashed, p.Blocks[i].older, p.Blocks[i].newer = false, 0, 0
	}
	clear(p.cached)
	p.Copies = 0
	return true
}
