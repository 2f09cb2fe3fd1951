package load

import (
	"errors"
	"flag"
	"fmt"
	"net/url"
	"strings"
	"time"
)

// Options of a run. Zero values mean the default in brackets.
type Options struct {
	URL      string // base URL of the server [http://127.0.0.1:8080]
	Model    string // [sim]
	Endpoint string // chat, completions, generate [chat]
	Stream   bool   // ask for a stream; Default sets it

	// One of the two: Concurrency users in a closed loop [16, when there is no
	// Rate and no Trace], or Rate requests per second in an open loop. A trace
	// brings its own times, unless Concurrency is given; it goes with no Rate.
	Concurrency int
	Rate        float64
	Poisson     bool // open loop: exponential gaps instead of equal ones
	MaxInFlight int  // open loop: requests at once; beyond it they are dropped and counted [4096]

	Duration time.Duration // [10s]; 0 with Requests set: no limit
	Requests int           // stop after so many; 0: by Duration
	Timeout  time.Duration // of one request [120s]

	// The synthetic workload.
	PromptTokens int     // [512]
	OutputTokens int     // [64]
	SharedPrefix float64 // share of the prompt that a group has in common, 0…1 [0.5]
	Groups       int     // how many such prefixes there are [8]
	Turns        int     // requests of one conversation, each with all before it as its prefix [1]
	Seed         uint64  // [1]

	// Trace replays a JSONL file of Mooncake's form instead; TraceSpeed scales
	// its clock [1]; in a closed loop only its lengths and order are used.
	Trace      string
	TraceSpeed float64

	TokenIDs bool         // completions: send prompts as token ids
	Headers  []string     // "Name: value", added to every request
	OnResult func(Result) // called from the requests' goroutines; may be nil
}

// open says whether the run is an open loop.
func (o *Options) open() bool { return o.Rate > 0 || o.Trace != "" && o.Concurrency == 0 }

const defaultConcurrency = 16

// Default are the Options of `sluice load` without flags.
func Default() Options {
	return Options{
		URL: "http://127.0.0.1:8080", Model: "sim", Endpoint: "chat", Stream: true,
		MaxInFlight: 4096, Duration: 10 * time.Second, Timeout: 120 * time.Second,
		PromptTokens: 512, OutputTokens: 64, SharedPrefix: 0.5, Groups: 8, Turns: 1, Seed: 1, TraceSpeed: 1,
	}
}

type headerList struct{ all *[]string }

func (h headerList) String() string     { return "" }
func (h headerList) Set(s string) error { *h.all = append(*h.all, s); return nil }

// Flags binds every option to a flag of fs.
func (o *Options) Flags(fs *flag.FlagSet) {
	fs.StringVar(&o.URL, "url", o.URL, "base `URL` of the server")
	fs.StringVar(&o.Model, "model", o.Model, "model `NAME` to ask for")
	fs.StringVar(&o.Endpoint, "endpoint", o.Endpoint, "chat, completions or generate")
	fs.BoolVar(&o.Stream, "stream", o.Stream, "ask for streams")
	fs.IntVar(&o.Concurrency, "concurrency", o.Concurrency, "closed loop: `N` users, each with one request at a time (16 when there is no --rate and no --trace)")
	fs.Float64Var(&o.Rate, "rate", o.Rate, "open loop: `R` requests a second, whatever the server does")
	fs.BoolVar(&o.Poisson, "poisson", o.Poisson, "open loop: exponential gaps instead of equal ones")
	fs.IntVar(&o.MaxInFlight, "max-in-flight", o.MaxInFlight, "open loop: at most `N` requests at once, more are dropped and counted")
	fs.DurationVar(&o.Duration, "duration", o.Duration, "how long to send")
	fs.IntVar(&o.Requests, "requests", o.Requests, "stop after `N` requests (0: by duration)")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout, "of one request")
	fs.IntVar(&o.PromptTokens, "prompt-tokens", o.PromptTokens, "about `N` tokens a prompt")
	fs.IntVar(&o.OutputTokens, "output-tokens", o.OutputTokens, "max_tokens of a request")
	fs.Float64Var(&o.SharedPrefix, "shared-prefix", o.SharedPrefix, "`SHARE` of a prompt that its group has in common, 0 to 1")
	fs.IntVar(&o.Groups, "groups", o.Groups, "`N` different shared prefixes")
	fs.IntVar(&o.Turns, "turns", o.Turns, "`N` requests to a conversation, each with all before as its prefix")
	fs.Uint64Var(&o.Seed, "seed", o.Seed, "of the prompts")
	fs.StringVar(&o.Trace, "trace", o.Trace, "replay a JSONL `FILE` of {timestamp ms, input_length, output_length, hash_ids} at its own times")
	fs.Float64Var(&o.TraceSpeed, "trace-speed", o.TraceSpeed, "play the trace `X` times as fast")
	fs.BoolVar(&o.TokenIDs, "token-ids", o.TokenIDs, "completions: send prompts as token ids")
	fs.Var(headerList{&o.Headers}, "header", "`\"Name: value\"` to add to every request; may be repeated")
}

// Validate says what is wrong with the options, all of it.
func (o *Options) Validate() error {
	var errs []error
	bad := func(flag string, got any, want string) {
		errs = append(errs, fmt.Errorf("load: --%s is %q; want %s", flag, fmt.Sprint(got), want))
	}
	if u, err := url.Parse(o.URL); err != nil || u.Scheme != "http" || u.Host == "" {
		bad("url", o.URL, "http://HOST:PORT")
	}
	switch o.Endpoint {
	case "chat", "completions", "generate":
	default:
		bad("endpoint", o.Endpoint, "chat, completions or generate")
	}
	if o.TokenIDs && o.Endpoint == "chat" {
		bad("token-ids", o.TokenIDs, "--endpoint completions or generate with it")
	}
	if o.Rate < 0 || o.Rate > 1e6 {
		bad("rate", o.Rate, "0 (closed loop) to 1000000 a second")
	}
	if o.Rate > 0 && o.Trace != "" {
		bad("rate", o.Rate, "no --rate beside --trace, which has times of its own (--trace-speed scales them)")
	}
	if o.Concurrency < 0 || o.Concurrency > 100_000 {
		bad("concurrency", o.Concurrency, "1 to 100000")
	}
	if o.MaxInFlight < 1 {
		bad("max-in-flight", o.MaxInFlight, "1 or more")
	}
	if o.Duration <= 0 && o.Requests <= 0 {
		bad("duration", o.Duration, "more than 0, or --requests")
	}
	if o.Timeout <= 0 {
		bad("timeout", o.Timeout, "more than 0")
	}
	if o.PromptTokens < 1 || o.PromptTokens > 4_000_000 {
		bad("prompt-tokens", o.PromptTokens, "1 to 4000000")
	}
	if o.OutputTokens < 1 {
		bad("output-tokens", o.OutputTokens, "1 or more")
	}
	if o.SharedPrefix < 0 || o.SharedPrefix > 1 {
		bad("shared-prefix", o.SharedPrefix, "0 to 1")
	}
	if o.Groups < 1 {
		bad("groups", o.Groups, "1 or more")
	}
	if o.Turns < 1 {
		bad("turns", o.Turns, "1 or more")
	}
	if o.TraceSpeed <= 0 {
		bad("trace-speed", o.TraceSpeed, "more than 0")
	}
	for _, h := range o.Headers {
		if name, _, ok := strings.Cut(h, ":"); !ok || name == "" || strings.ContainsAny(h, "\r\n") {
			bad("header", h, `"Name: value"`)
		}
	}
	return errors.Join(errs...)
}
