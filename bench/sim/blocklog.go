package sim

import (
	"sync"
	"time"
)

// blockLog records when the last block of a request was released. It counts, by
// X-Request-Id, the references of the request, its transfers and its lease. It is off
// unless Options.LogBlocks is set.
type blockLog struct {
	mu       sync.Mutex
	on       bool
	blocks   map[string]int
	released map[string]time.Time
}

func newBlockLog(on bool) *blockLog {
	return &blockLog{on: on, blocks: make(map[string]int), released: make(map[string]time.Time)}
}

func (k *blockLog) acquire(id string) {
	if !k.on {
		return
	}
	k.mu.Lock()
	k.blocks[id]++
	k.mu.Unlock()
}

func (k *blockLog) release(id string) {
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

// BlockReleaseTimes returns, by X-Request-Id, when the last block of a request was
// released on this engine. A zero time means that some blocks are still referenced. It
// needs Options.LogBlocks.
func (e *Engine) BlockReleaseTimes() map[string]time.Time {
	k := e.blockLog
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
