package sim

import (
	"strings"

	"sluice/bench/sim/textgen"
)

// choice is one output of a response, for one prompt.
type choice struct {
	response *response
	index    int // index of the choice in the response
	prompt   []uint32
	out      []uint32
	script   []uint32 // predetermined output of a tool call
	forced   []uint32 // predetermined output of a constrained choice
	gen      textgen.Generator
	offset   int // characters of the tokens whose log probabilities were sent

	text     []byte // output text so far, without special tokens, if the whole text is needed
	sentText int    // bytes of text sent, if stop strings hold some back
	reason   string // finish reason, "" while running
	stopped  string // the stop string that ended it

	cached   int             // prompt tokens found in the prefix cache, or pulled
	limit    int             // maximum number of tokens; 0 means that of params
	logprobs *logprobOptions // SGLang: requested log probabilities; nil: none
}

func (s *choice) total() int { return len(s.prompt) + len(s.out) }

// token returns the i-th token of prompt and output.
func (s *choice) token(i int) uint32 {
	if i < len(s.prompt) {
		return s.prompt[i]
	}
	return s.out[i-len(s.prompt)]
}

// slice returns tokens from to to, borrowed if they are in the prompt.
func (s *choice) slice(from, to int) []uint32 {
	if to <= len(s.prompt) {
		return s.prompt[from:to]
	}
	list := make([]uint32, 0, to-from)
	for ; from < to; from++ {
		list = append(list, s.token(from))
	}
	return list
}

// setPrompt sets the prompt before the first token.
func (s *choice) setPrompt(ids []uint32) {
	p, o := s.response.params, s.response.config
	s.prompt = ids
	s.gen = textgen.NewGenerator(o.model, o.seed, p.seed, s.index%p.n, ids)
}

// firstToken returns the token that produce will generate first.
func (s *choice) firstToken() uint32 {
	if len(s.script) > 0 { // a tool call
		return s.script[0]
	}
	return s.gen.Next(false)
}

// produce generates the next token and reports whether the sequence ends with it, for
// which it sets reason.
func (s *choice) produce() (id uint32, last bool) {
	p := s.response.params
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
func (s *choice) addText(id uint32) string {
	var piece string
	if id >= textgen.ByteBase {
		piece = s.gen.Vocab.Piece(id)
	}
	p := s.response.params
	if len(p.stop) == 0 || s.script != nil {
		if !p.stream || s.response.format.needsText() {
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
