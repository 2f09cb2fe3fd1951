package kvindex

import "sync/atomic"

// extent is contiguous storage for the sequence hashes of a prompt's blocks, one
// after the other. Its live parts are fragments (node); between them there may be
// holes, whose storage is not used again. Only writers know runs: readers are
// led to the storage by nodes.
type extent struct {
	// life is generation<<16 | blocks, to the end of the last fragment. It is stored
	// under the shard's lock and loaded without it, by whoever has an entry that
	// names a block here and wants to know whether it still does: what was once
	// past the end, or of an earlier generation, is so for good.
	genAndLen uint32
	storage   uint32 // of the storage; 0: the record is free
	tail      uint32 // the last fragment
	class     uint8
	// sealed: the end was evicted, or what others branch off from was removed.
	// Entries of the side tables, or those branches, may still name its positions,
	// so they are not used again before the run is gone.
	sealed bool
	// Where the run branches off: 0 at the start of a prompt.
	parentGen    uint16
	parent       uint32
	parentPos    uint16
	inLeafList   bool          // in the list of leaves
	root         bool          // the first block begins a prompt
	used         uint32        // the tick of its last use
	older, newer uint32        // neighbours in that list
	clearMark    atomic.Uint32 // the Clear that has passed here
}

// gen tells entries of an earlier run of this number. Like len it is for whoever has
// the shard's lock.
func (r *extent) gen() uint16 { return uint16(r.genAndLen >> 16) }

func (r *extent) len() int { return int(r.genAndLen & lenMask) }

func (r *extent) setLen(n int) { release32(&r.genAndLen, r.genAndLen&^lenMask|uint32(n)) }

const (
	extentsPerPage = 1 << 8
	genBits        = 14
	lastGen        = 1<<genBits - 1
)

// extentSlab hands out runs by number; 0 is nobody. Numbers come back with another
// generation, and not at all once the generations are used up.
type extentSlab struct {
	pages pages[[extentsPerPage]extent]
	freed []uint32
	used  uint32
	live  int
}

func (s *extentSlab) at(id uint32) *extent {
	return &s.pages.writer[id/extentsPerPage][id%extentsPerPage]
}

// read is at for who has not the shard's lock.
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
