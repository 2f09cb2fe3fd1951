package kvindex

import "sluice/router/blockhash"

// storing is one Store under way. It walks the event's blocks: those that the
// index has already lie one after another in fragments, new ones are put at the
// end of a run. Side table and storage are filled on the way; the fragments, which
// readers see, change once for a stretch of blocks (flush).
type storing struct {
	ix   *radix
	ev   *Stored
	side *sideTable
	res  StoreResult

	// The block before: where it lies. No run: the prompt begins.
	run  uint32
	pos  int
	node uint32 // its fragment; 0 while it is not yet in one
	seq  uint64

	// The stretch to come: positions from…to of run fresh are new, or are to be
	// added to what the rank holds of fragment add.
	fresh, add uint32
	from, to   int
}

// findParent looks in the event's own tier first.
func (s *storing) findParent() bool {
	if s.parentIn(s.ev.Tier) {
		return true
	}
	for tier := range NumTiers {
		if s.parentIn(tier) {
			return true
		}
	}
	return false
}

func (s *storing) parentIn(tier Tier) bool {
	cells, at := s.side.get(uint64(s.ev.Parent), tier, s.ix.factor)
	if at < 0 || !s.ix.valid(cells[at].place) {
		return false
	}
	p := cells[at].place
	r := s.ix.runs.at(placeRun(p))
	seq := s.ix.word(r, placePos(p))
	if !s.ev.isParent(blockhash.Seq(seq)) {
		return false
	}
	s.run, s.pos, s.seq = placeRun(p), placePos(p), seq
	s.node = s.ix.nodeOf(r, s.pos)
	return true
}

func (s *storing) store() {
	s.side.room(len(s.ev.Engine), s.ix.factor, s.ix.validPlace)
	s.ix.sink += s.side.touch(s.ev.Engine, s.ev.Tier, s.ix.factor)
	for i, hash := range s.ev.Engine {
		s.seq = uint64(s.ev.seq(blockhash.Seq(s.seq), i))
		if id := s.find(); id != 0 {
			s.known(id, uint64(hash))
		} else {
			s.new(uint64(hash), len(s.ev.Engine)-i)
		}
	}
	s.flush()
	if s.run != 0 {
		s.ix.touch(s.run)
	}
}

// find gives the fragment of the block s.seq and moves s.run and s.pos to it, if
// it is in the index.
func (s *storing) find() uint32 {
	nodes := &s.ix.table.nodes
	if s.node != 0 {
		n := nodes.at(s.node)
		if s.pos+1 < n.end() {
			if s.ix.word(s.ix.runs.at(s.run), s.pos+1) == s.seq {
				s.pos++
				return s.node
			}
		} else if next := nodes.links(s.node).next; next != 0 && nodes.at(next)[wFirst] == s.seq && nodes.at(next).off() == s.pos+1 {
			s.pos++
			return next
		}
	}
	id := s.ix.table.find(s.seq)
	if id != 0 {
		if s.fresh != 0 { // what is pending ends before this
			s.flush()
		}
		s.run, s.pos = nodes.at(id).run(), nodes.at(id).off()
	}
	return id
}

// known stores a block that somebody has: fragment id at s.run, s.pos.
func (s *storing) known(id uint32, hash uint64) {
	ix, ev := s.ix, s.ev
	if s.add != 0 && s.add != id {
		s.flush() // which may join id with what lies before it
		id = s.node
	}
	s.node = id
	here := placeOf(s.run, s.pos, ev.Tier, ix.runs.at(s.run).gen)
	c, found := s.side.put(hash, ev.Tier, ix.factor)
	before := c.place
	if found && !ix.valid(before) {
		found = false
		s.side.stale = max(0, s.side.stale-1)
	}
	if found && before == here {
		s.res.Repeated++
		return
	}
	c.place = here
	if !found {
		ix.entries++
	}
	// Within a stretch that is being added the rank holds none of it yet.
	held := s.add == 0 && ix.holds(ix.table.nodes.at(id), ev.Slot, ev.Tier)
	if held {
		s.res.Repeated++
		ix.copies[copyOf{s.run, uint16(s.pos), ev.Slot, ev.Tier}]++
	} else {
		s.res.Added++
		if s.add == 0 {
			s.add, s.from = id, s.pos
		}
		s.to = s.pos + 1
	}
	if found {
		s.dropOld(before)
	}
}

// new stores a block that nobody has; left is how many of the event there are yet,
// with this one.
func (s *storing) new(hash uint64, left int) {
	ix, ev := s.ix, s.ev
	if s.fresh == 0 || s.to == maxRun {
		s.flush()
		s.begin(left)
	}
	r := ix.runs.at(s.fresh)
	ix.append(s.fresh, r, s.seq, left)
	s.run, s.pos, s.node = s.fresh, s.to, 0
	s.to++
	c, found := s.side.put(hash, ev.Tier, ix.factor)
	before := c.place
	if found && !ix.valid(before) {
		found = false
		s.side.stale = max(0, s.side.stale-1)
	}
	c.place = placeOf(s.run, s.pos, ev.Tier, r.gen)
	if !found {
		ix.entries++
	}
	s.res.Added++
	if found {
		s.dropOld(before)
	}
}

// begin finds where new blocks go: to the end of the run if the block before lies
// there, or to a run of their own.
func (s *storing) begin(left int) {
	ix := s.ix
	if s.run != 0 {
		if r := ix.runs.at(s.run); s.pos+1 == int(r.len) && !r.sealed && int(r.len) < maxRun {
			s.fresh, s.from, s.to = s.run, s.pos+1, s.pos+1
			return
		}
	}
	id := ix.runs.alloc()
	r := ix.runs.at(id)
	class := classFor(min(left, maxRun))
	r.class, r.line = uint8(class), ix.words.alloc(class)
	if s.run != 0 {
		ix.attach(r, s.run, s.pos)
	} else {
		r.root = true
	}
	s.fresh, s.from, s.to = id, 0, 0
}

// dropOld takes away what an engine hash stood for until now. That may undo or
// join fragments, so it comes after everything before it is in place.
func (s *storing) dropOld(before uint64) {
	s.flush()
	ix := s.ix
	if id, pos := placeRun(before), placePos(before); !ix.oneCopyLess(id, pos, s.ev.Slot, s.ev.Tier) {
		ix.unhold(id, pos, pos+1, s.ev.Slot, s.ev.Tier)
	}
	s.node = ix.nodeOf(ix.runs.at(s.run), s.pos)
}

// flush makes the stretch visible and leaves s.node at the block before.
func (s *storing) flush() {
	ix := s.ix
	switch {
	case s.fresh != 0:
		id := s.fresh
		s.fresh = 0
		if s.to > s.from {
			ix.counts(s.ev.Slot, s.to-s.from)
			ix.publish(id, s.from, s.to, s.ev.Slot, s.ev.Tier)
		}
	case s.add != 0:
		id := s.add
		s.add = 0
		ix.counts(s.ev.Slot, s.to-s.from)
		ix.hold(id, s.from, s.to, s.ev.Slot, s.ev.Tier)
	default:
		return
	}
	if s.run != 0 {
		s.node = ix.nodeOf(ix.runs.at(s.run), s.pos)
	}
}
