package kvindex

import "sluice/router/blockhash"

// storing is one Store under way. It walks the event's blocks: those that the
// shard has already lie one after another in fragments, new ones are put at the
// end of a run. Side table and storage are filled on the way; the fragments, which
// readers see, change once for a stretch of blocks (flush).
type storing struct {
	ix   *radix
	sh   *shard
	ev   *Stored
	rank *rankState
	b    *batch
	res  StoreResult

	places []uint64 // of the batch, of an owner of places; else nil

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

// Store implements Index.
func (ix *radix) Store(ev *Stored) StoreResult {
	if !ev.valid() {
		return StoreResult{}
	}
	rank := ix.rank(ev.Slot)
	rank.mu.Lock()
	s := storing{ix: ix, ev: ev, rank: rank, b: &rank.b}
	for at := 0; ; {
		n := s.enter(at)
		ok := false
		if at == 0 {
			ok = s.open()
		} else {
			ok = s.reopen()
		}
		if !ok {
			s.leave(at, n)
			s.res.Orphan = true
			break
		}
		for i := at; i < at+n; i++ {
			s.seq = uint64(ev.seq(blockhash.Seq(s.seq), i))
			if id := s.find(); id != 0 {
				s.known(id, i-at)
				continue
			}
			s.new(i-at, ev.blocks()-i)
			if s.places != nil {
				i += s.moreNew(i+1-at, ev.seqs[i+1:at+n])
			}
		}
		s.flush()
		if s.run != 0 {
			s.sh.touch(s.run)
		}
		s.sh.unlock()
		s.forget()
		if at += n; at == ev.blocks() {
			break
		}
	}
	res := s.res
	ix.done(rank)
	return res
}

// enter enters the event's next engine hashes into the side table, up to one that
// comes twice, and returns how many.
func (s *storing) enter(at int) int {
	side, b := &s.rank.side, s.b
	if s.ev.places != nil {
		s.places = s.ev.places[at:min(len(s.ev.places), at+ownerBatch)]
		return len(s.places)
	}
	hashes := s.ev.Engine[at:min(len(s.ev.Engine), at+batchMax)]
	side.room(len(hashes), s.ix.factor, s.ix.validPlace)
	if len(hashes) > 1 {
		s.rank.sink += touchSide(side, hashes, s.ev.Tier, s.ix.factor)
	}
	mark := pending | uint64(s.ev.Tier)<<genBits
	for i, hash := range hashes {
		c, at := side.put(uint64(hash), s.ev.Tier, s.ix.factor)
		if c.place == mark {
			return i
		}
		b.cell[i], b.place[i] = at, c.place
		c.place = mark
	}
	return len(hashes)
}

// before is what the engine hash of block i of the batch stood for; 0: nothing.
func (s *storing) before(i int) uint64 {
	if s.places != nil {
		return 0
	}
	return s.b.place[i]
}

// lies notes where block i of the batch has come to lie.
func (s *storing) lies(i int, place uint64) {
	if s.places != nil {
		s.places[i] = place
	} else {
		s.rank.side.cell(s.b.cell[i]).place = place
	}
}

// pending is the place of a block on its way.
const pending = uint64(1<<32-1) << 32

// leave undoes enter.
func (s *storing) leave(at, n int) {
	if s.places != nil {
		return
	}
	side, b := &s.rank.side, s.b
	for i := range n {
		if b.place[i] != 0 {
			side.cell(b.cell[i]).place = b.place[i]
		}
	}
	for i := range n {
		if b.place[i] == 0 {
			cells, j := side.get(uint64(s.ev.Engine[at+i]), s.ev.Tier, s.ix.factor)
			side.remove(cells, j, s.ix.factor)
		}
	}
}

// open locks the shard of the event, having found the block before its first. It
// looks for the parent in the event's own tier first.
func (s *storing) open() bool {
	if !s.ev.HasParent {
		if s.ev.blocks() == 0 {
			s.sh = &s.ix.shards[0]
		} else {
			s.sh = s.ix.shardOf(uint64(s.ev.seq(0, 0)))
		}
		s.sh.lock()
		return true
	}
	if s.ev.places != nil {
		return s.parentAt(s.ev.parentAt)
	}
	if s.parentIn(s.ev.Tier) {
		return true
	}
	for tier := range NumTiers {
		if tier != s.ev.Tier && s.parentIn(tier) {
			return true
		}
	}
	return false
}

func (s *storing) parentIn(tier Tier) bool {
	cells, at := s.rank.side.get(uint64(s.ev.Parent), tier, s.ix.factor)
	if at < 0 {
		return false
	}
	p := cells[at].place
	if p>>32 == pending>>32 { // the parent's hash is among those that the event brings
		for i, hash := range s.ev.Engine {
			if hash == s.ev.Parent {
				p = s.b.place[i]
				break
			}
		}
	}
	return s.parentAt(p)
}

// parentAt is open for a parent that should lie at a place.
func (s *storing) parentAt(p uint64) bool {
	if p == 0 {
		return false
	}
	s.sh = &s.ix.shards[placeShard(p)]
	s.sh.lock()
	if s.ix.valid(p) {
		s.stand(p)
		if s.ev.isParent(blockhash.Seq(s.seq)) {
			return true
		}
		s.run, s.pos, s.node, s.seq = 0, 0, 0, 0
	}
	s.sh.unlock()
	return false
}

// stand makes a place the block before.
func (s *storing) stand(p uint64) {
	s.run, s.pos = placeRun(p), placePos(p)
	r := s.sh.runs.at(s.run)
	s.node, s.seq = s.sh.nodeOf(r, s.pos), s.sh.word(r, s.pos)
}

// reopen locks the shard for the next batch. Meanwhile the block before may have
// been evicted: then the rest has no parent.
func (s *storing) reopen() bool {
	s.sh.lock()
	if r := s.sh.runs.at(s.run); s.run == 0 || s.pos >= r.len() || s.sh.word(r, s.pos) != s.seq {
		s.sh.unlock()
		return false
	}
	s.node = s.sh.nodeOf(s.sh.runs.at(s.run), s.pos)
	if s.node == 0 {
		s.sh.unlock()
		return false
	}
	return true
}

// find gives the fragment of the block s.seq and moves s.run and s.pos to it, if
// it is in the index. While nothing is loose, what follows a block lies behind it
// in its run, or begins a run that counts as a child of the fragment it ends.
func (s *storing) find() uint32 {
	sh := s.sh
	nodes := &sh.table.nodes
	if s.node != 0 {
		n := nodes.at(s.node)
		switch next := nodes.links(s.node).next; {
		case s.pos+1 < n.end():
			if sh.word(sh.runs.at(s.run), s.pos+1) == s.seq {
				s.pos++
				return s.node
			}
			if sh.loose == 0 {
				return 0
			}
		case next != 0 && nodes.at(next)[wFirst] == s.seq && nodes.at(next).off() == s.pos+1:
			s.pos++
			return next
		case n.kids() == 0 && sh.loose == 0:
			return 0
		}
	} else if s.run != 0 && sh.loose == 0 {
		return 0 // after a new block
	}
	id := sh.table.find(s.seq)
	if id != 0 {
		if s.fresh != 0 { // what is pending ends before this
			s.flush()
		}
		s.run, s.pos = nodes.at(id).run(), nodes.at(id).off()
	}
	return id
}

// known stores a block that somebody has: fragment id at s.run, s.pos. It is block i
// of the batch.
func (s *storing) known(id uint32, i int) {
	sh, ev := s.sh, s.ev
	// A block may follow one that it does not lie behind only where two have one hash.
	if s.add != 0 && (s.add != id || s.pos != s.to) {
		s.flush() // which may join id with what lies before it
		id = s.node
	}
	s.node = id
	here, before := sh.place(s.run, s.pos, ev.Tier), s.before(i)
	s.lies(i, here)
	found := s.stood(before)
	if found && before == here {
		s.res.Repeated++
		return
	}
	if !found {
		sh.entries++
	}
	// Within a stretch that is being added the rank holds none of it yet.
	held := s.add == 0 && sh.holds(sh.table.nodes.at(id), ev.Slot, ev.Tier)
	if held {
		s.res.Repeated++
		sh.copies[copyOf{s.run, uint16(s.pos), ev.Slot, ev.Tier}]++
	} else {
		s.res.Added++
		if s.add == 0 {
			s.add, s.from = id, s.pos
		}
		s.to = s.pos + 1
	}
	if found {
		s.displace(before)
	}
}

// stood says whether a place still meant a block.
func (s *storing) stood(before uint64) bool {
	if before == 0 {
		return false
	}
	if !s.ix.valid(before) {
		s.rank.side.stale.Add(-1)
		return false
	}
	return true
}

// new stores a block that nobody has, block i of the batch; left is how many of the
// event there are yet, with this one.
func (s *storing) new(i, left int) {
	sh := s.sh
	if s.fresh == 0 || s.to == maxRun {
		s.flush()
		s.begin(left)
	}
	sh.append(sh.runs.at(s.fresh), s.to, s.seq, left)
	s.run, s.pos, s.node = s.fresh, s.to, 0
	s.to++
	before := s.before(i)
	s.lies(i, sh.place(s.run, s.pos, s.ev.Tier))
	s.res.Added++
	if s.stood(before) {
		s.displace(before)
	} else {
		sh.entries++
	}
}

// moreNew is new for blocks of an owner's, from block i of the batch on, as many as there is
// room for behind the one before.
func (s *storing) moreNew(i int, seqs []blockhash.Seq) int {
	sh := s.sh
	r := sh.runs.at(s.fresh)
	n := min(len(seqs), int(classes[r.class])-s.to)
	if sh.loose > 0 { // else nothing is after a new block
		for i, seq := range seqs[:max(n, 0)] {
			if sh.table.mayHave(uint64(seq)) {
				n = i
				break
			}
		}
	}
	if n <= 0 {
		return 0
	}
	p, at := sh.words.page(r.line)
	to, places := p[at+uint32(s.to):][:n], s.places[i:][:n]
	place := sh.place(s.fresh, s.to, s.ev.Tier)
	for k, seq := range seqs[:n] {
		release(&to[k], uint64(seq))
		places[k] = placeAfter(place, k)
	}
	s.seq = uint64(seqs[n-1])
	s.pos += n
	s.to += n
	s.res.Added += n
	sh.entries += n
	return n
}

// begin finds where new blocks go: to the end of the run if the block before lies
// there, or to a run of their own.
func (s *storing) begin(left int) {
	sh := s.sh
	if s.run != 0 {
		if r := sh.runs.at(s.run); s.pos+1 == r.len() && !r.sealed && s.pos+1 < maxRun {
			s.fresh, s.from, s.to = s.run, s.pos+1, s.pos+1
			return
		}
	}
	id := sh.runs.alloc()
	r := sh.runs.at(id)
	class := classFor(min(left, maxRun))
	r.class, r.line = uint8(class), sh.words.alloc(class)
	if s.run != 0 {
		sh.attach(r, s.run, s.pos)
	} else {
		r.root = true
	}
	s.fresh, s.from, s.to = id, 0, 0
}

// displace takes away what an engine hash stood for until now. That may undo or
// join fragments, so it comes after everything before it is in place. What lies in
// another shard has to wait.
func (s *storing) displace(before uint64) {
	sh := s.sh
	if placeShard(before) != sh.no {
		s.rank.displaced = append(s.rank.displaced, before)
		// It counts there as long as it stands.
		sh.entries++
		return
	}
	s.flush()
	if id, pos := placeRun(before), placePos(before); !sh.oneCopyLess(id, pos, s.ev.Slot, s.ev.Tier) {
		sh.unhold(id, pos, pos+1, s.ev.Slot, s.ev.Tier)
	}
	s.node = sh.nodeOf(sh.runs.at(s.run), s.pos)
}

// forget takes away what was displaced in other shards.
func (s *storing) forget() {
	for places := s.rank.displaced; len(places) > 0; {
		sh := &s.ix.shards[placeShard(places[0])]
		sh.lock()
		n, _ := sh.takeAway(places, s.ev.Slot, s.ev.Tier)
		sh.unlock()
		places = places[n:]
	}
	s.rank.displaced = s.rank.displaced[:0]
}

// flush makes the stretch visible and leaves s.node at the block before.
func (s *storing) flush() {
	sh := s.sh
	switch {
	case s.fresh != 0:
		id := s.fresh
		s.fresh = 0
		if s.to > s.from {
			sh.counts(s.ev.Slot, s.to-s.from)
			sh.publish(id, s.from, s.to, s.ev.Slot, s.ev.Tier)
		}
	case s.add != 0:
		id := s.add
		s.add = 0
		sh.counts(s.ev.Slot, s.to-s.from)
		sh.hold(id, s.from, s.to, s.ev.Slot, s.ev.Tier)
	default:
		return
	}
	if s.run != 0 {
		s.node = sh.nodeOf(sh.runs.at(s.run), s.pos)
	}
}
