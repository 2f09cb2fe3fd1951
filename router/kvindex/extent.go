package kvindex

import "sync/atomic"

// extent is contiguous storage for the sequence hashes of successive blocks of a prompt. Its live
// parts are nodes; between them there may be holes, whose storage is not reused. Only writers use
// extents: nodes lead readers to the storage.
type extent struct {
	// genAndLen is generation<<16 | length in blocks, up to the end of the last node. It is stored
	// under the shard's lock and loaded without it to check whether an entry still names a block
	// here. A position beyond the end, or of an earlier generation, never becomes valid again.
	genAndLen uint32
	storage   uint32 // first line of the storage; 0: the record is free
	tail      uint32 // the last node
	class     uint8
	// sealed: the end was evicted, or blocks from which others branch off were removed. Engine
	// table entries or branches may still name these positions, so they are not reused before the
	// extent is freed.
	sealed bool
	// Where the extent branches off; 0 at the start of a prompt.
	parentGen    uint16
	parent       uint32
	parentPos    uint16
	inLeafList   bool          // the extent is in the list of leaves
	root         bool          // the first block begins a prompt
	used         uint32        // the tick of its last use
	older, newer uint32        // neighbours in the list of leaves
	clearMark    atomic.Uint32 // the last Clear that has visited the extent
}

// gen is the extent's generation; entries of an earlier extent with this number have another. The
// caller of gen and len holds the shard's lock.
func (r *extent) gen() uint16 { return uint16(r.genAndLen >> 16) }

func (r *extent) len() int { return int(r.genAndLen & lenMask) }

func (r *extent) setLen(n int) { release32(&r.genAndLen, r.genAndLen&^lenMask|uint32(n)) }

const (
	extentsPerPage = 1 << 8
	genBits        = 14
	lastGen        = 1<<genBits - 1
)

// extentSlab allocates extents by number; number 0 is unused. A freed number is reused with the
// next generation, and never again once the generations are used up.
type extentSlab struct {
	pages pages[[extentsPerPage]extent]
	freed []uint32
	used  uint32
	live  int
}

func (s *extentSlab) at(id uint32) *extent {
	return &s.pages.writer[id/extentsPerPage][id%extentsPerPage]
}

// read is at for callers without the shard's lock.
func (s *extentSlab) read(id uint32) *extent {
	return &s.pages.read(id / extentsPerPage)[id%extentsPerPage]
}

func (s *extentSlab) alloc() uint32 {
	s.live++
	if n := len(s.freed); n > 0 {
		id := s.freed[n-1]
		s.freed = s.freed[:n-1]
		return id
	}
	s.used = max(s.used, 1)
	if s.used%extentsPerPage == 0 || s.used == 1 {
		s.pages.add(new([extentsPerPage]extent))
	}
	s.used++
	return s.used - 1
}

func (s *extentSlab) free(id uint32) {
	s.live--
	r := s.at(id)
	gen := r.gen() + 1
	release32(&r.genAndLen, uint32(gen)<<16)
	r.storage, r.tail, r.class, r.sealed, r.root, r.inLeafList = 0, 0, 0, false, false, false
	r.parent, r.parentGen, r.parentPos = 0, 0, 0
	if gen < lastGen {
		s.freed = append(s.freed, id)
	}
}
