package sim

import (
	"encoding/json"
	"sync"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/textgen"
)

// Shared storage: engines of one process with the same Options.Store write the blocks
// of finished prompts to a store and find them there by their hashes. An engine
// declines a request whose cached share of the prompt is below its cache_hit_threshold,
// with finish reason "cache_threshold" and no token, as llm-d's vLLM does.

var stores sync.Map // Options.Store -> *sync.Map of blockHash

type storageLeg struct {
	defaultLeg
	threshold float64
	store     *sync.Map
}

func readStorage(l *incarnation, _ *api.Body, r *httpconn.Request) (pdLeg, error) {
	var p struct {
		Threshold float64 `json:"cache_hit_threshold"`
	}
	if err := json.Unmarshal(r.Body, &p); err != nil || p.Threshold < 0 || p.Threshold > 1 {
		return nil, api.Refuse(400, "cache_hit_threshold", "cache_hit_threshold must be a number from 0 to 1.")
	}
	store, _ := stores.LoadOrStore(l.e.o.Store, new(sync.Map))
	return &storageLeg{threshold: p.Threshold, store: store.(*sync.Map)}, nil
}

func (g *storageLeg) side() string { return "plain" }

// onAdmitted loads the blocks that the store has beyond the local cache, or declines.
func (g *storageLeg) onAdmitted(r *rank, s *seq) bool {
	size := r.o.BlockSize
	full := (len(s.Prompt) - 1) / size
	s.hashTo(&r.hash, full, size)
	n := s.local / size
	for n < full {
		if _, ok := g.store.Load(s.hashes[n]); !ok {
			break
		}
		n++
	}
	if float64(n*size) < g.threshold*float64(len(s.Prompt)) {
		r.decline(s.j)
		return true
	}
	if n*size <= s.local {
		return false
	}
	r.transfer(s)
	r.l.wg.Go(func() {
		sleepContext(r.l.ctx, cost.Scale(r.o.Cost.TransferTime(n*size-s.local), r.o.Speed))
		r.post(func() { r.transferDone(s, n*size, n*size) })
	})
	return true
}

// retainBlocks writes the prompt's blocks to the store; they may be freed.
func (g *storageLeg) retainBlocks(r *rank, s *seq) bool {
	full := len(s.Prompt) / r.o.BlockSize
	s.hashTo(&r.hash, full, r.o.BlockSize)
	for i := range full {
		g.store.Store(s.hashes[i], nil)
	}
	return false
}

// decline ends a job before its first token.
func (r *rank) decline(j *job) {
	r.drop(j)
	w := &r.scratch
	w.Open(&j.Response)
	for _, s := range j.seqs {
		s.Reason = "cache_threshold"
		if j.Params.Stream {
			j.Format.First(w, &s.Choice)
			j.Format.Delta(w, &s.Choice, textgen.EOS, "")
		}
	}
	if j.Params.Stream {
		j.Format.Last(w, &j.Response)
		w.Finish()
	} else {
		j.c.Respond(j.req, 200, "application/json", j.Format.Full(nil, &j.Response))
	}
	r.markAnswered(j)
}
