package sim

import (
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/kvcache"
)

// job is one inference request: one or more sequences (prompts × n) on one rank, and
// one response. After submit it belongs to the rank's goroutine; any goroutine may use
// done, abort and the fields set before submit.
type job struct {
	api.Response
	c          *conn
	req        *httpconn.Request
	rank       *rank
	blockLogID string // id for the block log
	internal   string // id inside the engine, with a random suffix
	seqs       []*seq
	prefillLeg bool    // do_remote_decode: keep the blocks and return a handle
	handle     *handle // do_remote_prefill
	pd         pdLeg   // the part of another family, see pdFamilies; nil for a plain request or nixl
	fault      *faults.Fault
	headSent   bool // a stream's head is written
	finished   bool // the rank has finished it, and a fault holds back its response
	ended      bool // served or dropped; the rank's goroutine decides this once
	done       chan struct{}
}

// seq is one sequence that is generated: a choice of the response, and what the scheduler
// knows of it.
type seq struct {
	api.Choice
	j *job

	blocks       []int32
	hashes       []kvcache.BlockHash // of its full blocks, as far as known
	computed     int                 // tokens whose KV is present
	chunk        int                 // tokens computed in this step
	local        int                 // of these, found in the local cache
	started      bool                // the role event is sent
	pulled       bool
	pulling      bool
	stalledUntil time.Time // faults: no token before this time
	tokenPending bool      // faults: computed, but its token is held back
	leased       bool      // its blocks are kept for decode
	lastHeld     bool      // its last token waits until the leg calls finishHeld
	heldText     string
	handover     *roomHandover // for a hand-over by room
}

// hashTo extends hashes to n full blocks.
func (s *seq) hashTo(h *kvcache.Hasher, n, size int) {
	for i := len(s.hashes); i < n; i++ {
		var parent *kvcache.BlockHash
		if i > 0 {
			parent = &s.hashes[i-1]
		}
		s.hashes = append(s.hashes, h.Block(parent, i == 0, s.Slice(i*size, (i+1)*size), s.j.Params.Salt))
	}
}

// abort tells the rank that the client has disconnected. Any goroutine may call it.
func (j *job) abort() {
	if !j.rank.post(func() { j.rank.abort(j) }) {
		return
	}
	<-j.done
}
