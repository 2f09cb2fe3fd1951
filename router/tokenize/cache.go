package tokenize

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/upstream"
)

// hash identifies an engine request. Requests are compared by it alone: a collision, at a
// probability of 2^-128, would only cost a wrong affinity, and the seed, different in every
// process, keeps a client from constructing one.
type hash = xxh3.Uint128

var seed = rand.Uint64()

var hashers = sync.Pool{New: func() any { return xxh3.NewSeed(seed) }}

// key hashes the composed request.
func (w *promptWork) key() hash {
	h := hashers.Get().(*xxh3.Hasher)
	h.Reset()
	for _, s := range w.segs {
		_, _ = h.Write(s)
	}
	k := h.Sum128()
	hashers.Put(h)
	return k
}

// cache is an LRU of prompts' ids bounded in bytes, in shards so that requests seldom contend for a
// lock, and contains the running lookups. A lock is held for a map access and a few pointer writes;
// stored ids are immutable.
type cache struct {
	shards [16]shard
}

type shard struct {
	mu      sync.Mutex
	entries map[hash]*entry
	lookups map[hash]*lookup
	newest  *entry
	oldest  *entry
	bytes   int64
	limit   int64
	_       [64]byte // puts the next shard's lock on another cache line
}

type entry struct {
	key          hash
	ids          *idList
	newer, older *entry
}

// entryOverhead is approximately the memory of an entry besides its ids: the structs, its share of
// the map, the rounding of the slice.
const entryOverhead = 160

func (e *entry) cost() int64 { return int64(cap(e.ids.packed)) + entryOverhead }

func newCache() *cache {
	c := new(cache)
	for i := range c.shards {
		s := &c.shards[i]
		s.entries = make(map[hash]*entry)
		s.lookups = make(map[hash]*lookup)
	}
	return c
}

// setLimit sets the bound of the cache in bytes.
func (c *cache) setLimit(bytes int64) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.limit = max(0, bytes) / int64(len(c.shards))
		s.trim()
		s.mu.Unlock()
	}
}

func (c *cache) shard(k hash) *shard { return &c.shards[k.Hi%uint64(len(c.shards))] }

// get returns the ids of k, which must not be changed; or the running lookup for it; or, with
// start, a new lookup that the caller leads and must finish.
func (c *cache) get(k hash, start bool) (ids *idList, f *lookup, leads bool) {
	s := c.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[k]; e != nil {
		s.unlink(e)
		s.pushNewest(e)
		return e.ids, nil, false
	}
	if f = s.lookups[k]; f != nil || !start {
		return nil, f, false
	}
	f = &lookup{done: make(chan struct{})}
	s.lookups[k] = f
	return nil, f, true
}

// finish ends a lookup: its ids, if it has any, are stored in the cache and passed to all waiters.
func (c *cache) finish(k hash, f *lookup) {
	s := c.shard(k)
	s.mu.Lock()
	delete(s.lookups, k)
	if f.ids != nil {
		s.put(&entry{key: k, ids: f.ids})
	}
	s.mu.Unlock()
	close(f.done)
}

func (s *shard) put(e *entry) {
	if e.cost() > s.limit || s.entries[e.key] != nil {
		return
	}
	s.entries[e.key] = e
	s.pushNewest(e)
	s.bytes += e.cost()
	s.trim()
}

// trim drops the oldest entries until the rest is within the limit.
func (s *shard) trim() {
	for s.bytes > s.limit {
		old := s.oldest
		s.unlink(old)
		delete(s.entries, old.key)
		s.bytes -= old.cost()
	}
}

func (s *shard) pushNewest(e *entry) {
	e.older, e.newer = s.newest, nil
	if s.newest != nil {
		s.newest.newer = e
	} else {
		s.oldest = e
	}
	s.newest = e
}

func (s *shard) unlink(e *entry) {
	if e.newer != nil {
		e.newer.older = e.older
	} else {
		s.newest = e.older
	}
	if e.older != nil {
		e.older.newer = e.newer
	} else {
		s.oldest = e.newer
	}
}

func (c *cache) size() (entries int, bytes int64) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		entries += len(s.entries)
		bytes += s.bytes
		s.mu.Unlock()
	}
	return entries, bytes
}

// lookup is one running lookup. The leader sets the fields before done is closed; the others read
// them afterwards.
type lookup struct {
	done chan struct{}
	ids  *idList // nil: it failed
	err  string
	cut  bool // the leader's own call was cancelled, which says nothing about the engine
}

// cutPoll is the interval at which a waiter checks whether its own call was cancelled: a Call has
// no channel for that.
const cutPoll = 20 * time.Millisecond

// wait waits for f to end; it returns false if the deadline passed or call was cancelled first.
func (f *lookup) wait(call *upstream.Call, deadline time.Time) bool {
	tick := time.NewTimer(cutPoll)
	defer tick.Stop()
	for {
		select {
		case <-f.done:
			return true
		case now := <-tick.C:
			if call.Cancelled() || now.After(deadline) {
				return false
			}
			tick.Reset(cutPoll)
		}
	}
}
