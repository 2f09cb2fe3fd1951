package sim

import (
	"strings"
	"time"

	"sluice/bench/sim/faults"
	"sluice/bench/sim/kvcache"
	"sluice/bench/sim/textgen"
)

// job is one inference request: one or more sequences (prompts × n) on one rank, and
// one response. After submit it belongs to the rank's goroutine; any goroutine may use
// done, abort and the fields set before submit.
type job struct {
	c          *conn
	req        *httpRequest
	rank       *rank
	format     format
	id         string // id that the client sees
	blockLogID string // id for the block log
	internal   string // id inside the engine, with a random suffix
	created    int64
	model      string
	params     *params
	seqs       []*seq
	unfinished int // sequences not finished
	fault      *faults.Fault
	events     int  // events or tokens sent, for faults that count them
	headSent   bool // a stream's head is written
	finished   bool // the rank has finished it, and a fault holds back its response
	ended      bool // served or dropped; the rank's goroutine decides this once
	done       chan struct{}
	rids       []string // SGLang: the client's ids, one for each prompt
	aborted    string   // SGLang: why the transfer failed
	coalesced  []byte   // events of a step that are sent together, with Options.Coalesce
}

// params are the generation parameters of a request.
type params struct {
	stream       bool
	includeUsage bool
	everyUsage   bool // continuous_usage_stats
	maxTokens    int
	minTokens    int
	ignoreEOS    bool
	seed         int64
	n            int
	stop         []string
	includeStop  bool
	returnIDs    bool
	echo         bool
	salt         string
	session      string
	prefillLeg   bool    // do_remote_decode: keep the blocks and return a handle
	handle       *handle // do_remote_prefill
	pd           pdLeg   // the part of another family, see pdFamilies; nil for a plain request or nixl
	toolName     string  // the response is a call of this function
	logprobs     int     // alternatives to return for each token, see logprobs.go
}

// seq is one sequence that is generated.
type seq struct {
	j      *job
	index  int // index of the choice in the response
	prompt []uint32
	out    []uint32
	script []uint32 // predetermined output of a tool call
	forced []uint32 // predetermined output of a constrained choice
	gen    textgen.Generator
	offset int // characters of the tokens whose log probabilities were sent

	text     []byte // output text so far, without special tokens, if the whole text is needed
	sentText int    // bytes of text sent, if stop strings hold some back
	started  bool   // the role event is sent
	reason   string // finish reason, "" while running
	stopped  string // the stop string that ended it

	blocks       []int32
	hashes       []kvcache.BlockHash // of its full blocks, as far as known
	computed     int                 // tokens whose KV is present
	chunk        int                 // tokens computed in this step
	cached       int                 // prompt tokens found in the prefix cache, or pulled
	local        int                 // of these, found in the local cache
	pulled       bool
	pulling      bool
	stalledUntil time.Time // faults: no token before this time
	tokenPending bool      // faults: computed, but its token is held back
	leased       bool      // its blocks are kept for decode
	lastHeld     bool      // its last token waits until the leg calls finishHeld
	heldText     string
	limit        int             // maximum number of tokens; 0 means that of params
	handover     *roomHandover   // for a hand-over by room
	logprobs     *logprobOptions // SGLang: requested log probabilities; nil: none
}

func (s *seq) total() int { return len(s.prompt) + len(s.out) }

// token returns the i-th token of prompt and output.
func (s *seq) token(i int) uint32 {
	if i < len(s.prompt) {
		return s.prompt[i]
	}
	return s.out[i-len(s.prompt)]
}

// slice returns tokens from to to, borrowed if they are in the prompt.
func (s *seq) slice(from, to int) []uint32 {
	if to <= len(s.prompt) {
		return s.prompt[from:to]
	}
	list := make([]uint32, 0, to-from)
	for ; from < to; from++ {
		list = append(list, s.token(from))
	}
	return list
}

// hashTo extends hashes to n full blocks.
func (s *seq) hashTo(h *kvcache.Hasher, n, size int) {
	for i := len(s.hashes); i < n; i++ {
		var parent *kvcache.BlockHash
		if i > 0 {
			parent = &s.hashes[i-1]
		}
		s.hashes = append(s.hashes, h.Block(parent, i == 0, s.slice(i*size, (i+1)*size), s.j.params.salt))
	}
}

// produce generates the next token and reports whether the sequence ends with it, for
// which it sets reason.
func (s *seq) produce() (id uint32, last bool) {
	p := s.j.params
	n := len(s.out)
	switch {
	case s.script != nil && n < len(s.script):
		id = s.script[n]
	case s.script != nil:
		id = textgen.EOS
	case s.forced != nil:
		if id = textgen.EOS; n < len(s.forced) {
			id = s.forced[n]
		}
		s.gen.Fold(id)
	default:
		id = s.gen.Next(n >= p.minTokens && !p.ignoreEOS)
		s.gen.Fold(id)
	}
	s.out = append(s.out, id)
	switch {
	case id == textgen.EOS:
		s.reason = "stop"
		if s.script != nil {
			s.reason = "tool_calls"
		}
	case len(s.out) >= p.maxTokens || len(s.out) == s.limit:
		s.reason = "length"
	}
	return id, s.reason != ""
}

// addText appends a token's text and returns the part that may be sent now: it looks
// for stop strings and holds back what may be the start of one.
func (s *seq) addText(id uint32) string {
	var piece string
	if id >= textgen.ByteBase {
		piece = s.gen.Vocab.Piece(id)
	}
	p := s.j.params
	if len(p.stop) == 0 || s.script != nil {
		if !p.stream || s.j.format.needsText() {
			s.text = append(s.text, piece...)
		}
		return piece
	}
	from := len(s.text)
	s.text = append(s.text, piece...)
	longest := 0
	for _, stop := range p.stop {
		longest = max(longest, len(stop))
	}
	if len(s.out) > p.minTokens {
		tail := max(0, from-longest+1)
		for _, stop := range p.stop {
			at := strings.Index(string(s.text[tail:]), stop)
			if at < 0 {
				continue
			}
			end := tail + at
			if p.includeStop {
				end += len(stop)
			}
			s.text, s.reason, s.stopped = s.text[:end], "stop", stop
			break
		}
	}
	upto := len(s.text)
	if s.reason == "" {
		upto = max(s.sentText, upto-longest+1)
	}
	shown := string(s.text[min(s.sentText, upto):upto])
	s.sentText = max(s.sentText, upto)
	return shown
}

// abort tells the rank that the client has disconnected. Any goroutine may call it.
func (j *job) abort() {
	if !j.rank.post(func() { j.rank.abort(j) }) {
		return
	}
	<-j.done
}

// usage counts every prompt once. Of several sequences vLLM reports the cached tokens
// of the first that started, SGLang those of all.
func (j *job) usage() (prompt, completion, cached int) {
	sums := j.c.incarnation.e.o.Engine == "sglang"
	for i, s := range j.seqs {
		completion += len(s.out)
		if s.index%j.params.n == 0 {
			prompt += len(s.prompt)
			if sums || i == 0 {
				cached += s.cached
			}
		}
	}
	if h := j.params.handle; h != nil && h.prefillCached != nil {
		cached = *h.prefillCached
	}
	return
}
