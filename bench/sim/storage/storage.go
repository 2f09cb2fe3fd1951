// Package storage has shared storage: engines of one process with the same Options.Store write the blocks
// of finished prompts to a store and find them there by their hashes. An engine
// declines a request whose cached share of the prompt is below its cache_hit_threshold,
// with finish reason "cache_threshold" and no token, as llm-d's vLLM does.
package storage

import (
	"encoding/json"
	"sync"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
)

var stores sync.Map // Options.Store -> *sync.Map of kvcache.BlockHash

type family struct {
	core.NoCalls
	store *sync.Map
}

// New returns the family for one incarnation.
func New(p *core.Process) core.Family {
	store, _ := stores.LoadOrStore(p.Options.Store, new(sync.Map))
	return &family{store: store.(*sync.Map)}
}

// Read reads cache_hit_threshold.
func (f *family) Read(_ *api.Body, r *httpconn.Request) (core.Leg, error) {
	var p struct {
		Threshold float64 `json:"cache_hit_threshold"`
	}
	if err := json.Unmarshal(r.Body, &p); err != nil || p.Threshold < 0 || p.Threshold > 1 {
		return nil, api.Refuse(400, "cache_hit_threshold", "cache_hit_threshold must be a number from 0 to 1.")
	}
	return &leg{threshold: p.Threshold, store: f.store}, nil
}

type leg struct {
	core.WholeLeg
	threshold float64
	store     *sync.Map
}

// OnAdmitted loads the blocks that the store has beyond the local cache, or declines.
func (g *leg) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	size := r.Process.Options.BlockSize
	full := (len(s.Prompt) - 1) / size
	hashes := r.Hashes(s, full)
	n := s.Local() / size
	for n < full {
		if _, ok := g.store.Load(hashes[n]); !ok {
			break
		}
		n++
	}
	if float64(n*size) < g.threshold*float64(len(s.Prompt)) {
		r.Decline(s.Job, "cache_threshold")
		return true
	}
	if n*size <= s.Local() {
		return false
	}
	r.Transfer(s)
	moved := n*size - s.Local()
	r.Process.Go(func() {
		core.Sleep(r.Process.Context, r.Process.TransferTime(moved))
		r.Post(func() { r.TransferDone(s, n*size, n*size) })
	})
	return true
}

// RetainBlocks writes the prompt's blocks to the store; they may be freed.
func (g *leg) RetainBlocks(r *core.Rank, s *core.Seq) bool {
	for _, h := range r.Hashes(s, len(s.Prompt)/r.Process.Options.BlockSize) {
		g.store.Store(h, nil)
	}
	return false
}
