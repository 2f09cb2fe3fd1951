package kvindex

// run is contiguous storage for the sequence hashes of a prompt's blocks, one
// after the other. Its live parts are fragments (node); between them there may be
// holes, whose storage is not used again. Only the writer knows runs: readers are
// led to the storage by nodes.
type run struct {
	line  uint32 // of the storage; 0: the record is free
	tail  uint32 // the last fragment
	len   uint16 // blocks, to the end of the last fragment
	class uint8
	// sealed: the end was evicted, or what others branch off from was removed.
	// Entries of the side tables, or those branches, may still name its positions,
	// so they are not used again before the run is gone.
	sealed bool
	gen    uint16 // tells entries of an earlier run of this number
	// Where the run branches off: 0 at the start of a prompt.
	parentGen    uint16
	parent       uint32
	parentPos    uint16
	listed       bool   // in the list of leaves
	root         bool   // the first block begins a prompt
	mark         uint32 // the Clear that has passed here
	older, newer uint32 // neighbours in that list
}

const (
	runPage = 1 << 10
	genBits = 14
	lastGen = 1<<genBits - 1
)

// runSlab hands out runs by number; 0 is nobody. Numbers come back with another
// generation, and not at all once the generations are used up.
type runSlab struct {
	pages [][]run
	freed []uint32
	used  uint32
	live  int
}

func (s *runSlab) at(id uint32) *run { return &s.pages[id/runPage][id%runPage] }

func (s *runSlab) alloc() uint32 {
	s.live++
	if n := len(s.freed); n > 0 {
		id := s.freed[n-1]
		s.freed = s.freed[:n-1]
		return id
	}
	s.used = max(s.used, 1)
	if int(s.used/runPage) == len(s.pages) {
		s.pages = append(s.pages, make([]run, runPage))
	}
	s.used++
	return s.used - 1
}

func (s *runSlab) free(id uint32) {
	s.live--
	r := s.at(id)
	gen := r.gen + 1
	*r = run{gen: gen}
	if gen < lastGen {
		s.freed = append(s.freed, id)
	}
}
