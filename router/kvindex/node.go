package kvindex

import "sync/atomic"

// node is one node of the index of a run: blocks that lie together in a run's storage and
// are held by the same ranks in the same tiers. It fills one cache line, so that
// a reader who passes a whole node loads two lines: the slot of the reader table
// and this.
//
// Memory order. One writer at a time (the shard's mutex) changes nodes, readers
// never lock. Every word that a reader looks at is stored whole and in order and
// loaded atomically, and every change becomes visible by the store of one word:
//
//   - the length and the kind of the holders live in wState beside a generation
//     that grows with each change; other words that belong to a new length or kind
//     are stored before it and mean nothing under the old one;
//   - words that change alone (one holder's bit, the storage's place) are stored
//     first, then the generation grows.
//
// A reader loads wState, the rest, and wState again: equal states mean that what it
// read was the node as it stood. There is no state "being written", so a reader
// never waits for a writer that was preempted; it repeats only what a writer has
// finished changing. A node that goes is taken out of the reader table first and
// marked dead second; its line is used again only as a node, with a generation of
// its own, so that a late reader sees the change, never somebody else's memory.
// The generation has 32 bits: a reader would have to sleep through exactly 2^32
// changes of one node, within one pass, to be deceived.
type node [8]uint64

// The words of a node.
const (
	wState  = iota // generation<<32 | flags | length in blocks
	wFirst         // sequence hash of the first block
	wLast          // and of the last one
	wLow           // device: holders among slots 0…63, as bits
	wPlace         // line of the run's storage<<32 | offset of the first block<<16
	wList          // device: up to four holders from slot 64 on, sorted, 16 bits each
	wSets          // set of device holders from slot 64 on<<32 | set of the lower tiers
	wExtent        // run<<32 | child runs that branch off at the end; the writer's
)

// The flags and the length in wState.
const (
	lenMask  = 1<<16 - 1
	hasList  = 1 << 16 // wList counts
	hasSet   = 1 << 17 // the upper half of wSets counts
	hasLower = 1 << 18 // the lower half of wSets counts
	kindMask = hasList | hasSet | hasLower
	dead     = 1 << 31
	genOne   = 1 << 32
	genMask  = ^uint64(1<<32 - 1)
)

func (n *node) load(w int) uint64     { return atomic.LoadUint64(&n[w]) }
func (n *node) store(w int, v uint64) { atomic.StoreUint64(&n[w], v) }

// ready stores a word that means nothing to readers before a later store.
func (n *node) ready(w int, v uint64) { release(&n[w], v) }

// What follows is the writer's: it may read its own words plainly.

func (n *node) len() int         { return int(n[wState] & lenMask) }
func (n *node) off() int         { return int(n[wPlace] >> 16 & lenMask) }
func (n *node) end() int         { return n.off() + n.len() }
func (n *node) extent() uint32   { return uint32(n[wExtent] >> 32) }
func (n *node) children() uint32 { return uint32(n[wExtent]) }
func (n *node) kind() uint64     { return n[wState] & kindMask }

func (n *node) setChildren(k uint32) { n[wExtent] = n[wExtent]&genMask | uint64(k) }

// commit makes a new length and kind of holders visible.
func (n *node) commit(length int, kind uint64) {
	jitter()
	n.store(wState, n[wState]&genMask+genOne|kind|uint64(length))
}

// changed tells readers that a word which counts has been replaced.
func (n *node) changed() {
	jitter()
	n.store(wState, n[wState]+genOne)
}

// retire marks the node dead.
func (n *node) retire() {
	jitter()
	n.store(wState, n[wState]&genMask+genOne|dead)
}

// link joins the fragments of a run, in order. Only the writer looks at it.
type link struct{ prev, next uint32 }

const nodesPerPage = 1 << 8

type nodePage struct {
	nodes [nodesPerPage]node
	links [nodesPerPage]link
}

// nodeSlab hands out nodes by number from pages that never move and are never
// given back. Number 0 is nobody.
type nodeSlab struct {
	pages pages[nodePage]
	freed []uint32
	used  uint32 // numbers ever given out, with 0
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

// pages is a directory of pages. The writer has its own view, which costs it no
// atomic load and one dependent load less. Readers find a page through dir, which is
// replaced when it grows: a number is published after its page, so whoever has read
// the number sees the page.
type pages[T any] struct {
	directory atomic.Pointer[[]*T]
	_         [cacheLine]byte // what follows is the writer's
	writer    []*T
}

func (d *pages[T]) read(i uint32) *T { return (*d.directory.Load())[i] }

// add appends a page. Elements are written before anything that leads to them is
// published; only a move of the array needs a new pointer, but storing one always costs
// nothing that counts.
func (d *pages[T]) add(page *T) {
	d.writer = append(d.writer, page)
	all := d.writer
	d.directory.Store(&all)
}
