package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sluice/router/worker"
)

// workerKey is one key of URL,key=value,… on the command line.
type workerKey struct {
	name, form, doc string
	set             func(w *Worker, values []string) error
}

// workerKeys is the one table of them, for parsing, --help and the docs. It is a
// function because option refers to it.
var workerKeys = []workerKey{
	{"model", "NAME[+NAME…]", "model names it serves [read from /v1/models]", func(w *Worker, v []string) error { w.Models = append(w.Models, v...); return nil }},
	{"ranks", "COUNT or R+R…", "data-parallel ranks: 4 means ranks 0 to 3, 0+1 is a list, 2+ means rank 2 only [one rank, 0]", nil},
	{"start_rank", "RANK", "the engine's number of the first rank, if the engine spans nodes and this one serves a part of its ranks (vLLM's --data-parallel-start-rank) [read from the engine]", number("a rank", func(w *Worker) *int { return &w.StartRank })},
	{"rank_urls", "URL+URL…", "one server for each rank, in rank order; the rank header is then not sent", func(w *Worker, v []string) error { w.RankURLs = v; return nil }},
	{"id", "NAME", "name in metrics, logs, headers [role and number: prefill-0]", one(func(w *Worker, v string) { w.ID = v })},
	{"label", "WORD", "a word by which pools select workers; may be repeated", func(w *Worker, v []string) error { w.Labels = append(w.Labels, v...); return nil }},
	{"engine", "vllm|sglang|trtllm", "kind of engine [read from the engine]", one(func(w *Worker, v string) { w.Engine = v })},
	{"health_path", "PATH", "path of its health probes, such as /healthz [health.path]", one(func(w *Worker, v string) { w.HealthPath = v })},
	{"block_size", "TOKENS", "tokens per KV block [read from the engine]", number("tokens", func(w *Worker) *int { return &w.BlockSize })},
	{"kv_events", "auto|off|tcp://HOST:PORT[+…]", "ZMQ endpoints of KV events: one base (rank r at port+r) or one per rank; bind:tcp://… if the engine connects to the router [auto: read from the engine]", func(w *Worker, v []string) error { w.KVEvents = v; return nil }},
	{"kv_replay", "tcp://HOST:PORT[+…]", "ZMQ endpoints for replay, in the same form as kv_events", func(w *Worker, v []string) error { w.KVReplay = v; return nil }},
	{"load_events", "tcp://HOST:PORT[+…]", "ZMQ endpoints of load messages (SGLang's load stats, forward-pass metrics), in the same form as kv_events; a message belongs to the rank that it names [read from SGLang engines]", func(w *Worker, v []string) error { w.LoadEvents = v; return nil }},
	{"max_requests", "COUNT", "maximum requests in flight on all of its ranks; further requests go to other workers, or get 429 [no limit]", number("requests", func(w *Worker) *int64 { return &w.MaxRequests })},
	{"rank_requests", "COUNT", "maximum requests in flight on each of its ranks [limits.rank_requests]", number("requests", func(w *Worker) *int64 { return &w.RankRequests })},
	{"rank_tokens", "TOKENS", "maximum prompt tokens waiting to be computed on each of its ranks [limits.rank_tokens]", number("tokens", func(w *Worker) *int64 { return &w.RankTokens })},
	{"bootstrap_port", "PORT[+PORT…]", "bootstrap server of a prefill worker (families sglang, mooncake)", nil},
	{"bootstrap_host", "HOST", "host of that server as decode workers reach it [the host of the URL]", nil},
	{"init_port", "PORT[+PORT…]", "NIXL peer-init ports of a decode worker, one per tensor-parallel rank (family lmcache)", nil},
	{"alloc_port", "PORT[+PORT…]", "NIXL peer-alloc ports of a decode worker, one per tensor-parallel rank (family lmcache)", nil},
	{"peer_host", "HOST", "host of init_port and alloc_port [the host of the URL] (family lmcache)", nil},
	{"connector", "true|false", "the engine runs Sluice's connector (nixl/connector), so each decode request gets a slot of the completion board [false] (families nixl, nixl-push)", nil},
}

// number returns the setter of a key whose value is an integer. of names the value in errors.
func number[N int | int64](of string, field func(*Worker) *N) func(*Worker, []string) error {
	return func(w *Worker, v []string) error {
		n, err := strconv.ParseInt(v[0], 10, 31)
		if err != nil || len(v) > 1 || n < 0 {
			return fmt.Errorf("%s is not a number of %s", quoted(strings.Join(v, "+")), of)
		}
		*field(w) = N(n)
		return nil
	}
}

func one(set func(*Worker, string)) func(*Worker, []string) error {
	return func(w *Worker, v []string) error {
		if len(v) != 1 || v[0] == "" {
			return fmt.Errorf("%s is not one value", quoted(strings.Join(v, "+")))
		}
		set(w, v[0])
		return nil
	}
}

// optionKeys are the keys that are stored in Options. This package checks their syntax; the families
// interpret them.
var optionKeys = []string{"bootstrap_port", "bootstrap_host", "init_port", "alloc_port", "peer_host", "connector"}

func keyNames() []string {
	var names []string
	for _, k := range workerKeys {
		names = append(names, k.name)
	}
	return names
}

// KeyTable returns the table of the keys of a worker flag, one line each, for --help and the
// documents.
func KeyTable() string {
	var b strings.Builder
	for _, k := range workerKeys {
		fmt.Fprintf(&b, "  %-46s %s\n", k.name+"="+k.form, k.doc)
	}
	b.WriteString("Values of a list are joined with +. In a configuration file the keys are fields of an entry of workers:\nmodel is models, label is labels, and the keys of a family are under options.\n")
	return b.String()
}

// ParseWorker parses the value of --engine, --prefill or --decode: URL[,key=value…]. The error lists
// what is accepted.
func ParseWorker(role worker.Role, text string) (Worker, error) {
	w := Worker{Role: role}
	parts := strings.Split(text, ",")
	if w.URL = strings.TrimSpace(parts[0]); !strings.Contains(w.URL, "://") {
		return w, fmt.Errorf("%s does not begin with a URL; want http://HOST:PORT[,key=value…]", quoted(text))
	}
	seen := map[string]bool{}
	for _, part := range parts[1:] {
		name, value, found := strings.Cut(part, "=")
		name = strings.TrimSpace(name)
		i := slices.IndexFunc(workerKeys, func(k workerKey) bool { return k.name == name })
		switch {
		case i < 0:
			return w, fmt.Errorf("no such key %s%s; keys:\n%s", quoted(name), suggestion(name, keyNames()), strings.TrimRight(KeyTable(), "\n"))
		case !found || value == "":
			return w, fmt.Errorf("key %s has no value; want %s=%s", name, name, workerKeys[i].form)
		case seen[name] && name != "label" && name != "model":
			return w, fmt.Errorf("key %s is given twice; want the values of a list joined with +: %s=%s", name, name, workerKeys[i].form)
		}
		seen[name] = true
		if err := setKey(&w, workerKeys[i], value); err != nil {
			return w, fmt.Errorf("key %s: %w; want %s=%s", name, err, name, workerKeys[i].form)
		}
	}
	return w, nil
}

func setKey(w *Worker, k workerKey, value string) (err error) {
	switch {
	case k.name == "ranks":
		w.Ranks, err = parseRanks(value)
		return err
	case k.set != nil:
		return k.set(w, strings.Split(value, "+"))
	}
	if w.Options == nil {
		w.Options = map[string][]string{}
	}
	w.Options[k.name] = strings.Split(value, "+")
	return nil
}

// parseRanks parses a number of ranks, or a list of ranks joined with +.
func parseRanks(text string) ([]uint16, error) {
	list, isList := strings.CutSuffix(text, "+")
	if !isList && !strings.Contains(text, "+") {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 || n > worker.MaxSlots {
			return nil, fmt.Errorf("%s is not a count of ranks from 1 to %d", quoted(text), worker.MaxSlots)
		}
		ranks := make([]uint16, n)
		for i := range ranks {
			ranks[i] = uint16(i)
		}
		return ranks, nil
	}
	var ranks []uint16
	for r := range strings.SplitSeq(list, "+") {
		n, err := strconv.ParseUint(r, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("%s is not a rank from 0 to 65535", quoted(r))
		}
		ranks = append(ranks, uint16(n))
	}
	return ranks, nil
}

// Specs returns the specifications of the workers for the fleet. A worker without an id gets one from
// its role and a number.
func (c *Config) Specs() []worker.Spec { return c.SpecsAfter(nil) }

// SpecsAfter is Specs for a configuration that was read again. A worker without an id keeps the id
// that a worker of the same role and URL has in before, so that the removal of an entry does not
// rename the ones after it.
func (c *Config) SpecsAfter(before []worker.Spec) []worker.Spec {
	taken := map[string]bool{}
	for _, w := range c.Workers {
		taken[w.ID] = true
	}
	kept := map[string]string{} // role and URL -> id
	for _, s := range before {
		kept[s.Role.String()+" "+s.URL] = s.ID
	}
	for i := range c.Workers {
		if w := c.Workers[i]; w.ID == "" {
			if id := kept[w.Role.String()+" "+w.URL]; id != "" && !taken[id] {
				taken[id] = true
			}
		}
	}
	var next [3]int
	given := map[string]bool{}
	specs := make([]worker.Spec, 0, len(c.Workers))
	for i, w := range c.Workers {
		if id := kept[w.Role.String()+" "+w.URL]; w.ID == "" && id != "" && !given[id] && !c.hasWorkerID(id) {
			w.ID = id
		}
		for w.ID == "" {
			id := fmt.Sprintf("%s-%d", w.Role, next[w.Role])
			next[w.Role]++
			if !taken[id] {
				w.ID = id
			}
		}
		given[w.ID] = true
		source := "config"
		if from := c.originOf(fmt.Sprintf("workers[%d]", i)).from; strings.HasPrefix(from, "--") {
			source = "flag"
		} else if from != "" {
			source = "env"
		}
		w.Options = c.withPeer(&w)
		specs = append(specs, w.Spec(source))
	}
	return specs
}

// hasWorkerID reports whether a worker is configured with this id.
func (c *Config) hasWorkerID(id string) bool {
	return slices.ContainsFunc(c.Workers, func(w Worker) bool { return w.ID == id })
}

// Spec returns the worker's specification for the fleet. source names where the worker was configured
// or found.
func (w *Worker) Spec(source string) worker.Spec {
	events := w.KVEvents
	if len(events) == 0 {
		events = []string{"auto"}
	}
	return worker.Spec{
		ID: w.ID, URL: w.URL, Role: w.Role, Models: w.Models, Ranks: w.Ranks, StartRank: w.StartRank, RankURLs: w.RankURLs, Labels: w.Labels,
		Engine: w.Engine, HealthPath: w.HealthPath, BlockSize: w.BlockSize, KVEvents: events, KVReplay: w.KVReplay, LoadEvents: w.LoadEvents,
		MaxRequests: w.MaxRequests, RankRequests: w.RankRequests, RankTokens: w.RankTokens, Options: w.Options, Source: source,
	}
}

// OptionKeys returns the names of the fields under a worker's options.
func OptionKeys() []string { return slices.Clone(optionKeys) }
