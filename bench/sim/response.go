package sim

import (
	"fmt"

	"sluice/bench/sim/textgen"
	"sluice/bench/sim/vllm"
)

// apiConfig is what requests and formats need to know of the engine.
type apiConfig struct {
	engine, version, model string
	release                vllm.Release
	seed                   uint64
	maxModelLen            int
	ranks                  int
	hideCached             bool // usage has no prompt_tokens_details
	skipTokenizer          bool // SGLang: native responses have no text
	incremental            bool // SGLang: native streams carry deltas
	hidesPromptLogprobs    bool // SGLang: a decode server returns no log probabilities of the prompt
	disableScaleUp         bool // /inference/v1/* returns 403
	failure                func(status int, msg, param string) []byte
}

// response is the response to one request: its identity, its parameters and its choices.
type response struct {
	config     *apiConfig
	format     format
	members    transferMembers
	send       func([]byte) error // writes to the client
	id         string             // id that the client sees
	created    int64
	model      string
	rank       int // rank that generates it
	params     *params
	choices    []*choice
	unfinished int      // choices not finished
	events     int      // events or tokens sent, for faults that count them
	rids       []string // SGLang: the client's ids, one for each prompt
	aborted    string   // SGLang: why the transfer failed
	coalesced  []byte   // events of a step that are sent together, with chunker.coalesce
}

// transferMembers are the members of a response that tell of the transfer of its KV.
type transferMembers interface {
	AppendHandle(b []byte) []byte                    // kv_transfer_params of a whole response
	AppendStreamedHandle(b []byte, index int) []byte // the same member in an event of a choice
	AppendToChoice(b []byte, index int) []byte       // further members of a choice
	AppendToAnswer(b []byte) []byte                  // further members of a whole response
	PrefillCached() *int                             // cached tokens that prefill reported; nil: none
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
	toolName     string // the response is a call of this function
	logprobs     int    // alternatives to return for each token, see logprobs.go
}

const maxSequences = 1 << 14 // per request

// readParams validates a request, sets the parameters of its response and returns the
// prompts.
func (r *response) readParams(b *body, path, session string) ([][]uint32, error) {
	o := r.config
	if path == "/inference/v1/generate" && o.disableScaleUp {
		return nil, refuse(403, "", "The scale-out endpoints are disabled; start the engine with --enable-scale-out.")
	}
	if b.Model != "" && b.Model != o.model {
		return nil, refuse(404, "model", "The model `%s` does not exist.", b.Model)
	}
	r.model = o.model
	p := &params{stream: b.Stream, n: 1, seed: b.Seed, minTokens: b.MinTokens, ignoreEOS: b.IgnoreEOS,
		includeStop: b.IncludeStop, returnIDs: b.ReturnIDs && o.release.ReturnsIDs(), echo: b.Echo, salt: b.CacheSalt, logprobs: requestedLogprobs(path == "/v1/chat/completions", b.Logprobs, b.TopLogprobs), session: session}
	r.params = p
	stop, maxTokens, n := b.Stop, b.MaxTokens, b.N
	if b.MaxCompletion != nil {
		maxTokens = b.MaxCompletion
	}
	ids, err := r.format.prompts(r, b)
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
		if !p.stream {
			return nil, refuse(400, "stream_options", "Stream options can only be defined when `stream=True`.")
		}
		p.includeUsage, p.everyUsage = so.IncludeUsage, so.IncludeUsage && so.ContinuousUsage
	}
	if p.stop == nil {
		if p.stop, err = stops(stop); err != nil {
			return nil, err
		}
	}
	if n != nil {
		if p.n = *n; p.n < 1 || p.n > 128 {
			return nil, refuse(400, "n", "n must be at least 1 and at most 128, got %d.", p.n)
		}
	}
	if len(ids)*p.n > maxSequences {
		return nil, refuse(400, "prompt", "%d prompts with n=%d are over the limit of %d sequences.", len(ids), p.n, maxSequences)
	}
	longest := 0
	for _, list := range ids {
		longest = max(longest, len(list))
	}
	room := o.maxModelLen - longest
	if room < 1 {
		return nil, refuse(400, "input_tokens", "This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", o.maxModelLen, longest)
	}
	p.maxTokens = room
	if maxTokens != nil {
		if *maxTokens < 1 {
			return nil, refuse(400, "max_tokens", "max_tokens must be at least 1, got %d.", *maxTokens)
		}
		if *maxTokens > room {
			return nil, refuse(400, "max_tokens", "'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is %d tokens and your request has %d input tokens (%d > %d - %d).", *maxTokens, o.maxModelLen, longest, *maxTokens, o.maxModelLen, longest)
		}
		p.maxTokens = *maxTokens
	}
	if p.minTokens < 0 || p.minTokens > p.maxTokens {
		return nil, refuse(400, "min_tokens", "min_tokens must be less than or equal to max_tokens=%d, got %d.", p.maxTokens, p.minTokens)
	}
	p.toolName, _ = chooseTool(b)
	return ids, nil
}

// addChoice makes s the next choice of the response.
func (r *response) addChoice(s *choice, b *body, prompt []uint32) {
	p := r.params
	s.response, s.index = r, len(r.choices)
	s.setPrompt(prompt)
	if len(b.native) > 1 {
		s.limit = nativeLimit(&b.native[s.index/p.n])
	}
	s.promptLogprobs(b.logprobs, s.index/p.n)
	if p.toolName != "" {
		s.script = toolScript(b, p.toolName, s.gen.State)
	}
	if text, ok := b.constrainedText(); ok && s.script == nil {
		s.forced = append([]uint32{}, textgen.Vocab().Append(nil, text)...)
	}
	r.choices = append(r.choices, s)
	r.unfinished = len(r.choices)
}

// usage counts every prompt once. Of several sequences vLLM reports the cached tokens
// of the first that started, SGLang those of all.
func (r *response) usage() (prompt, completion, cached int) {
	sums := r.config.engine == "sglang"
	for i, s := range r.choices {
		completion += len(s.out)
		if s.index%r.params.n == 0 {
			prompt += len(s.prompt)
			if sums || i == 0 {
				cached += s.cached
			}
		}
	}
	if n := r.members.PrefillCached(); n != nil {
		cached = *n
	}
	return
}

// fingerprint returns the system_fingerprint of responses.
func (r *response) fingerprint() string {
	return fmt.Sprintf("vllm-%s-sim", r.config.version)
}
