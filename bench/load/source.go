package load

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Source is one origin of requests: who sends them, how often, of which form, and what it
// expects of the answers. A run has one, or several at once. A zero value means that of
// Options, or none.
type Source struct {
	Name string // in the report; "" means its tenant, its class, or its number

	// Load: one of Rate (open loop, requests per second), Users (closed loop) and Agents. The
	// source of a trace's lines has none.
	Rate   float64
	Users  int
	Agents int

	Class    string // sent as X-Sluice-Priority
	Tenant   string // sent as X-Sluice-Tenant
	Key      string // sent as a bearer token
	Priority int    // member of the body, if not 0: the engine's or the router's priority

	// Deadline is sent as X-Sluice-Deadline-Ms, TTFT and TPOT as x-llm-d-slo-ttft-ms and
	// x-llm-d-slo-tpot-ms. An answer within all three counts for goodput.
	Deadline, TTFT, TPOT time.Duration

	PromptTokens int     // of an agent: of its first request
	OutputTokens int     //
	SharedPrefix float64 //
	Groups       int     //
	Turns        int     // requests of one conversation; of an agent: the fewest of a session
	MaxTurns     int     // agents: the most requests of a session; 0: Turns
	Spread       float64 // sigma of the log-normal distribution of lengths and of Grow; 0: all are equal

	// Agents: each runs one session, whose next request follows the answer after a pause (the
	// call of a tool), and has as its prompt the one before, its answer and the tool's result.
	Pause time.Duration // mean of the exponential distribution of pauses
	Grow  int           // mean tokens of a tool's result; 0 means 200
	Start time.Duration // the sessions begin at random times of this interval
}

// defaultGrow is Source.Grow of an agent that names none.
const defaultGrow = 200

// sourceKeys are the keys of --source with their parsers, in the order of the help.
var sourceKeys = []struct {
	key string
	set func(*Source, string) error
}{
	{"name", text(func(s *Source) *string { return &s.Name })},
	{"rate", positive(func(s *Source) *float64 { return &s.Rate }, 1e6)},
	{"users", whole(func(s *Source) *int { return &s.Users }, 1, 100_000)},
	{"agents", whole(func(s *Source) *int { return &s.Agents }, 1, 100_000)},
	{"class", text(func(s *Source) *string { return &s.Class })},
	{"tenant", text(func(s *Source) *string { return &s.Tenant })},
	{"key", text(func(s *Source) *string { return &s.Key })},
	{"priority", whole(func(s *Source) *int { return &s.Priority }, -1<<31, 1<<31-1)},
	{"deadline", duration(func(s *Source) *time.Duration { return &s.Deadline })},
	{"ttft", duration(func(s *Source) *time.Duration { return &s.TTFT })},
	{"tpot", duration(func(s *Source) *time.Duration { return &s.TPOT })},
	{"prompt", whole(func(s *Source) *int { return &s.PromptTokens }, 1, maxTraceInput)},
	{"output", whole(func(s *Source) *int { return &s.OutputTokens }, 1, 1<<20)},
	{"shared-prefix", positive(func(s *Source) *float64 { return &s.SharedPrefix }, 1)},
	{"groups", whole(func(s *Source) *int { return &s.Groups }, 1, 1<<20)},
	{"turns", setTurns},
	{"spread", positive(func(s *Source) *float64 { return &s.Spread }, 3)},
	{"pause", duration(func(s *Source) *time.Duration { return &s.Pause })},
	{"grow", whole(func(s *Source) *int { return &s.Grow }, 1, 1<<20)},
	{"start", duration(func(s *Source) *time.Duration { return &s.Start })},
}

func text(field func(*Source) *string) func(*Source, string) error {
	return func(s *Source, v string) error {
		if v == "" || len(v) > 256 || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return errors.New("want 1 to 256 visible ASCII characters")
		}
		*field(s) = v
		return nil
	}
}

func positive(field func(*Source) *float64, limit float64) func(*Source, string) error {
	return func(s *Source, v string) error {
		x, err := strconv.ParseFloat(v, 64)
		if err != nil || !(x > 0 && x <= limit) {
			return fmt.Errorf("want more than 0, at most %g", limit)
		}
		*field(s) = x
		return nil
	}
}

func whole(field func(*Source) *int, low, high int) func(*Source, string) error {
	return func(s *Source, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < low || n > high {
			return fmt.Errorf("want %d to %d", low, high)
		}
		*field(s) = n
		return nil
	}
}

func duration(field func(*Source) *time.Duration) func(*Source, string) error {
	return func(s *Source, v string) error {
		d, err := time.ParseDuration(v)
		if err != nil || d < time.Millisecond || d > time.Hour {
			return errors.New("want 1ms to 1h")
		}
		*field(s) = d
		return nil
	}
}

// setTurns parses N or, for agents, MIN-MAX.
func setTurns(s *Source, v string) error {
	low, high, ranged := strings.Cut(v, "-")
	n, err := strconv.Atoi(low)
	most := n
	if err == nil && ranged {
		most, err = strconv.Atoi(high)
	}
	if err != nil || n < 1 || most < n || most > 1<<20 {
		return errors.New("want N or MIN-MAX, 1 or more")
	}
	s.Turns, s.MaxTurns = n, most
	return nil
}

// parseSource parses the value of --source: KEY=VALUE,…
func parseSource(v string) (Source, error) {
	var s Source
	seen := map[string]bool{}
pairs:
	for _, pair := range strings.Split(v, ",") {
		key, value, _ := strings.Cut(pair, "=")
		if seen[key] {
			return s, fmt.Errorf("%s appears twice in %q", key, v)
		}
		seen[key] = true
		for _, k := range sourceKeys {
			if k.key != key {
				continue
			}
			if err := k.set(&s, value); err != nil {
				return s, fmt.Errorf("%s is %q: %w", key, value, err)
			}
			continue pairs
		}
		return s, fmt.Errorf("unknown key %q in %q; keys are %s", key, v, strings.Join(sourceKeyNames(), ", "))
	}
	return s, nil
}

func sourceKeyNames() (names []string) {
	for _, k := range sourceKeys {
		names = append(names, k.key)
	}
	return names
}

// sources returns the sources of a run, complete: those of Options, or the one that its other
// fields describe.
func (o *Options) sources() []Source {
	list := append([]Source(nil), o.Sources...)
	if len(list) == 0 {
		list = []Source{{Rate: o.Rate, Users: o.Concurrency}}
	}
	for i := range list {
		s := &list[i]
		s.Name = cmp.Or(s.Name, s.Tenant, s.Class, strconv.Itoa(i+1))
		s.PromptTokens = cmp.Or(s.PromptTokens, o.PromptTokens)
		s.OutputTokens = cmp.Or(s.OutputTokens, o.OutputTokens)
		s.SharedPrefix = cmp.Or(s.SharedPrefix, o.SharedPrefix)
		s.Groups = cmp.Or(s.Groups, o.Groups)
		s.Turns = cmp.Or(s.Turns, o.Turns)
		s.MaxTurns = max(s.MaxTurns, s.Turns)
		s.Grow = cmp.Or(s.Grow, defaultGrow)
	}
	return list
}

// validateSources returns what is wrong with the sources together.
func (o *Options) validateSources() (errs []error) {
	names := map[string]bool{}
	for _, s := range o.sources() {
		if len(o.Sources) == 0 {
			break
		}
		if names[s.Name] {
			errs = append(errs, fmt.Errorf("load: two --source are named %q; want a name for each", s.Name))
		}
		names[s.Name] = true
		loads := 0
		for _, given := range []bool{s.Rate > 0, s.Users > 0, s.Agents > 0} {
			if given {
				loads++
			}
		}
		switch {
		case o.Trace != "" && loads > 0:
			errs = append(errs, fmt.Errorf("load: --source %q has a load; with --trace the lines that name a source are its load", s.Name))
		case o.Trace == "" && loads != 1:
			errs = append(errs, fmt.Errorf("load: --source %q has %d of rate, users and agents; want one", s.Name, loads))
		}
		if s.Agents == 0 && s.MaxTurns > s.Turns {
			errs = append(errs, fmt.Errorf("load: --source %q has turns %d-%d; a range is for agents", s.Name, s.Turns, s.MaxTurns))
		}
		if s.Agents > 0 && !o.Stream {
			errs = append(errs, fmt.Errorf("load: --source %q has agents; they need --stream, from which they read the answer", s.Name))
		}
	}
	if len(o.Sources) > 0 && (o.Rate > 0 || o.Concurrency > 0 && o.Trace == "") {
		errs = append(errs, errors.New("load: --rate and --concurrency have no effect with --source; want rate= or users= in it"))
	}
	return errs
}

// head returns the request headers of the source, each line with its end.
func (s *Source) head() string {
	var b strings.Builder
	line := func(name, value string) {
		if value != "" {
			b.WriteString(name + ": " + value + "\r\n")
		}
	}
	millis := func(d time.Duration) string {
		if d == 0 {
			return ""
		}
		return strconv.FormatInt(d.Milliseconds(), 10)
	}
	line("X-Sluice-Priority", s.Class)
	line("X-Sluice-Tenant", s.Tenant)
	if s.Key != "" {
		line("Authorization", "Bearer "+s.Key)
	}
	line("X-Sluice-Deadline-Ms", millis(s.Deadline))
	line("x-llm-d-slo-ttft-ms", millis(s.TTFT))
	line("x-llm-d-slo-tpot-ms", millis(s.TPOT))
	return b.String()
}

// good reports whether an answer came within the targets of its source.
func (s *Source) good(r *Result) bool {
	within := func(d, limit time.Duration) bool { return limit == 0 || d <= limit }
	return r.Err == nil && (s.TTFT == 0 || r.TTFT > 0) && within(r.TTFT, s.TTFT) && within(r.TPOT, s.TPOT) && within(r.Total, s.Deadline)
}
