package load

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"
)

// Options describes a run. A zero value means the default in brackets.
type Options struct {
	URL      string // base URL of the server [http://127.0.0.1:8080]
	Model    string // [sim]
	Endpoint string // chat, completions or generate [chat]
	Stream   bool   // request streams; Default sets it

	// Load is either Concurrency users in a closed loop [16, without Rate and Trace], or
	// Rate requests per second in an open loop. A trace has its own times, unless
	// Concurrency is set; it excludes Rate.
	Concurrency int
	Rate        float64
	Poisson     bool // open loop: exponential intervals instead of equal ones
	MaxInFlight int  // open loop: concurrent requests, beyond which requests are dropped and counted [4096]

	Duration time.Duration // [10s]; 0 with Requests set: no limit
	Requests int           // number of requests to send; 0: until Duration ends
	Timeout  time.Duration // of one request [120s]

	// Warmup and Cooldown are sent in addition, before and after Duration, and not counted: the
	// report is of the requests due in Duration. With a Cooldown, what is unanswered at its end
	// is cut off, and counted if it was due in Duration.
	Warmup, Cooldown time.Duration

	// Sources replace the load of the fields above by several, each with its own tenant, class and
	// targets.
	Sources []Source

	// The synthetic workload.
	PromptTokens int     // [512]
	OutputTokens int     // [64]
	SharedPrefix float64 // share of the prompt that a group has in common, 0 to 1 [0.5]
	Groups       int     // number of shared prefixes [8]
	Turns        int     // requests of one conversation; each has the previous turns as its prefix [1]
	Seed         uint64  // [1]

	// Trace replays a JSONL file in Mooncake's format instead. TraceSpeed scales its
	// clock [1]. A closed loop uses only its lengths and order.
	Trace      string
	TraceSpeed float64

	TokenIDs bool         // completions: send prompts as token ids
	Headers  []string     // "Name: value", added to every request
	OnResult func(Result) // called from the goroutines of the requests; may be nil

	dial func() (net.Conn, error) // tests: instead of a TCP connection to URL
}

const defaultConcurrency = 16

// Default returns the Options of `sluice load` without flags.
func Default() Options {
	return Options{
		URL: "http://127.0.0.1:8080", Model: "sim", Endpoint: "chat", Stream: true,
		MaxInFlight: 4096, Duration: 10 * time.Second, Timeout: 120 * time.Second,
		PromptTokens: 512, OutputTokens: 64, SharedPrefix: 0.5, Groups: 8, Turns: 1, Seed: 1, TraceSpeed: 1,
	}
}

type sourceList struct{ all *[]Source }

func (l sourceList) String() string { return "" }

func (l sourceList) Set(v string) error {
	s, err := parseSource(v)
	if err == nil {
		*l.all = append(*l.all, s)
	}
	return err
}

type headerList struct{ all *[]string }

func (h headerList) String() string     { return "" }
func (h headerList) Set(s string) error { *h.all = append(*h.all, s); return nil }

// Flags binds every option to a flag of fs.
func (o *Options) Flags(fs *flag.FlagSet) {
	fs.StringVar(&o.URL, "url", o.URL, "base `URL` of the server")
	fs.StringVar(&o.Model, "model", o.Model, "model `NAME` to request")
	fs.StringVar(&o.Endpoint, "endpoint", o.Endpoint, "chat, completions or generate")
	fs.BoolVar(&o.Stream, "stream", o.Stream, "request streams")
	fs.IntVar(&o.Concurrency, "concurrency", o.Concurrency, "closed loop: `N` users, each with one request at a time (16 without --rate and --trace)")
	fs.Float64Var(&o.Rate, "rate", o.Rate, "open loop: `R` requests a second, regardless of the server's speed")
	fs.BoolVar(&o.Poisson, "poisson", o.Poisson, "open loop: exponential intervals instead of equal ones")
	fs.IntVar(&o.MaxInFlight, "max-in-flight", o.MaxInFlight, "open loop: at most `N` concurrent requests; more are dropped and counted")
	fs.DurationVar(&o.Duration, "duration", o.Duration, "how long to send requests")
	fs.DurationVar(&o.Warmup, "warmup", o.Warmup, "`time` of load before --duration that is not counted")
	fs.DurationVar(&o.Cooldown, "cooldown", o.Cooldown, "`time` of load after --duration that is not counted; at its end, what is unanswered is cut off (0: waits for all answers)")
	fs.Var(sourceList{&o.Sources}, "source", "a source of requests, as `KEY=VALUE,…`; may be repeated. Keys: "+strings.Join(sourceKeyNames(), ", "))
	fs.IntVar(&o.Requests, "requests", o.Requests, "stop after `N` requests, of each source (0: after --duration)")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout, "timeout of one request")
	fs.IntVar(&o.PromptTokens, "prompt-tokens", o.PromptTokens, "about `N` tokens per prompt")
	fs.IntVar(&o.OutputTokens, "output-tokens", o.OutputTokens, "max_tokens of a request")
	fs.Float64Var(&o.SharedPrefix, "shared-prefix", o.SharedPrefix, "`SHARE` of a prompt that its group has in common, 0 to 1")
	fs.IntVar(&o.Groups, "groups", o.Groups, "number `N` of shared prefixes")
	fs.IntVar(&o.Turns, "turns", o.Turns, "`N` requests per conversation; each has the previous turns as its prefix")
	fs.Uint64Var(&o.Seed, "seed", o.Seed, "seed of the prompts")
	fs.StringVar(&o.Trace, "trace", o.Trace, "replay a JSONL `FILE` of {timestamp ms, input_length, output_length, hash_ids} at its own times")
	fs.Float64Var(&o.TraceSpeed, "trace-speed", o.TraceSpeed, "replay the trace `X` times as fast")
	fs.BoolVar(&o.TokenIDs, "token-ids", o.TokenIDs, "completions: send prompts as token ids")
	fs.Var(headerList{&o.Headers}, "header", "`\"Name: value\"` to add to every request; may be repeated")
}

// Validate returns one error that lists every invalid option.
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
		bad("token-ids", o.TokenIDs, "--endpoint completions or generate")
	}
	if o.Rate < 0 || o.Rate > 1e6 {
		bad("rate", o.Rate, "0 (closed loop) to 1000000 a second")
	}
	if o.Rate > 0 && o.Trace != "" {
		bad("rate", o.Rate, "no --rate with --trace, which has its own times (--trace-speed scales them)")
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
	if o.Warmup < 0 {
		bad("warmup", o.Warmup, "0 or more")
	}
	if o.Cooldown < 0 {
		bad("cooldown", o.Cooldown, "0 or more")
	}
	if (o.Warmup > 0 || o.Cooldown > 0) && o.Duration <= 0 {
		bad("duration", o.Duration, "more than 0 with --warmup or --cooldown")
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
	errs = append(errs, o.validateSources()...)
	return errors.Join(errs...)
}
