package load

import (
	"encoding/json"
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

	source  int  // index of its source
	collect bool // the answer is needed, see Result.output
	final   bool // the last request of its session, which X-Sluice-Session-Final says
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
	o             *Options
	src           *Source
	index         int // of src
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

// newSynthetic makes the workload of a source. It has random numbers of its own, so that its
// requests are the same whatever other sources there are.
func newSynthetic(o *Options, src *Source, index int) *synthetic {
	s := &synthetic{o: o, src: src, index: index, rng: rand.New(rand.NewPCG(o.Seed, 0x5eed+uint64(index)))}
	shared := int(math.Round(float64(src.PromptTokens) * src.SharedPrefix))
	for range src.Groups {
		s.prefix = append(s.prefix, randomTokens(s.rng, shared))
	}
	s.gaps = func() time.Duration { return 0 }
	if src.Rate > 0 {
		mean := float64(time.Second) / src.Rate
		s.gaps = func() time.Duration { return time.Duration(mean) }
		if o.Poisson {
			s.gaps = func() time.Duration { return time.Duration(s.rng.ExpFloat64() * mean) }
		}
	}
	return s
}

// maxOpenConversations is how many conversations a synthetic load has open at once.
const maxOpenConversations = 32

func randomTokens(rng *rand.Rand, n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(rng.IntN(1 << 16))
	}
	return t
}

// maxSpread limits a random length, as a multiple of its mean.
const maxSpread = 8

// lengthOf returns a length with that mean: log-normal with that sigma, or the mean if it is 0.
func lengthOf(rng *rand.Rand, mean int, sigma float64) int {
	if sigma == 0 {
		return mean
	}
	n := float64(mean) * math.Exp(sigma*rng.NormFloat64()-sigma*sigma/2)
	return int(math.Round(min(max(n, 1), maxSpread*float64(mean))))
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
		t.tokens = append(t.tokens, randomTokens(s.rng, max(1, s.src.PromptTokens/8))...)
		t.turn++
		if t.turn >= s.src.Turns {
			s.conversations[i] = s.conversations[len(s.conversations)-1]
			s.conversations = s.conversations[:len(s.conversations)-1]
		}
	} else {
		p := s.prefix[s.rng.IntN(len(s.prefix))]
		own := max(0, lengthOf(s.rng, s.src.PromptTokens, s.src.Spread)-len(p))
		t = &conversation{tokens: append(append([]uint32{}, p...), randomTokens(s.rng, own)...), turn: 1}
		if s.src.Turns > 1 {
			s.conversations = append(s.conversations, t)
		}
	}
	s.due += s.gaps()
	output := lengthOf(s.rng, s.src.OutputTokens, s.src.Spread)
	return Job{Due: s.due, Body: render(s.o, s.src.Priority, t.tokens, output), Tokens: len(t.tokens), Output: output, source: s.index}, true
}

// appendStart appends the members of a request body that do not depend on the prompt.
func appendStart(b []byte, o *Options, priority int) []byte {
	b = append(b, `{"model":`...)
	b = strconv.AppendQuote(b, o.Model)
	b = append(b, `,"stream":`...)
	b = strconv.AppendBool(b, o.Stream)
	if o.Stream && o.Endpoint != "generate" {
		b = append(b, `,"stream_options":{"include_usage":true}`...)
	}
	if priority != 0 {
		b = strconv.AppendInt(append(b, `,"priority":`...), int64(priority), 10)
	}
	return b
}

// appendLimit appends the members that make an answer exactly output tokens long, after a
// comma or the start of an object.
func appendLimit(b []byte, output int) []byte {
	if b[len(b)-1] != '{' {
		b = append(b, ',')
	}
	b = strconv.AppendInt(append(b, `"max_tokens":`...), int64(output), 10)
	return append(b, `,"ignore_eos":true`...)
}

// render writes the request body. Text prompts have one word per token, numbered so
// that any two tokens differ.
func render(o *Options, priority int, tokens []uint32, output int) []byte {
	b := appendStart(make([]byte, 0, 64+len(tokens)*8), o, priority)
	switch o.Endpoint {
	case "chat":
		b = append(appendLimit(b, output), `,"messages":[{"role":"user","content":"`...)
		b = appendText(b, tokens)
		b = append(b, `"}]}`...)
	case "completions":
		b = append(appendLimit(b, output), `,"prompt":`...)
		if o.TokenIDs {
			b = appendIDs(b, tokens)
		} else {
			b = append(append(appendText(append(b, '"'), tokens), '"'), ' ')
		}
		b = append(b, '}')
	case "generate":
		b = appendLimit(append(b, `,"sampling_params":{`...), output)
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
		b = strconv.AppendUint(b, uint64(tokenID(t)), 10)
	}
	return append(b, ']')
}

// tokenID maps a synthetic token to an id that the vocabularies of engines have.
func tokenID(t uint32) uint32 { return t%30_000 + 3 }

// appendJSON appends s as a JSON string.
func appendJSON(b []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // a string always has a JSON form
	return append(b, quoted...)
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
