package api

import (
	"strings"

	"sluice/bench/sim/textgen"
)

// Choice is one output of a response, for one prompt.
type Choice struct {
	response *Response
	Index    int // index of the choice in the response
	Prompt   []uint32
	Out      []uint32
	script   []uint32 // predetermined output of a tool call
	forced   []uint32 // predetermined output of a constrained choice
	Gen      textgen.Generator
	offset   int // characters of the tokens whose log probabilities were sent

	text     []byte // output text so far, without special tokens, if the whole text is needed
	sentText int    // bytes of text sent, if stop strings hold some back
	Reason   string // finish reason, "" while running
	stopped  string // the stop string that ended it

	Cached   int             // prompt tokens found in the prefix cache, or pulled
	Limit    int             // maximum number of tokens; 0 means that of Params
	logprobs *logprobOptions // SGLang: requested log probabilities; nil: none
}

// Total returns the number of tokens of prompt and output.
func (s *Choice) Total() int { return len(s.Prompt) + len(s.Out) }

// token returns the i-th token of prompt and output.
func (s *Choice) token(i int) uint32 {
	if i < len(s.Prompt) {
		return s.Prompt[i]
	}
	return s.Out[i-len(s.Prompt)]
}

// Slice returns tokens from to to, borrowed if they are in the prompt.
func (s *Choice) Slice(from, to int) []uint32 {
	if to <= len(s.Prompt) {
		return s.Prompt[from:to]
	}
	list := make([]uint32, 0, to-from)
	for ; from < to; from++ {
		list = append(list, s.token(from))
	}
	return list
}

// SetPrompt sets the prompt before the first token.
func (s *Choice) SetPrompt(ids []uint32) {
	p, o := s.response.Params, s.response.Config
	s.Prompt = ids
	s.Gen = textgen.NewGenerator(o.Model, o.Seed, p.seed, s.Index%p.N, ids)
}

// FirstToken returns the token that Produce will generate first.
func (s *Choice) FirstToken() uint32 {
	if len(s.script) > 0 { // a tool call
		return s.script[0]
	}
	return s.Gen.Next(false)
}

// Produce generates the next token and reports whether the sequence ends with it, for
// which it sets reason.
func (s *Choice) Produce() (id uint32, last bool) {
	p := s.response.Params
	n := len(s.Out)
	switch {
	case s.script != nil && n < len(s.script):
		id = s.script[n]
	case s.script != nil:
		id = textgen.EOS
	case s.forced != nil:
		if id = textgen.EOS; n < len(s.forced) {
			id = s.forced[n]
		}
		s.Gen.Fold(id)
	default:
		id = s.Gen.Next(n >= p.minTokens && !p.ignoreEOS)
		s.Gen.Fold(id)
	}
	s.Out = append(s.Out, id)
	switch {
	case id == textgen.EOS:
		s.Reason = "stop"
		if s.script != nil {
			s.Reason = "tool_calls"
		}
	case len(s.Out) >= p.MaxTokens || len(s.Out) == s.Limit:
		s.Reason = "length"
	}
	return id, s.Reason != ""
}

// AddText appends a token's text and returns the part that may be sent now: it looks
// for stop strings and holds back what may be the start of one.
func (s *Choice) AddText(id uint32) string {
	var piece string
	if id >= textgen.ByteBase {
		piece = s.Gen.Vocab.Piece(id)
	}
	p := s.response.Params
	if len(p.stop) == 0 || s.script != nil {
		if !p.Stream || s.response.Format.needsText() {
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
	if len(s.Out) > p.minTokens {
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
			s.text, s.Reason, s.stopped = s.text[:end], "stop", stop
			break
		}
	}
	upto := len(s.text)
	if s.Reason == "" {
		upto = max(s.sentText, upto-longest+1)
	}
	shown := string(s.text[min(s.sentText, upto):upto])
	s.sentText = max(s.sentText, upto)
	return shown
}
