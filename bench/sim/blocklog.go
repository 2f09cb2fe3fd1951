package sim

import (
	"sync"
	"time"
)

// blockLog tells when the last block of a request was let go: what a request, its
// transfers and its lease hold is counted by X-Request-Id. Off unless
// Options.LogBlocks.
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

// BlockReleaseTimes gives, by X-Request-Id, when a request's last block was let go on this
// engine; a zero time means it still holds some. With Options.LogBlocks.
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
