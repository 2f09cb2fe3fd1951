package sim

// block is one page of KV memory. A block with ref 0 is in the free list, where
// it keeps its content (hashed) until it is taken for something else.
type block struct {
	hash       blockHash
	hashed     bool
	ref        int32
	prev, next int32 // free list
	// Blocks with the same hash, the next older and the next newer one; 0 for none. A
	// prompt that is asked for again and again leaves a copy of its last block each time.
	older, newer int32
}

// pool is the paged KV memory of one rank, owned by the rank's goroutine. Block 0
// is vLLM's null block: never given out, here the head of the free list, whose
// front is the least recently used.
type pool struct {
	blocks []block
	nfree  int
	cached map[blockHash]int32 // the newest copy; older copies hang on its twin
	copies int                 // hashed blocks, copies counted each
	evict  func(*blockHash)    // called for every copy that goes
}

func newPool(n int, evict func(*blockHash)) *pool {
	p := &pool{blocks: make([]block, n), nfree: n - 1, cached: make(map[blockHash]int32), evict: evict}
	for i := range p.blocks {
		p.blocks[i].prev, p.blocks[i].next = int32(i-1), int32(i+1)
	}
	p.blocks[0].prev, p.blocks[n-1].next = int32(n-1), 0
	return p
}

// total is what can be given out.
func (p *pool) total() int { return len(p.blocks) - 1 }

func (p *pool) unlink(id int32) {
	b := &p.blocks[id]
	p.blocks[b.prev].next, p.blocks[b.next].prev = b.next, b.prev
	p.nfree--
}

// allocate gives a free block with one reference, evicting what it held. There must be one.
func (p *pool) allocate() int32 {
	id := p.blocks[0].next
	p.unlink(id)
	b := &p.blocks[id]
	if b.hashed {
		p.uncache(id)
		p.evict(&b.hash)
	}
	b.ref = 1
	return id
}

// uncache takes the block out of the cache map.
func (p *pool) uncache(id int32) {
	b := &p.blocks[id]
	switch {
	case b.newer != 0:
		p.blocks[b.newer].older = b.older
	case b.older != 0:
		p.cached[b.hash] = b.older
	default:
		delete(p.cached, b.hash)
	}
	if b.older != 0 {
		p.blocks[b.older].newer = b.newer
	}
	b.hashed, b.older, b.newer = false, 0, 0
	p.copies--
}

// lookup gives a cached copy of h.
func (p *pool) lookup(h *blockHash) (int32, bool) {
	id, ok := p.cached[*h]
	return id, ok
}

// share adds a reference to a cached block.
func (p *pool) share(id int32) {
	if p.blocks[id].ref == 0 {
		p.unlink(id)
	}
	p.blocks[id].ref++
}

// store names the content of a block in use. Two requests that compute the same
// prefix at once each store a copy, as in vLLM.
func (p *pool) store(id int32, h *blockHash) {
	b := &p.blocks[id]
	b.hash, b.hashed, b.older, b.newer = *h, true, p.cached[*h], 0
	if b.older != 0 {
		p.blocks[b.older].newer = id
	}
	p.cached[*h] = id
	p.copies++
}

// release drops one reference of each block. What falls free is queued last block
// first, so that a prompt is evicted from its tail and its prefix lives longest.
func (p *pool) release(ids []int32) {
	for i := len(ids) - 1; i >= 0; i-- {
		id := ids[i]
		b := &p.blocks[id]
		if b.ref--; b.ref > 0 {
			continue
		}
		last := p.blocks[0].prev
		b.prev, b.next = last, 0
		p.blocks[last].next, p.blocks[0].prev = id, id
		p.nfree++
	}
}

// clear forgets all cached content; it fails while a block is in use, as vLLM's
// reset_prefix_cache does.
func (p *pool) clear() bool {
	if p.nfree != p.total() {
		return false
	}
	for i := range p.blocks {
		p.blocks[i].hashed, p.blocks[i].older, p.blocks[i].newer = false, 0, 0
	}
	clear(p.cached)
	p.copies = 0
	return true
}
