package core

import (
	"sync"
	"time"
)

// BlockLog records when the last block of a request was released. It counts, by
// X-Request-Id, the references of the request, its transfers and its lease. It is off
// unless Options.LogBlocks is set.
type BlockLog struct {
	mu       sync.Mutex
	on       bool
	blocks   map[string]int
	released map[string]time.Time
}

// NewBlockLog returns an empty log; it records nothing unless on is set.
func NewBlockLog(on bool) *BlockLog {
	return &BlockLog{on: on, blocks: make(map[string]int), released: make(map[string]time.Time)}
}

func (k *BlockLog) acquire(id string) {
	if !k.on {
		return
	}
	k.mu.Lock()
	k.blocks[id]++
	k.mu.Unlock()
}

func (k *BlockLog) release(id string) {
	if !k.on {
		return
	}
	k.mu.Lock()
	if k.blocks[id]--; k.blocks[id] <= 0 {
		delete(k.blocks, id)
		k.released[id] = time.Now()
	}
	k.mu.Unlock()
}

// ReleaseTimes returns, by X-Request-Id, when the last block of a request was released. A zero time
// means that some blocks are still referenced.
func (k *BlockLog) ReleaseTimes() map[string]time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make(map[string]time.Time, len(k.released))
	for id, at := range k.released {
		out[id] = at
	}
	for id := range k.blocks {
		out[id] = time.Time{}
	}
	return out
}
