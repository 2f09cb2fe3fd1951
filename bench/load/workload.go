package load

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"
)

// Job is one request to send.
type Job struct {
	Due    time.Duration // from the start of the run; open loop only
	Body   []byte        // owned by the job
	Tokens int           // tokens of the prompt, if the workload knows them
	Output int           // max_tokens
	// Session, if not empty, is sent as X-Sluice-Session.
	Session string
}

// workload returns jobs one by one; next is called from one goroutine at a time.
type workload interface {
	// next renders job i; ok is false after the last one.
	next() (job Job, ok bool)
}

// vocabulary is the words of prompts. Each is about one token, of the simulated engine
// and of a real one.
var vocabulary = [...]string{
	"time", "year", "people", "way", "day", "man", "thing", "life", "hand", "part", "child", "eye", "place", "work",
	"week", "case", "point", "home", "water", "room", "fact", "word", "idea", "book", "side", "line", "end", "city",
	"name", "team", "hour", "game", "law", "car", "body", "face", "door", "art", "war", "party", "road", "tree", "wind",
	"north", "light", "stone", "river", "glass", "paper", "green", "music", "voice", "field", "plant", "horse", "table",
	"night", "ocean", "cloud", "metal", "north", "south", "plain", "bread",
}

// synthetic makes prompts with a shared prefix per group, and conversations of several
// turns.
type synthetic struct {
	o             Options
	rng           *rand.Rand
	n             int
	prefix        []([]uint32)    // by group: token ids
	conversations []*conversation // conversations with turns left
	gaps          func() time.Duration
	due           time.Duration
}

type conversation struct {
	tokens []uint32
	turn   int
}

func newSynthetic(o Options) *synthetic {
	s := &synthetic{o: o, rng: rand.New(rand.NewPCG(o.Seed, 0x5eed))}
	shared := int(math.Round(float64(o.PromptTokens) * o.SharedPrefix))
	for range o.Groups {
		s.prefix = append(s.prefix, s.newConversation(shared))
	}
	s.gaps = func() time.Duration { return 0 }
	if o.Rate > 0 {
		mean := float64(time.Second) / o.Rate
		s.gaps = func() time.Duration { return time.Duration(mean) }
		if o.Poisson {
			s.gaps = func() time.Duration { return time.Duration(s.rng.ExpFloat64() * mean) }
		}
	}
	return s
}

// maxOpenConversations is how many conversations a synthetic load has open at once.
const maxOpenConversations = 32

func (s *synthetic) newConversation(n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(s.rng.IntN(1 << 16))
	}
	return t
}

func (s *synthetic) next() (Job, bool) {
	if s.o.Requests > 0 && s.n >= s.o.Requests {
		return Job{}, false
	}
	s.n++
	var t *conversation
	// A random open conversation continues, so that its turns are spread out in time as
	// those of people are.
	if full := len(s.conversations) >= maxOpenConversations; len(s.conversations) > 0 && (full || s.rng.IntN(2) == 0) {
		i := s.rng.IntN(len(s.conversations))
		t = s.conversations[i]
		t.tokens = append(t.tokens, s.newConversation(max(1, s.o.PromptTokens/8))...)
		t.turn++
		if t.turn >= s.o.Turns {
			s.conversations[i] = s.conversations[len(s.conversations)-1]
			s.conversations = s.conversations[:len(s.conversations)-1]
		}
	} else {
		p := s.prefix[s.rng.IntN(len(s.prefix))]
		t = &conversation{tokens: append(append([]uint32{}, p...), s.newConversation(max(0, s.o.PromptTokens-len(p)))...), turn: 1}
		if s.o.Turns > 1 {
			s.conversations = append(s.conversations, t)
		}
	}
	s.due += s.gaps()
	return Job{Due: s.due, Body: render(&s.o, t.tokens, s.o.OutputTokens), Tokens: len(t.tokens), Output: s.o.OutputTokens}, true
}

// render writes the request body. Text prompts have one word per token, numbered so
// that any two tokens differ.
func render(o *Options, tokens []uint32, output int) []byte {
	b := make([]byte, 0, 64+len(tokens)*8)
	b = append(b, `{"model":`...)
	b = strconv.AppendQuote(b, o.Model)
	b = append(b, `,"stream":`...)
	b = strconv.AppendBool(b, o.Stream)
	if o.Stream && o.Endpoint != "generate" {
		b = append(b, `,"stream_options":{"include_usage":true}`...)
	}
	switch o.Endpoint {
	case "chat":
		b = append(b, `,"max_tokens":`...)
		b = strconv.AppendInt(b, int64(output), 10)
		b = append(b, `,"ignore_eos":true,"messages":[{"role":"user","content":"`...)
		b = appendText(b, tokens)
		b = append(b, `"}]}`...)
	case "completions":
		b = append(b, `,"max_tokens":`...)
		b = strconv.AppendInt(b, int64(output), 10)
		b = append(b, `,"ignore_eos":true,"prompt":`...)
		if o.TokenIDs {
			b = appendIDs(b, tokens)
		} else {
			b = append(append(appendText(append(b, '"'), tokens), '"'), ' ')
		}
		b = append(b, '}')
	case "generate":
		b = append(b, `,"sampling_params":{"ignore_eos":true,"max_tokens":`...)
		b = strconv.AppendInt(b, int64(output), 10)
		b = append(b, `},"token_ids":`...)
		b = append(appendIDs(b, tokens), '}')
	}
	return b
}

func appendText(b []byte, tokens []uint32) []byte {
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ' ')
		}
		b = append(b, vocabulary[t%uint32(len(vocabulary))]...)
		if t >= uint32(len(vocabulary)) {
			b = strconv.AppendUint(b, uint64(t/uint32(len(vocabulary))), 36)
		}
	}
	return b
}

func appendIDs(b []byte, tokens []uint32) []byte {
	b = append(b, '[')
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t%30_000+3), 10)
	}
	return append(b, ']')
}

// jobQueue serialises a workload for many users.
type jobQueue struct {
	mu sync.Mutex
	w  workload
}

func (f *jobQueue) next() (Job, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.w.next()
}

func newWorkload(o Options) (workload, error) {
	if o.Trace != "" {
		t, err := openTrace(o)
		if err != nil {
			return nil, fmt.Errorf("load: cannot replay %q: %w", o.Trace, err)
		}
		return t, nil
	}
	return newSynthetic(o), nil
}
