package core

import (
	"sluice/bench/sim/api"
	"sluice/bench/sim/httpconn"
)

// Family is a P/D protocol in one incarnation of an engine.
type Family interface {
	// Read parses a request's P/D members into the leg that they ask for; nil is a request
	// that one engine serves alone. An error is a refusal. It runs on the connection's goroutine.
	Read(b *api.Body, r *httpconn.Request) (Leg, error)
	// ServeSide serves a call of another simulated engine on the side channel.
	ServeSide(c *httpconn.Conn, r *httpconn.Request)
	// Close releases what the family has. No rank and no goroutine of the incarnation runs any more.
	Close()
}

// NoCalls is the part of a Family that has no calls on the side channel and nothing to close.
type NoCalls struct{}

// ServeSide implements Family.
func (NoCalls) ServeSide(c *httpconn.Conn, r *httpconn.Request) {
	c.Respond(r, 404, "text/plain", []byte("this family has no such call"))
}

// Close implements Family.
func (NoCalls) Close() {}

// Leg is what a family does for one request besides generating. All methods except
// Side, Rank, Begin and OnRefused run on the rank's goroutine. Implementations embed WholeLeg and
// override its methods.
type Leg interface {
	// Side is "prefill", "decode" or "whole", by which faults select requests.
	Side() string
	// Rank returns the data-parallel rank on which the request must run; -1 leaves the
	// choice to headers and load.
	Rank(ranks int) int
	// Begin checks and completes the job once its sequences are made.
	Begin(j *Job) error
	// Submit queues the job's sequences, at once or when the other side is there.
	Submit(r *Rank, j *Job)
	// OnAdmitted is called when s has blocks for its whole prompt and nothing is
	// computed. It returns true if a transfer fills them; at its end the leg calls
	// Rank.TransferDone.
	OnAdmitted(r *Rank, s *Seq) bool
	// HoldLastToken is called when s has generated its last token, which is not sent
	// yet. It returns true to hold back response and blocks until the leg calls
	// Rank.FinishHeld.
	HoldLastToken(r *Rank, s *Seq) bool
	// RetainBlocks is called when the response of s is sent and its blocks can be
	// freed. It returns true to keep them; the leg then has leased them.
	RetainBlocks(r *Rank, s *Seq) bool
	// AppendHandle appends the kv_transfer_params of the response.
	AppendHandle(b []byte, j *Job) []byte
	// Cancel is called when the job ends early. Its blocks are freed unless a transfer
	// has them.
	Cancel(r *Rank, j *Job)
	// OnAborted is called after Cancel when the client has disconnected, also while a fault
	// holds back the response.
	OnAborted(r *Rank, j *Job)
	// OnRefused is called when the request got a 4xx before the engine scheduled it.
	OnRefused()
}

// WholeLeg does nothing: it is the leg of a request that one engine serves alone.
type WholeLeg struct{}

// Side implements Leg.
func (WholeLeg) Side() string { return "whole" }

// Rank implements Leg.
func (WholeLeg) Rank(int) int { return -1 }

// Begin implements Leg.
func (WholeLeg) Begin(*Job) error { return nil }

// Submit implements Leg.
func (WholeLeg) Submit(r *Rank, j *Job) { r.Queue(j.Seqs...) }

// OnAdmitted implements Leg.
func (WholeLeg) OnAdmitted(*Rank, *Seq) bool { return false }

// HoldLastToken implements Leg.
func (WholeLeg) HoldLastToken(*Rank, *Seq) bool { return false }

// RetainBlocks implements Leg.
func (WholeLeg) RetainBlocks(*Rank, *Seq) bool { return false }

// AppendHandle implements Leg.
func (WholeLeg) AppendHandle(b []byte, _ *Job) []byte { return append(b, "null"...) }

// Cancel implements Leg.
func (WholeLeg) Cancel(*Rank, *Job) {}

// OnAborted implements Leg.
func (WholeLeg) OnAborted(*Rank, *Job) {}

// OnRefused implements Leg.
func (WholeLeg) OnRefused() {}

// MemberAppender is implemented by a Leg that adds members to responses.
type MemberAppender interface {
	AppendToChoice(b []byte, s *Seq) []byte // to every choice
	AppendToAnswer(b []byte, j *Job) []byte // to a whole response
}

// HandleStreamer is implemented by a Leg whose handle is also in the last event of a stream.
type HandleStreamer interface {
	// StreamsHandle reports whether the last event of s has the handle.
	StreamsHandle(s *Seq) bool
}

// PrefillReporter is implemented by a Leg that knows how many tokens prefill had cached; nil: unknown.
type PrefillReporter interface {
	// PrefillCached returns the number of cached prompt tokens; nil: unknown.
	PrefillCached() *int
}

// Transfer marks s as waiting for KV from another engine; its blocks stay with it until
// TransferDone or EndTransfer. The caller starts the transfer.
func (r *Rank) Transfer(s *Seq) {
	r.pulls[s] = struct{}{}
	r.HoldBlocks(s)
}

// EndTransfer undoes Transfer.
func (r *Rank) EndTransfer(s *Seq) {
	delete(r.pulls, s)
	s.pulling = false
	r.Process.Blocks.release(s.Job.BlockLogID)
}

// HoldBlocks keeps the blocks of s for a transfer, also after the end of its job.
func (r *Rank) HoldBlocks(s *Seq) {
	s.pulling = true
	r.Process.Blocks.acquire(s.Job.BlockLogID)
}

// UnholdBlocks undoes HoldBlocks.
func (r *Rank) UnholdBlocks(s *Seq) {
	s.pulling = false
	r.freeIfEnded(s)
	r.Process.Blocks.release(s.Job.BlockLogID)
}

// freeIfEnded frees the blocks of s if its job has ended, and reports that.
func (r *Rank) freeIfEnded(s *Seq) bool {
	if s.Job.ended {
		r.pool.Release(s.blocks)
		s.blocks = nil
	}
	return s.Job.ended
}

// TransferDone ends a transfer of s on the rank's goroutine: its blocks have the KV of
// tokens tokens of its prompt, of which cached are reported as cached. If the job has
// ended, its blocks are freed and the result is false. After a failed transfer, with
// tokens 0, the caller ends the job (Fail).
func (r *Rank) TransferDone(s *Seq, tokens, cached int) bool {
	r.EndTransfer(s)
	if r.freeIfEnded(s) {
		return false
	}
	s.pulled = true
	if tokens == 0 {
		return true
	}
	tokens = min(tokens, len(s.Prompt)-1)
	moved := max(tokens-s.local, 0)
	r.Counters.Transfers++
	r.Counters.TransferBytes += int64(moved) * int64(r.o.Cost.BytesToken)
	r.Counters.Descriptors += int64((moved + r.o.BlockSize - 1) / r.o.BlockSize)
	r.Counters.TransferTime += r.o.Cost.TransferTime(moved)
	r.Counters.LocalHit += int64(s.local)
	r.Counters.External += int64(len(s.Prompt) - s.local)
	r.Counters.Prompt += int64(len(s.Prompt))
	s.computed, s.Cached = max(tokens, s.local), cached
	r.store(s, s.local)
	r.ready = append(r.ready, s)
	return true
}

// SkipTransfer says that the cache has what a transfer of s would bring.
func (r *Rank) SkipTransfer(s *Seq) { s.pulled = true }

// Queue queues sequences for blocks.
func (r *Rank) Queue(list ...*Seq) {
	for _, s := range list {
		r.arrivals++
		s.order = r.arrivals
		r.wait(s)
	}
}

// QueueSiblings queues the other sequences of the job once the first has its blocks.
func (r *Rank) QueueSiblings(s *Seq) {
	for _, x := range s.Job.Seqs[1:] {
		x.pulled = true
		r.Queue(x)
	}
}

// FinishHeld ends what HoldLastToken began: it sends the last token and the response.
func (r *Rank) FinishHeld(s *Seq) {
	if s.Job.ended {
		return
	}
	s.lastHeld = false
	delete(r.heldLast, s)
	r.sendToken(s, s.Out[len(s.Out)-1], s.heldText)
	r.finishSeq(s)
	r.flushCoalesced(s.Job)
}

// flushCoalesced sends the events of j that Options.Coalesce held back outside a step.
func (r *Rank) flushCoalesced(j *Job) {
	if r.o.Coalesce && !j.ended {
		r.scratch.Open(&j.Response)
		r.scratch.Flush()
	}
}
