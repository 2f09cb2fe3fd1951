package sim

import (
	"sluice/bench/sim/api"
	"sluice/bench/sim/httpconn"
)

// surface is the HTTP surface of one engine: the endpoints that generate, the other
// endpoints, and the format of its errors.
type surface struct {
	inference map[string]func(*api.Response) api.Format // endpoints that generate, all POST
	get, post map[string]func(*conn, *httpconn.Request)
	failure   func(status int, msg, param string) []byte
	read      func(path string, raw []byte) (*api.Body, error)
	// headFirst means that the head of a stream is sent before the engine schedules the
	// request, and so before its first token (vLLM's AsyncLLM.generate, 0.32).
	headFirst bool
}

// surfaces by Options.Engine.
var surfaces = map[string]*surface{
	"vllm":   {inference: api.VLLMFormats, get: vllmGet, post: vllmPost, failure: api.VLLMError, read: func(_ string, raw []byte) (*api.Body, error) { return api.ReadBody(raw) }, headFirst: true},
	"sglang": {inference: api.SGLangFormats, get: sglangGet, post: sglangPost, failure: api.SGLangError, read: api.ReadSGLangBody},
	"trtllm": {inference: api.TRTLLMFormats, get: trtllmGet, post: trtllmPost, failure: api.SGLangError, read: api.ReadTRTLLMBody},
}

// errorBody returns an error in the format of the engine and its release.
func (e *Engine) errorBody(status int, msg, param string) []byte {
	if e.o.Engine == "vllm" && e.o.VLLM.FlatErrors() {
		return api.SGLangError(status, msg, param) // the same flat object
	}
	return e.surface.failure(status, msg, param)
}

// legReader parses a request's P/D members into the leg that they ask for; nil is a
// plain request. An error is a refusal. It runs on the connection's goroutine.
type legReader func(l *incarnation, b *api.Body, r *httpconn.Request) (pdLeg, error)

// pdFamilies are the hand-overs that an engine can speak, by Options.PD; nil parses
// nothing. "nixl" is vLLM's default and is in lease.go and pull.go.
var pdFamilies = map[string]legReader{
	"nixl":      nil,
	"none":      nil,
	"nixl-push": readPush,
	"mooncake":  readMooncake,
	"sglang":    readSGLang,

	"lmcache":      readLMCache,
	"orchestrated": readOrchestrated,
	"storage":      readStorage,
	"trtllm":       readTRTLLM,
}

// pdLeg is what a family does for one request besides generating. All methods except
// side and begin run on the rank's goroutine. Implementations embed defaultLeg and
// override its methods.
type pdLeg interface {
	// side is "prefill" or "decode", by which faults select requests.
	side() string
	// rank returns the data-parallel rank on which the request must run; -1 leaves the
	// choice to headers and load.
	rank(ranks int) int
	// begin checks and completes the job once its sequences are made.
	begin(j *job) error
	// submit queues the job's sequences, at once or when the other side is there.
	submit(r *rank, j *job)
	// onAdmitted is called when s has blocks for its whole prompt and nothing is
	// computed. It returns true if a transfer fills them; at its end the leg calls
	// transferDone.
	onAdmitted(r *rank, s *seq) bool
	// holdLastToken is called when s has generated its last token, which is not sent
	// yet. It returns true to hold back response and blocks until the leg calls
	// finishHeld.
	holdLastToken(r *rank, s *seq) bool
	// retainBlocks is called when the response of s is sent and its blocks can be
	// freed. It returns true to keep them; the leg then releases them.
	retainBlocks(r *rank, s *seq) bool
	// params appends the kv_transfer_params of the response.
	params(b []byte, j *job) []byte
	// cancel is called when the job ends early. Its blocks are freed unless a transfer
	// has them.
	cancel(r *rank, j *job)
	// onRefused is called when the request got a 4xx before the engine scheduled it.
	onRefused(l *incarnation)
}

// defaultLeg does nothing: it is the leg of a plain request.
type defaultLeg struct{}

func (defaultLeg) side() string                   { return "plain" }
func (defaultLeg) rank(int) int                   { return -1 }
func (defaultLeg) begin(*job) error               { return nil }
func (defaultLeg) submit(r *rank, j *job)         { r.waiting = append(r.waiting, j.seqs...) }
func (defaultLeg) onAdmitted(*rank, *seq) bool    { return false }
func (defaultLeg) holdLastToken(*rank, *seq) bool { return false }
func (defaultLeg) retainBlocks(*rank, *seq) bool  { return false }
func (defaultLeg) params(b []byte, _ *job) []byte { return append(b, "null"...) }
func (defaultLeg) cancel(*rank, *job)             {}
func (defaultLeg) onRefused(*incarnation)         {}

// transfer marks s as waiting for KV from another engine; its blocks stay with it until
// transferDone. The caller starts the transfer, which ends with transferDone.
func (r *rank) transfer(s *seq) {
	s.pulling = true
	r.pulls[s] = struct{}{}
	r.e.blockLog.acquire(s.j.blockLogID)
}

// endTransfer undoes transfer.
func (r *rank) endTransfer(s *seq) {
	s.pulling = false
	delete(r.pulls, s)
	r.e.blockLog.release(s.j.blockLogID)
}

// transferDone ends a transfer of s on the rank's goroutine: its blocks have the KV of
// tokens tokens of its prompt, of which cached are reported as cached. If the job has
// ended, its blocks are freed and the result is false. After a failed transfer, with
// tokens 0, the caller ends the job (r.fail).
func (r *rank) transferDone(s *seq, tokens, cached int) bool {
	r.endTransfer(s)
	if s.j.ended {
		r.pool.Release(s.blocks)
		s.blocks = nil
		return false
	}
	s.pulled = true
	if tokens == 0 {
		return true
	}
	tokens = min(tokens, len(s.Prompt)-1)
	moved := max(tokens-s.local, 0)
	r.counters.transfers++
	r.counters.transferBytes += int64(moved) * int64(r.o.Cost.BytesToken)
	r.counters.descriptors += int64((moved + r.o.BlockSize - 1) / r.o.BlockSize)
	r.counters.transferTime += r.o.Cost.TransferTime(moved)
	r.counters.localHit += int64(s.local)
	r.counters.external += int64(len(s.Prompt) - s.local)
	r.counters.prompt += int64(len(s.Prompt))
	s.computed, s.Cached = max(tokens, s.local), cached
	r.store(s, s.local)
	r.ready = append(r.ready, s)
	return true
}

// finishHeld ends what holdLastToken began: it sends the last token and the response.
func (r *rank) finishHeld(s *seq) {
	if s.j.ended {
		return
	}
	s.lastHeld = false
	delete(r.heldLast, s)
	r.sendToken(s, s.Out[len(s.Out)-1], s.heldText)
	r.finishSeq(s)
	r.flushCoalesced(s.j)
}

// flushCoalesced sends the events of j that Options.Coalesce held back outside a step.
func (r *rank) flushCoalesced(j *job) {
	if r.o.Coalesce && !j.ended {
		r.scratch.Open(&j.Response)
		r.scratch.Flush()
	}
}
