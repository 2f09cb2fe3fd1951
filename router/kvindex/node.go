package kvindex

import "sync/atomic"

// node is a node of the radix tree: blocks that are contiguous in one extent and have the same
// holders in the same tiers. It fills one cache line, so that a reader that passes a whole node
// loads two lines: the slot of the node table and the node.
//
// Memory order: one writer at a time, serialised by the shard's mutex, changes nodes; readers never
// lock. Every word that readers use is stored whole and in order and loaded atomically, and every
// change becomes visible by the store of one word:
//
//   - the length and the kind of the holders are in wState together with a generation
//     that grows with each change; other words that belong to a new length or kind
//     are stored before it and are ignored under the old one;
//   - words that change alone (one holder's bit, the storage's place) are stored
//     first, then the generation grows.
//
// A reader loads wState, the other words, and wState again: equal states mean that it read the node
// at one moment. There is no state "being written", so a reader never waits for a preempted writer;
// it repeats only what a completed change has invalidated. A deleted node is first removed from the
// node table and then marked dead. Its line is reused only as a node, and the generation continues,
// so a late reader detects the change and never reads unrelated memory. The generation has 32 bits:
// only exactly 2^32 changes of one node within one pass of a reader would go undetected.
type node [8]uint64

// The words of a node.
const (
	wState  = iota // generation<<32 | flags | length in blocks
	wFirst         // sequence hash of the first block
	wLast          // sequence hash of the last block
	wLow           // device: holders among slots 0…63, as bits
	wPlace         // line of the extent's storage<<32 | offset of the first block<<16
	wList          // device: up to four holders with slots from 64 on, sorted, 16 bits each
	wSets          // set of device holders with slots from 64 on<<32 | set of the lower tiers
	wExtent        // extent<<32 | number of child extents that branch off at the end; for the writer only
)

// The flags and the length in wState.
const (
	lenMask  = 1<<16 - 1
	hasList  = 1 << 16 // wList is valid
	hasSet   = 1 << 17 // the upper half of wSets is valid
	hasLower = 1 << 18 // the lower half of wSets is valid
	kindMask = hasList | hasSet | hasLower
	dead     = 1 << 31
	genOne   = 1 << 32
	genMask  = ^uint64(1<<32 - 1)
)

func (n *node) load(w int) uint64     { return atomic.LoadUint64(&n[w]) }
func (n *node) store(w int, v uint64) { atomic.StoreUint64(&n[w], v) }

// ready stores a word that readers ignore until a later store.
func (n *node) ready(w int, v uint64) { release(&n[w], v) }

// The methods below are for the writer, which may read its own words without atomics.

func (n *node) len() int         { return int(n[wState] & lenMask) }
func (n *node) off() int         { return int(n[wPlace] >> 16 & lenMask) }
func (n *node) end() int         { return n.off() + n.len() }
func (n *node) extent() uint32   { return uint32(n[wExtent] >> 32) }
func (n *node) children() uint32 { return uint32(n[wExtent]) }
func (n *node) kind() uint64     { return n[wState] & kindMask }

func (n *node) setChildren(k uint32) { n[wExtent] = n[wExtent]&genMask | uint64(k) }

// commit publishes a new length and kind of holders.
func (n *node) commit(length int, kind uint64) {
	jitter()
	n.store(wState, n[wState]&genMask+genOne|kind|uint64(length))
}

// changed tells readers that a valid word was replaced.
func (n *node) changed() {
	jitter()
	n.store(wState, n[wState]+genOne)
}

// retire marks the node dead.
func (n *node) retire() {
	jitter()
	n.store(wState, n[wState]&genMask+genOne|dead)
}

// link connects the nodes of an extent in order. Only the writer uses it.
type link struct{ prev, next uint32 }

const nodesPerPage = 1 << 8

type nodePage struct {
	nodes [nodesPerPage]node
	links [nodesPerPage]link
}

// nodeSlab allocates nodes by number from pages that never move and are never freed. Number 0 is
// unused.
type nodeSlab struct {
	pages pages[nodePage]
	freed []uint32
	used  uint32 // numbers ever allocated, including 0
}

func (s *nodeSlab) at(id uint32) *node {
	return &s.pages.writer[id/nodesPerPage].nodes[id%nodesPerPage]
}

// read is at for readers.
func (s *nodeSlab) read(id uint32) *node {
	return &s.pages.read(id / nodesPerPage).nodes[id%nodesPerPage]
}

func (s *nodeSlab) links(id uint32) *link {
	return &s.pages.writer[id/nodesPerPage].links[id%nodesPerPage]
}

func (s *nodeSlab) alloc() uint32 {
	if n := len(s.freed); n > 0 {
		id := s.freed[n-1]
		s.freed = s.freed[:n-1]
		return id
	}
	s.used = max(s.used, 1)
	if s.used%nodesPerPage == 0 || s.used == 1 {
		s.pages.add(new(nodePage))
	}
	s.used++
	return s.used - 1
}

func (s *nodeSlab) free(id uint32) {
	*s.links(id) = link{}
	s.freed = append(s.freed, id)
}

func (s *nodeSlab) live() int { return int(max(s.used, 1)) - 1 - len(s.freed) }

// pages is a directory of pages. The writer has its own view, which saves it an atomic load and a
// dependent load. Readers find a page through dir, which is replaced when it grows. A number is
// published after its page, so a reader that has the number sees the page.
type pages[T any] struct {
	directory atomic.Pointer[[]*T]
	_         [cacheLine]byte // the fields below are the writer's
	writer    []*T
}

func (d *pages[T]) read(i uint32) *T { return (*d.directory.Load())[i] }

// add appends a page. Its element is written before anything that refers to it is published. A new
// pointer is needed only if the array moved; storing one every time is cheap.
func (d *pages[T]) add(page *T) {
	d.writer = append(d.writer, page)
	all := d.writer
	d.directory.Store(&all)
}
