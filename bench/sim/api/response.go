package api

import (
	"fmt"

	"sluice/bench/sim/textgen"
	"sluice/bench/sim/vllm"
)

// Config is what requests and formats need to know of the engine.
type Config struct {
	Engine, Version, Model string
	Release                vllm.Release
	Seed                   uint64
	MaxModelLen            int
	Ranks                  int
	HideCached             bool // usage has no prompt_tokens_details
	SkipTokenizer          bool // SGLang: native responses have no text
	Incremental            bool // SGLang: native streams carry deltas
	HidesPromptLogprobs    bool // SGLang: a decode server returns no log probabilities of the prompt
	DisableScaleUp         bool // /inference/v1/* returns 403
	Failure                func(status int, msg, param string) []byte
}

// Response is the response to one request: its identity, its parameters and its choices.
type Response struct {
	Config     *Config
	Format     Format
	Members    Transfer
	Send       func([]byte) error // writes to the client
	ID         string             // id that the client sees
	Created    int64
	model      string
	Rank       int // rank that generates it
	Params     *Params
	choices    []*Choice
	Unfinished int      // choices not finished
	Events     int      // events or tokens sent, for faults that count them
	RIDs       []string // SGLang: the client's ids, one for each prompt
	Aborted    string   // SGLang: why the transfer failed
	coalesced  []byte   // events of a step that are sent together, with Chunker.Coalesce
}

// Transfer are the members of a response that report the transfer of its KV.
type Transfer interface {
	AppendHandle(b []byte) []byte                    // kv_transfer_params of a whole response
	AppendStreamedHandle(b []byte, index int) []byte // the same member in an event of a choice
	AppendToChoice(b []byte, index int) []byte       // further members of a choice
	AppendToAnswer(b []byte) []byte                  // further members of a whole response
	PrefillCached() *int                             // cached tokens that prefill reported; nil: none
}

// Params are the generation parameters of a request.
type Params struct {
	Stream       bool
	includeUsage bool
	everyUsage   bool // continuous_usage_stats
	MaxTokens    int
	minTokens    int
	ignoreEOS    bool
	seed         int64
	N            int
	stop         []string
	includeStop  bool
	ReturnIDs    bool
	echo         bool
	Salt         string
	Priority     float64 // lower is scheduled first, where the engine's policy is priority
	Session      string
	toolName     string // the response is a call of this function
	logprobs     int    // alternatives to return for each token, see logprobs.go
}

const maxSequences = 1 << 14 // per request

// ReadParams validates a request, sets the parameters of its response and returns the
// prompts.
func (r *Response) ReadParams(b *Body, path, session string) ([][]uint32, error) {
	o := r.Config
	if path == "/inference/v1/generate" && o.DisableScaleUp {
		return nil, Refuse(403, "", "The scale-out endpoints are disabled; start the engine with --enable-scale-out.")
	}
	if b.Model != "" && b.Model != o.Model {
		return nil, Refuse(404, "model", "The model `%s` does not exist.", b.Model)
	}
	r.model = o.Model
	p := &Params{Stream: b.Stream, N: 1, seed: b.Seed, minTokens: b.MinTokens, ignoreEOS: b.IgnoreEOS,
		includeStop: b.IncludeStop, ReturnIDs: b.ReturnIDs && o.Release.ReturnsIDs(), echo: b.Echo, Salt: b.CacheSalt, Priority: b.Priority, logprobs: requestedLogprobs(path == "/v1/chat/completions", b.Logprobs, b.TopLogprobs), Session: session}
	r.Params = p
	stop, maxTokens, n := b.Stop, b.MaxTokens, b.N
	if b.MaxCompletion != nil {
		maxTokens = b.MaxCompletion
	}
	ids, err := r.Format.prompts(r, b)
	if err != nil {
		return nil, err
	}
	switch path {
	case "/generate":
		if maxTokens, n, stop, err = b.nativeParams(p); err != nil {
			return nil, err
		}
	case "/v1/responses":
		maxTokens, n = b.MaxOutput, nil
	case "/v1/messages":
		p.stop, n = b.StopSequences, nil
	case "/v1/completions":
		if maxTokens == nil {
			d := 16
			maxTokens = &d
		}
	case "/inference/v1/generate":
		s := b.Sampling
		if s == nil {
			s = &sampling{}
		}
		stop, maxTokens, n = s.Stop, s.MaxTokens, s.N
		p.seed, p.minTokens, p.ignoreEOS, p.includeStop = s.Seed, s.MinTokens, s.IgnoreEOS, s.IncludeStop
		p.logprobs = requestedLogprobs(false, s.Logprobs, 0)
		if maxTokens == nil {
			d := 16
			maxTokens = &d
		}
	}
	if so := b.StreamOptions; so != nil {
		if !p.Stream {
			return nil, Refuse(400, "stream_options", "Stream options can only be defined when `stream=True`.")
		}
		p.includeUsage, p.everyUsage = so.IncludeUsage, so.IncludeUsage && so.ContinuousUsage
	}
	if p.stop == nil {
		if p.stop, err = stops(stop); err != nil {
			return nil, err
		}
	}
	if n != nil {
		if p.N = *n; p.N < 1 || p.N > 128 {
			return nil, Refuse(400, "n", "n must be at least 1 and at most 128, got %d.", p.N)
		}
	}
	if len(ids)*p.N > maxSequences {
		return nil, Refuse(400, "prompt", "%d prompts with n=%d are over the limit of %d sequences.", len(ids), p.N, maxSequences)
	}
	longest := 0
	for _, list := range ids {
		longest = max(longest, len(list))
	}
	room := o.MaxModelLen - longest
	if room < 1 {
		return nil, Refuse(400, "input_tokens", "This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", o.MaxModelLen, longest)
	}
	p.MaxTokens = room
	if maxTokens != nil {
		if *maxTokens < 1 {
			return nil, Refuse(400, "max_tokens", "max_tokens must be at least 1, got %d.", *maxTokens)
		}
		if *maxTokens > room {
			return nil, Refuse(400, "max_tokens", "'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is %d tokens and your request has %d input tokens (%d > %d - %d).", *maxTokens, o.MaxModelLen, longest, *maxTokens, o.MaxModelLen, longest)
		}
		p.MaxTokens = *maxTokens
	}
	if p.minTokens < 0 || p.minTokens > p.MaxTokens {
		return nil, Refuse(400, "min_tokens", "min_tokens must be less than or equal to max_tokens=%d, got %d.", p.MaxTokens, p.minTokens)
	}
	p.toolName, _ = chooseTool(b)
	return ids, nil
}

// AddChoice makes s the next choice of the response.
func (r *Response) AddChoice(s *Choice, b *Body, prompt []uint32) {
	p := r.Params
	s.response, s.Index = r, len(r.choices)
	s.SetPrompt(prompt)
	if len(b.native) > 1 {
		s.Limit = nativeLimit(&b.native[s.Index/p.N])
	}
	s.promptLogprobs(b.logprobs, s.Index/p.N)
	if p.toolName != "" {
		s.script = toolScript(b, p.toolName, s.Gen.State)
	}
	if text, ok := b.constrainedText(); ok && s.script == nil {
		s.forced = append([]uint32{}, textgen.Vocab().Append(nil, text)...)
	}
	r.choices = append(r.choices, s)
	r.Unfinished = len(r.choices)
}

// usage counts every prompt once. Of several sequences vLLM reports the cached tokens
// of the first that started, SGLang those of all.
func (r *Response) usage() (prompt, completion, cached int) {
	sums := r.Config.Engine == "sglang"
	for i, s := range r.choices {
		completion += len(s.Out)
		if s.Index%r.Params.N == 0 {
			prompt += len(s.Prompt)
			if sums || i == 0 {
				cached += s.Cached
			}
		}
	}
	if n := r.Members.PrefillCached(); n != nil {
		cached = *n
	}
	return
}

// fingerprint returns the system_fingerprint of responses.
func (r *Response) fingerprint() string {
	return fmt.Sprintf("vllm-%s-sim", r.Config.Version)
}
