package kvindex

import "sluice/router/blockhash"

// storeOp is the state of one Store. It walks the event's blocks. Blocks that the shard already has
// lie one after another in nodes; new blocks are appended to an extent. The engine table and the
// storage are filled during the walk. The nodes, which readers see, change once per stretch of
// blocks (flush).
type storeOp struct {
	ix    *radix
	shard *shard
	ev    *Stored
	rank  *rankState
	batch *batch
	res   StoreResult

	places []uint64 // of the batch, for an owner of places; else nil

	// The position of the previous block. An extent of 0: the prompt begins here.
	extent uint32
	pos    int
	node   uint32 // the previous block's node; 0 while it is in none
	seq    uint64

	// The pending stretch: positions from…to of extent newExtent are new, or the rank is to be
	// added to those positions of node sharedNode.
	newExtent, sharedNode uint32
	from, to              int
}

// Store implements Index.
func (ix *radix) Store(ev *Stored) StoreResult {
	if !ev.valid() {
		return StoreResult{}
	}
	rank := ix.rank(ev.Slot)
	rank.mu.Lock()
	s := storeOp{ix: ix, ev: ev, rank: rank, batch: &rank.batch}
	for at := 0; ; {
		n := s.insertHashes(at)
		ok := false
		if at == 0 {
			ok = s.open()
		} else {
			ok = s.reopen()
		}
		if !ok {
			s.rollBack(at, n)
			s.res.Orphan = true
			break
		}
		for i := at; i < at+n; i++ {
			s.seq = uint64(ev.seq(blockhash.Seq(s.seq), i))
			if id := s.find(); id != 0 {
				s.storeKnown(id, i-at)
				continue
			}
			s.storeNew(i-at, ev.blocks()-i)
			if s.places != nil {
				i += s.storeNewBatch(i+1-at, ev.seqs[i+1:at+n])
			}
		}
		s.flush()
		if s.extent != 0 {
			s.shard.markUsed(s.extent)
		}
		s.shard.unlock()
		s.removeDisplaced()
		if at += n; at == ev.blocks() {
			break
		}
	}
	res := s.res
	ix.unlockRank(rank)
	return res
}

// insertHashes inserts the event's next engine hashes into the engine table, up to the first
// duplicate, and returns how many it inserted.
func (s *storeOp) insertHashes(at int) int {
	side, b := &s.rank.engineTable, s.batch
	if s.ev.places != nil {
		s.places = s.ev.places[at:min(len(s.ev.places), at+ownerBatch)]
		return len(s.places)
	}
	hashes := s.ev.Engine[at:min(len(s.ev.Engine), at+batchMax)]
	side.ensureRoom(len(hashes), s.ix.factor, s.ix.validPlace)
	if len(hashes) > 1 {
		s.rank.sink += prefetchEngine(side, hashes, s.ev.Tier, s.ix.factor)
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

// before returns the place that the engine hash of block i of the batch had until now; 0: none.
func (s *storeOp) before(i int) uint64 {
	if s.places != nil {
		return 0
	}
	return s.batch.place[i]
}

// setPlace records the place of block i of the batch.
func (s *storeOp) setPlace(i int, place uint64) {
	if s.places != nil {
		s.places[i] = place
	} else {
		s.rank.engineTable.cell(s.batch.cell[i]).place = place
	}
}

// pending is the place of a block whose place is not known yet.
const pending = uint64(1<<32-1) << 32

// rollBack undoes insertHashes.
func (s *storeOp) rollBack(at, n int) {
	if s.places != nil {
		return
	}
	side, b := &s.rank.engineTable, s.batch
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

// open finds the parent of the event's first block and locks the event's shard. It looks for the
// parent in the event's own tier first.
func (s *storeOp) open() bool {
	if !s.ev.HasParent {
		if s.ev.blocks() == 0 {
			s.shard = &s.ix.shards[0]
		} else {
			s.shard = s.ix.shardOf(uint64(s.ev.seq(0, 0)))
		}
		s.shard.lock()
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

func (s *storeOp) parentIn(tier Tier) bool {
	cells, at := s.rank.engineTable.get(uint64(s.ev.Parent), tier, s.ix.factor)
	if at < 0 {
		return false
	}
	p := cells[at].place
	if p>>32 == pending>>32 { // the event itself contains the parent's hash
		for i, hash := range s.ev.Engine {
			if hash == s.ev.Parent {
				p = s.batch.place[i]
				break
			}
		}
	}
	return s.parentAt(p)
}

// parentAt is open for a parent that is expected at place p.
func (s *storeOp) parentAt(p uint64) bool {
	if p == 0 {
		return false
	}
	s.shard = &s.ix.shards[placeShard(p)]
	s.shard.lock()
	if s.ix.valid(p) {
		s.setPrevious(p)
		if s.ev.isParent(blockhash.Seq(s.seq)) {
			return true
		}
		s.extent, s.pos, s.node, s.seq = 0, 0, 0, 0
	}
	s.shard.unlock()
	return false
}

// setPrevious makes the block at place p the previous block.
func (s *storeOp) setPrevious(p uint64) {
	s.extent, s.pos = placeExtent(p), placePos(p)
	r := s.shard.extents.at(s.extent)
	s.node, s.seq = s.shard.nodeOf(r, s.pos), s.shard.hashAt(r, s.pos)
}

// reopen locks the shard for the next batch. It fails if the previous block was evicted in the
// meantime: the remaining blocks then have no parent.
func (s *storeOp) reopen() bool {
	s.shard.lock()
	if r := s.shard.extents.at(s.extent); s.extent == 0 || s.pos >= r.len() || s.shard.hashAt(r, s.pos) != s.seq {
		s.shard.unlock()
		return false
	}
	s.node = s.shard.nodeOf(s.shard.extents.at(s.extent), s.pos)
	if s.node == 0 {
		s.shard.unlock()
		return false
	}
	return true
}

// find returns the node of block s.seq and moves s.extent and s.pos to it, or returns 0 if the
// block is not in the index. While the shard has nothing unanchored, the successor of a block lies
// behind it in its extent or begins an extent that is a child of the node that ends there; then no
// table look-up is needed.
func (s *storeOp) find() uint32 {
	sh := s.shard
	nodes := &sh.table.nodes
	if s.node != 0 {
		n := nodes.at(s.node)
		switch next := nodes.links(s.node).next; {
		case s.pos+1 < n.end():
			if sh.hashAt(sh.extents.at(s.extent), s.pos+1) == s.seq {
				s.pos++
				return s.node
			}
			if sh.unanchored == 0 {
				return 0
			}
		case next != 0 && nodes.at(next)[wFirst] == s.seq && nodes.at(next).off() == s.pos+1:
			s.pos++
			return next
		case n.children() == 0 && sh.unanchored == 0:
			return 0
		}
	} else if s.extent != 0 && sh.unanchored == 0 {
		return 0 // nothing follows a new block
	}
	id := sh.table.find(s.seq)
	if id != 0 {
		if s.newExtent != 0 { // the pending stretch ends before this block
			s.flush()
		}
		s.extent, s.pos = nodes.at(id).extent(), nodes.at(id).off()
	}
	return id
}

// storeKnown stores block i of the batch, which the index already has in node id at s.extent,
// s.pos.
func (s *storeOp) storeKnown(id uint32, i int) {
	sh, ev := s.shard, s.ev
	// A block can follow one that it does not lie behind only where two blocks have the same hash.
	if s.sharedNode != 0 && (s.sharedNode != id || s.pos != s.to) {
		s.flush() // may join id with its predecessor
		id = s.node
	}
	s.node = id
	here, before := sh.place(s.extent, s.pos, ev.Tier), s.before(i)
	s.setPlace(i, here)
	found := s.wasValid(before)
	if found && before == here {
		s.res.Repeated++
		return
	}
	if !found {
		sh.entries++
	}
	// Within a pending stretch the rank has none of the blocks yet.
	cached := s.sharedNode == 0 && sh.isHolder(sh.table.nodes.at(id), ev.Slot, ev.Tier)
	if cached {
		s.res.Repeated++
		sh.copies[copyOf{s.extent, uint16(s.pos), ev.Slot, ev.Tier}]++
	} else {
		s.res.Added++
		if s.sharedNode == 0 {
			s.sharedNode, s.from = id, s.pos
		}
		s.to = s.pos + 1
	}
	if found {
		s.displace(before)
	}
}

// wasValid reports whether a place still named a block.
func (s *storeOp) wasValid(before uint64) bool {
	if before == 0 {
		return false
	}
	if !s.ix.valid(before) {
		s.rank.engineTable.stale.Add(-1)
		return false
	}
	return true
}

// storeNew stores block i of the batch, which the index does not have. remaining is the number of
// blocks left in the event, including this one.
func (s *storeOp) storeNew(i, remaining int) {
	sh := s.shard
	if s.newExtent == 0 || s.to == maxExtent {
		s.flush()
		s.allocate(remaining)
	}
	sh.append(sh.extents.at(s.newExtent), s.to, s.seq, remaining)
	s.extent, s.pos, s.node = s.newExtent, s.to, 0
	s.to++
	before := s.before(i)
	s.setPlace(i, sh.place(s.extent, s.pos, s.ev.Tier))
	s.res.Added++
	if s.wasValid(before) {
		s.displace(before)
	} else {
		sh.entries++
	}
}

// storeNewBatch is storeNew for blocks of an owner of places: it stores blocks from i of the batch
// on, as many as fit behind the previous one, and returns how many.
func (s *storeOp) storeNewBatch(i int, seqs []blockhash.Seq) int {
	sh := s.shard
	r := sh.extents.at(s.newExtent)
	n := min(len(seqs), int(classes[r.class])-s.to)
	if sh.unanchored > 0 { // else nothing follows a new block
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
	p, at := sh.words.page(r.storage)
	to, places := p[at+uint32(s.to):][:n], s.places[i:][:n]
	place := sh.place(s.newExtent, s.to, s.ev.Tier)
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

// allocate chooses the storage of new blocks: the end of the extent if the previous block is its
// last one, else a new extent.
func (s *storeOp) allocate(remaining int) {
	sh := s.shard
	if s.extent != 0 {
		if r := sh.extents.at(s.extent); s.pos+1 == r.len() && !r.sealed && s.pos+1 < maxExtent {
			s.newExtent, s.from, s.to = s.extent, s.pos+1, s.pos+1
			return
		}
	}
	id := sh.extents.alloc()
	r := sh.extents.at(id)
	class := classFor(min(remaining, maxExtent))
	r.class, r.storage = uint8(class), sh.words.alloc(class)
	if s.extent != 0 {
		sh.attach(r, s.extent, s.pos)
	} else {
		r.root = true
	}
	s.newExtent, s.from, s.to = id, 0, 0
}

// displace removes the block that an engine hash named until now. This may delete or join nodes, so
// all earlier blocks are stored first. A block in another shard is removed later, by
// removeDisplaced.
func (s *storeOp) displace(before uint64) {
	sh := s.shard
	if placeShard(before) != sh.number {
		s.rank.displaced = append(s.rank.displaced, before)
		// The entry counts there until removeDisplaced removes it.
		sh.entries++
		return
	}
	s.flush()
	if id, pos := placeExtent(before), placePos(before); !sh.removeCopy(id, pos, s.ev.Slot, s.ev.Tier) {
		sh.removeRange(id, pos, pos+1, s.ev.Slot, s.ev.Tier)
	}
	s.node = sh.nodeOf(sh.extents.at(s.extent), s.pos)
}

// removeDisplaced removes the displaced blocks that lie in other shards.
func (s *storeOp) removeDisplaced() {
	for places := s.rank.displaced; len(places) > 0; {
		sh := &s.ix.shards[placeShard(places[0])]
		sh.lock()
		n, _ := sh.removeBlocks(places, s.ev.Slot, s.ev.Tier)
		sh.unlock()
		places = places[n:]
	}
	s.rank.displaced = s.rank.displaced[:0]
}

// flush publishes the pending stretch and sets s.node to the previous block's node.
func (s *storeOp) flush() {
	sh := s.shard
	switch {
	case s.newExtent != 0:
		id := s.newExtent
		s.newExtent = 0
		if s.to > s.from {
			sh.addCounts(s.ev.Slot, s.ev.Tier, s.to-s.from)
			sh.publish(id, s.from, s.to, s.ev.Slot, s.ev.Tier)
		}
	case s.sharedNode != 0:
		id := s.sharedNode
		s.sharedNode = 0
		sh.addCounts(s.ev.Slot, s.ev.Tier, s.to-s.from)
		sh.addRange(id, s.from, s.to, s.ev.Slot, s.ev.Tier)
	default:
		return
	}
	if s.extent != 0 {
		s.node = sh.nodeOf(sh.extents.at(s.extent), s.pos)
	}
}
