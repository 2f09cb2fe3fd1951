package sim

import (
	"maps"
	"slices"
)

// surface is one engine's HTTP surface: what it generates, what else it answers,
// and the shape of its errors.
type surface struct {
	inference map[string]func(*job) format // endpoints that generate, all POST
	get, post map[string]func(*conn, *httpRequest)
	failure   func(status int, msg, param string) []byte
	read      func(path string, raw []byte) (*body, error)
	// headFirst: the head of a stream goes out before the engine is given the request,
	// which its first token is asked for only then (vLLM's AsyncLLM.generate, 0.32).
	headFirst bool
}

// surfaces by Options.Engine.
var surfaces = map[string]*surface{
	"vllm":   {inference: vllmInference, get: vllmGet, post: vllmPost, failure: errorBody, read: func(_ string, raw []byte) (*body, error) { return readBody(raw) }, headFirst: true},
	"sglang": {inference: sglangInference, get: sglangGet, post: sglangPost, failure: sglangError, read: readSGLangBody},
	"trtllm": {inference: trtllmInference, get: trtllmGet, post: trtllmPost, failure: sglangError, read: readTRTLLMBody},
}

// legReader makes of a request's P/D members the leg it asks for; nil is a plain
// request. An error is a refusal. It runs on the connection's goroutine.
type legReader func(l *incarnation, b *body, r *httpRequest) (pdLeg, error)

// pdFamilies are the hand-overs an engine can speak, by Options.PD; nil reads
// nothing. "nixl" is vLLM's default and lives in lease.go and pull.go.
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

// PDFamilies are the names Options.PD takes.
func PDFamilies() []string { return slices.Sorted(maps.Keys(pdFamilies)) }

// pdLeg is what a family does for one request beside generating. All its methods
// but side and begin run on the rank's goroutine. Embed defaultLeg and override.
type pdLeg interface {
	// side is what faults select by: "prefill" or "decode".
	side() string
	// rank is the data-parallel rank the request must run on; -1 leaves it to
	// headers and load.
	rank(ranks int) int
	// begin checks and completes the job once its sequences are made.
	begin(j *job) error
	// submit queues the job's sequences: at once, or when the other side is there.
	submit(r *rank, j *job)
	// admitted: s has blocks for its whole prompt, nothing computed. True when a
	// transfer fills them, at whose end (or failure) the leg calls r.arrived.
	onAdmitted(r *rank, s *seq) bool
	// hold: s has made its last token, which is not told yet. True keeps answer
	// and blocks until the leg calls r.settle.
	holdLastToken(r *rank, s *seq) bool
	// keep: the answer of s goes out and its blocks are free to go; true keeps
	// them, the leg releases them.
	retainBlocks(r *rank, s *seq) bool
	// params appends the answer's kv_transfer_params.
	params(b []byte, j *job) []byte
	// drop: the job ends before its time, its blocks go unless a transfer has them.
	cancel(r *rank, j *job)
	// refused: the request was answered 4xx before the engine knew it.
	onRefused(l *incarnation)
}

// defaultLeg does what a request without P/D does.
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

// transfer marks s as waiting for KV from elsewhere; its blocks stay with it until
// arrived. The caller starts what ends in arrived.
func (r *rank) transfer(s *seq) {
	s.pulling = true
	r.pulls[s] = struct{}{}
	r.e.blockLog.acquire(s.j.blockLogID)
}

// endTransfer undoes it.
func (r *rank) endTransfer(s *seq) {
	s.pulling = false
	delete(r.pulls, s)
	r.e.blockLog.release(s.j.blockLogID)
}

// transferDone ends a transfer of s on the rank's goroutine: tokens of its prompt are in
// its blocks, cached of them said to be from a cache. A job that is over gets its
// blocks freed; a failed transfer is the caller's to answer (r.fail) after this,
// with tokens 0. False when the job is over.
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
	tokens = min(tokens, len(s.prompt)-1)
	moved := max(tokens-s.local, 0)
	r.counters.transfers++
	r.counters.transferBytes += int64(moved) * int64(r.o.Cost.BytesToken)
	r.counters.descriptors += int64((moved + r.o.BlockSize - 1) / r.o.BlockSize)
	r.counters.transferTime += r.o.Cost.TransferTime(moved)
	r.counters.localHit += int64(s.local)
	r.counters.external += int64(len(s.prompt) - s.local)
	r.counters.prompt += int64(len(s.prompt))
	s.computed, s.cached = max(tokens, s.local), cached
	r.store(s, s.local)
	r.ready = append(r.ready, s)
	return true
}

// finishHeld ends what hold began: the token held is told, the answer goes out.
func (r *rank) finishHeld(s *seq) {
	if s.j.ended {
		return
	}
	s.lastHeld = false
	delete(r.heldLast, s)
	r.sendToken(s, s.out[len(s.out)-1], s.heldText)
	r.finishSeq(s)
	r.flushCoalesced(s.j)
}

// flushCoalesced sends what Coalesce kept of j outside a step.
func (r *rank) flushCoalesced(j *job) {
	if r.o.Coalesce && !j.ended {
		r.scratch.open(j)
		r.scratch.flush()
	}
}
