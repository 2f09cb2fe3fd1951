package sim

import (
	"sync"
	"time"
)

// keptLog tells when the last block of a request was let go: what a request, its
// transfers and its lease hold is counted by X-Request-Id. Off unless
// Options.LogKept.
type keptLog struct {
	mu   sync.Mutex
	on   bool
	held map[string]int
	last map[string]time.Time
}

func newKeptLog(on bool) *keptLog {
	return &keptLog{on: on, held: make(map[string]int), last: make(map[string]time.Time)}
}

func (k *keptLog) keep(id string) {
	if !k.on {
		return
	}
	k.mu.Lock()
	k.held[id]++
	k.mu.Unlock()
}

func (k *keptLog) letGo(id string) {
	if !k.on {
		return
	}
	k.mu.Lock()
	if k.held[id]--; k.held[id] <= 0 {
		delete(k.held, id)
		k.last[id] = time.Now()
	}
	k.mu.Unlock()
}

// Kept gives, by X-Request-Id, when a request's last block was let go on this
// engine; a zero time means it still holds some. With Options.LogKept.
func (e *Engine) Kept() map[string]time.Time {
	k := e.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make(map[string]time.Time, len(k.last))
	for id, at := range k.last {
		out[id] = at
	}
	for id := range k.held {
		out[id] = time.Time{}
	}
	return out
}
