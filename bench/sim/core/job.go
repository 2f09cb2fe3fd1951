package core

import (
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/kvcache"
)

// Job is one inference request: one or more sequences (prompts × n) on one rank, and
// one response. After Rank.Submit it belongs to the rank's goroutine; any goroutine may use
// Done, Abort and the exported fields, which do not change after that.
type Job struct {
	api.Response
	Request    *httpconn.Request
	Rank       *Rank
	BlockLogID string // id for the block log
	Internal   string // id inside the engine, with a random suffix
	Seqs       []*Seq
	Leg        Leg           // the part of a P/D family; nil for a request that one engine serves alone
	Fault      *faults.Fault // nil if none occurs; only the rank changes it

	conn     *httpconn.Conn
	headSent bool // a stream's head is written
	finished bool // the rank has finished it, and a fault holds back its response
	ended    bool // served or dropped; the rank's goroutine decides this once
	done     chan struct{}
}

// NewJob returns the job of a request that arrived on a connection.
func NewJob(c *httpconn.Conn, r *httpconn.Request) *Job {
	return &Job{conn: c, Request: r, done: make(chan struct{})}
}

// AddSeq adds a sequence for a prompt.
func (j *Job) AddSeq(b *api.Body, prompt []uint32) {
	s := &Seq{Job: j}
	j.AddChoice(&s.Choice, b, prompt)
	j.Seqs = append(j.Seqs, s)
}

// Begin sends the head of a stream; it returns false if the client has disconnected.
func (j *Job) Begin() bool {
	j.headSent = j.Params.Stream
	return !j.headSent || j.conn.Send(httpconn.StreamHead(j.Request.Close)) == nil
}

// HeadSent reports whether Begin has sent the head of a stream.
func (j *Job) HeadSent() bool { return j.headSent }

// Done is closed when the job is served or dropped.
func (j *Job) Done() <-chan struct{} { return j.done }

// Ended reports whether the job is served or dropped. Only the rank's goroutine may call it.
func (j *Job) Ended() bool { return j.ended }

// FaultIs reports whether a fault of that kind occurs to the job.
func (j *Job) FaultIs(kind faults.Kind) bool { return j.Fault != nil && j.Fault.Kind == kind }

// Abort tells the rank that the client has disconnected, and waits until the job has ended.
func (j *Job) Abort() {
	if !j.Rank.Post(func() { j.Rank.abort(j) }) {
		return
	}
	<-j.done
}

// AppendHandle implements api.Transfer.
func (j *Job) AppendHandle(b []byte) []byte {
	if j.Leg == nil || j.FaultIs(faults.NoHandle) {
		return append(b, "null"...)
	}
	return j.Leg.AppendHandle(b, j)
}

// AppendStreamedHandle implements api.Transfer.
func (j *Job) AppendStreamedHandle(b []byte, index int) []byte {
	if t, ok := j.Leg.(HandleStreamer); !ok || !t.StreamsHandle(j.Seqs[index]) {
		return b
	}
	return j.AppendHandle(append(b, `,"kv_transfer_params":`...))
}

// PrefillCached implements api.Transfer.
func (j *Job) PrefillCached() *int {
	if t, ok := j.Leg.(PrefillReporter); ok {
		return t.PrefillCached()
	}
	return nil
}

// AppendToChoice implements api.Transfer.
func (j *Job) AppendToChoice(b []byte, index int) []byte {
	if t, ok := j.Leg.(MemberAppender); ok {
		return t.AppendToChoice(b, j.Seqs[index])
	}
	return b
}

// AppendToAnswer implements api.Transfer.
func (j *Job) AppendToAnswer(b []byte) []byte {
	if t, ok := j.Leg.(MemberAppender); ok {
		return t.AppendToAnswer(b, j)
	}
	return b
}

// Seq is one sequence that is generated: a choice of the response, and what the scheduler
// knows of it.
type Seq struct {
	api.Choice
	Job *Job

	blocks       []int32
	hashes       []kvcache.BlockHash // of its full blocks, as far as known
	computed     int                 // tokens whose KV is present
	chunk        int                 // tokens computed in this step
	local        int                 // of these, found in the local cache
	started      bool                // the role event is sent
	order        uint64              // arrival at the rank; breaks ties of priority
	pulled       bool
	pulling      bool
	stalledUntil time.Time // faults: no token before this time
	tokenPending bool      // faults: computed, but its token is held back
	lastHeld     bool      // its last token waits until the leg calls FinishHeld
	heldText     string
}

// IsFirst reports whether s is the first sequence of its job. Only that one takes part in the
// hand-over of most families; the others find its blocks in the cache.
func (s *Seq) IsFirst() bool { return s == s.Job.Seqs[0] }

// Local returns the number of prompt tokens that the rank's cache had.
func (s *Seq) Local() int { return s.local }

// Scheduled reports whether the scheduler has started the transfer of s, or ended it.
func (s *Seq) Scheduled() bool { return s.pulling || s.pulled }

// LastHeld reports whether the last token waits for FinishHeld.
func (s *Seq) LastHeld() bool { return s.lastHeld }

// Transferring reports whether a transfer has s.
func (s *Seq) Transferring() bool { return s.pulling }

// hashTo extends hashes to n full blocks.
func (s *Seq) hashTo(h *kvcache.Hasher, n, size int) {
	for i := len(s.hashes); i < n; i++ {
		var parent *kvcache.BlockHash
		if i > 0 {
			parent = &s.hashes[i-1]
		}
		s.hashes = append(s.hashes, h.Block(parent, i == 0, s.Slice(i*size, (i+1)*size), s.Job.Params.Salt))
	}
}
