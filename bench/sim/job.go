package sim

import (
	"strings"
	"time"

	"sluice/bench/sim/faults"
	"sluice/bench/sim/kvcache"
	"sluice/bench/sim/textgen"
)

// job is one inference request: one or more sequences (prompts × n) on one rank
// and one answer. After submit it belongs to the rank's goroutine; done, abort and
// the fields set before submit are for everybody.
type job struct {
	c          *conn
	req        *httpRequest
	rank       *rank
	format     format
	id         string // as the client sees it
	blockLogID string // as its blocks are logged
	internal   string // as the engine does: with a random suffix
	created    int64
	model      string
	params     *params
	seqs       []*seq
	unfinished int // sequences not finished
	fault      *faults.Fault
	events     int  // events or tokens out, for faults that count
	headSent   bool // a stream's head is written
	finished   bool // the rank is done with it, and its answer is held back
	ended      bool // answered or dropped; the rank's goroutine decides once
	done       chan struct{}
	rids       []string // SGLang: the client's ids, one a prompt
	aborted    string   // SGLang: the transfer failed, and how
	coalesced  []byte   // events held back to go out together, with Options.Coalesce
}

// params is what a request asks of generation.
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
	prefillLeg   bool    // do_remote_decode: keep the blocks, answer a handle
	handle       *handle // do_remote_prefill
	pd           pdLeg   // another family's part, see pdFamilies; nil when plain or nixl
	toolName     string  // the answer is a call of this function
	logprobs     int     // alternatives to tell of each token, see logprobs.go
}

// seq is one sequence being generated.
type seq struct {
	j      *job
	index  int // choice index in the answer
	prompt []uint32
	out    []uint32
	script []uint32 // the output is this, when it is a tool call
	forced []uint32 // the output is this, when it is held to a choice
	gen    textgen.Generator
	offset int // characters of the tokens whose log-probabilities are told

	text     []byte // output text so far, without special tokens; kept when somebody needs it whole
	sentText int    // bytes of text already sent, when stop strings hold some back
	started  bool   // the role event is out
	reason   string // finish reason, "" while running
	stopped  string // the stop string that ended it

	blocks       []int32
	hashes       []kvcache.BlockHash // of its full blocks, known so far
	computed     int                 // tokens whose KV is there
	chunk        int                 // tokens computed in this step
	cached       int                 // prompt tokens found in the prefix cache, or pulled
	local        int                 // of these, found locally
	pulled       bool
	pulling      bool
	stalledUntil time.Time // faults: no token before
	tokenPending bool      // faults: computed, but its token was held
	leased       bool      // its blocks are kept for decode
	lastHeld     bool      // its last token waits for a leg's settle
	heldText     string
	limit        int             // at most so many tokens, 0 leaves it to params
	handover     *roomHandover   // its hand-over by room
	logprobs     *logprobOptions // SGLang: log-probabilities asked for; nil: none
}

func (s *seq) total() int { return len(s.prompt) + len(s.out) }

// token is the i-th token of prompt and output.
func (s *seq) token(i int) uint32 {
	if i < len(s.prompt) {
		return s.prompt[i]
	}
	return s.out[i-len(s.prompt)]
}

// slice gives tokens from..to, borrowed where they lie in the prompt.
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

// hashTo makes hashes cover n full blocks.
func (s *seq) hashTo(h *kvcache.Hasher, n, size int) {
	for i := len(s.hashes); i < n; i++ {
		var parent *kvcache.BlockHash
		if i > 0 {
			parent = &s.hashes[i-1]
		}
		s.hashes = append(s.hashes, h.Block(parent, i == 0, s.slice(i*size, (i+1)*size), s.j.params.salt))
	}
}

// produce makes the next token and says whether the sequence is at its end, for
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

// addText appends a token's text and returns what of it may be shown now: stop
// strings are looked for, and what could be the begin of one is held back.
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

// abort tells the rank that the client has gone. Any goroutine.
func (j *job) abort() {
	if !j.rank.post(func() { j.rank.abort(j) }) {
		return
	}
	<-j.done
}

// usage counts every prompt once; of several vLLM tells what was found of the first that
// began, SGLang of all together.
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
