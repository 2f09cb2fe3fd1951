package placement

import (
	"container/heap"
	"time"
)

// Engine is the model of an engine: one rank with a finite cache, which computes in steps.
//
// A step computes waiting prompts in their order, as many tokens as the budget allows, and one
// token of every running request. A request begins when its blocks fit; a cached prefix is not
// computed again. Blocks are cached when their step ends. Blocks that no request uses remain until
// their space is needed, the least recently used first and of a request its end first, as in vLLM
// and SGLang. A request that does not fit waits; the model has no preemption.
type engine struct {
	opt   *EngineOptions
	cache *cache

	waiting []*running
	prefill []*running // begun, prompt not computed
	decode  finishHeap
	steps   int
	busy    bool

	computed int // prompt tokens
	requests int
}

// EngineOptions are the properties of a simulated engine.
type EngineOptions struct {
	Tokens      int           // KV capacity
	StepBase    time.Duration // of every step
	StepPrefill time.Duration // of every prompt token computed in a step
	StepDecode  time.Duration // of every running request
	Budget      int           // prompt tokens per step
	MaxRunning  int           // requests
}

// DefaultEngine resembles an 8B model on one GPU of 80 GB, slowed down so that prompts of the size
// of the traces matter.
var DefaultEngine = EngineOptions{StepBase: 8 * time.Millisecond, StepPrefill: 50 * time.Microsecond, StepDecode: 40 * time.Microsecond,
	Budget: 4096, MaxRunning: 256}

// running is a request on an engine.
type running struct {
	req      *Request
	done     func(first bool, cached int)
	blocks   []int32 // prompt and generated, by their numbers
	pinned   int     // of blocks, those that are in the cache on its behalf
	private  int     // blocks reserved and not in the cache
	cached   int     // tokens
	computed int     // tokens of the prompt that are computed or cached
	last     int     // step of its last token
}

type finishHeap []*running

func (h finishHeap) Len() int           { return len(h) }
func (h finishHeap) Less(i, j int) bool { return h[i].last < h[j].last }
func (h finishHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *finishHeap) Push(x any)        { *h = append(*h, x.(*running)) }
func (h *finishHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// add queues a request. done is called at its first token and at its end.
func (e *engine) add(r *Request, done func(first bool, cached int)) {
	e.waiting = append(e.waiting, &running{req: r, done: done, blocks: r.numbers})
	e.requests++
}

// begin starts a step and returns how long it takes; 0 if there is nothing to do.
func (e *engine) begin() time.Duration {
	for len(e.waiting) > 0 && len(e.prefill)+len(e.decode) < e.opt.MaxRunning && e.unfinished() < e.opt.Budget && e.admit(e.waiting[0]) {
		e.prefill = append(e.prefill, e.waiting[0])
		e.waiting = e.waiting[1:]
	}
	tokens := min(e.unfinished(), e.opt.Budget)
	if tokens == 0 && len(e.decode) == 0 {
		return 0
	}
	e.busy = true
	return e.opt.StepBase + time.Duration(tokens)*e.opt.StepPrefill + time.Duration(len(e.decode))*e.opt.StepDecode
}

// unfinished is the number of prompt tokens still to be computed of requests that have begun.
func (e *engine) unfinished() (n int) {
	for _, x := range e.prefill {
		n += x.req.Prompt - x.computed
	}
	return n
}

// admit gives a request its blocks. It returns false if they do not fit.
func (e *engine) admit(x *running) bool {
	depth := min(e.cache.depth(x.blocks[:len(x.req.Blocks)]), (x.req.Prompt-1)/e.cache.blockTokens) // the last token is always computed
	need := (x.req.Prompt + x.req.Output + e.cache.blockTokens - 1) / e.cache.blockTokens
	if !e.cache.reserve(x.blocks[:depth], need-depth) && len(e.prefill)+len(e.decode) > 0 {
		return false // alone, it runs without space for all of its blocks
	}
	x.pinned, x.private = depth, need-depth
	x.cached = depth * e.cache.blockTokens
	x.computed = x.cached
	e.computed += x.req.Prompt - x.cached
	return true
}

// end ends the step that begin began.
func (e *engine) end() {
	e.busy = false
	e.steps++
	for len(e.decode) > 0 && e.decode[0].last <= e.steps {
		x := heap.Pop(&e.decode).(*running)
		e.finish(x)
	}
	budget := e.opt.Budget
	for len(e.prefill) > 0 && budget > 0 {
		x := e.prefill[0]
		n := min(budget, x.req.Prompt-x.computed)
		budget -= n
		x.computed += n
		e.keep(x, x.computed/e.cache.blockTokens)
		if x.computed < x.req.Prompt {
			break
		}
		e.prefill = e.prefill[1:]
		x.done(true, x.cached)
		if x.last = e.steps + x.req.Output - 1; x.req.Output == 1 {
			e.finish(x)
		} else {
			heap.Push(&e.decode, x)
		}
	}
}

// keep adds the blocks of x before the given one to the cache.
func (e *engine) keep(x *running, to int) {
	to = min(to, len(x.blocks))
	if to <= x.pinned {
		return
	}
	x.private -= e.cache.store(x.blocks, x.pinned, to)
	x.pinned = to
}

func (e *engine) finish(x *running) {
	e.keep(x, len(x.blocks))
	e.cache.release(x.blocks[:x.pinned], x.private)
	x.done(false, x.cached)
}

// cache is the KV cache of one engine, in blocks.
type cache struct {
	blockTokens int
	capacity    int
	reserved    int     // blocks of running requests that have no content to share
	used        int     // blocks in cells with references
	index       []int32 // cell of each block by its number; 0 none
	cached      int     // blocks in cells
	cells       []cell  // 0 is the head of the list of cells without references: next is the newest
	free        []int32

	// Changes since they were last taken, in their order.
	changes []change
}

type cell struct {
	block      int32
	refs       int32
	prev, next int32
}

// change is one event of a cache: blocks stored behind a parent, or removed.
type change struct {
	removed   bool
	parent    int32
	hasParent bool
	blocks    []int32
}

// newCache makes an empty cache for blocks with numbers below numbers.
func newCache(numbers, blockTokens, tokens int) *cache {
	return &cache{blockTokens: blockTokens, capacity: tokens / blockTokens, index: make([]int32, numbers), cells: make([]cell, 1)}
}

// usage is the share of blocks that running requests use.
func (c *cache) usage() float64 { return min(1, float64(c.used+c.reserved)/float64(c.capacity)) }

// depth returns how many leading blocks are cached.
func (c *cache) depth(blocks []int32) int {
	for i, s := range blocks {
		if c.index[s] == 0 {
			return i
		}
	}
	return len(blocks)
}

// reserve pins cached blocks and reserves space for new ones. It returns false, with nothing
// changed, if they do not fit.
func (c *cache) reserve(cached []int32, more int) bool {
	pins := 0
	for _, s := range cached {
		if c.cells[c.index[s]].refs == 0 {
			pins++
		}
	}
	fits := c.used+pins+c.reserved+more <= c.capacity
	if !fits && c.used+c.reserved > 0 {
		return false
	}
	for _, s := range cached {
		c.pin(c.index[s])
	}
	c.reserved += more
	c.evict()
	return fits
}

func (c *cache) pin(n int32) {
	if c.cells[n].refs++; c.cells[n].refs == 1 {
		c.unlink(n)
		c.used++
	}
}

// evict removes the least recently used blocks until everything fits.
func (c *cache) evict() {
	var gone []int32
	for c.cached+c.reserved > c.capacity && c.cells[0].prev != 0 {
		n := c.cells[0].prev
		c.unlink(n)
		c.index[c.cells[n].block] = 0
		c.cached--
		gone = append(gone, c.cells[n].block)
		c.free = append(c.free, n)
	}
	if len(gone) > 0 {
		c.changes = append(c.changes, change{removed: true, blocks: gone})
	}
}

// store makes the blocks from…to of a request, for which space was reserved, available to others.
// It returns how many of them were not there; of the others the request keeps a copy of its own.
func (c *cache) store(blocks []int32, from, to int) (stored int) {
	first := -1
	flush := func(end int) {
		if first >= 0 {
			s := change{blocks: blocks[first:end], hasParent: first > 0}
			if s.hasParent {
				s.parent = blocks[first-1]
			}
			c.changes = append(c.changes, s)
		}
		first = -1
	}
	for i := from; i < to; i++ {
		if n := c.index[blocks[i]]; n != 0 {
			flush(i)
			c.pin(n)
			continue
		}
		if first < 0 {
			first = i
		}
		n := c.newCell()
		c.cells[n] = cell{block: blocks[i], refs: 1}
		c.index[blocks[i]] = n
		c.cached++
		c.used++
		c.reserved--
		stored++
	}
	flush(to)
	return stored
}

// release ends the use of blocks and of reserved space.
func (c *cache) release(blocks []int32, reserved int) {
	c.reserved -= reserved
	for i := len(blocks) - 1; i >= 0; i-- {
		n := c.index[blocks[i]]
		if c.cells[n].refs--; c.cells[n].refs == 0 {
			c.used--
			c.linkNewest(n)
		}
	}
	c.evict()
}

func (c *cache) newCell() int32 {
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
