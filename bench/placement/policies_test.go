package placement

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dustin/go-humanize"

	"sluice/router/schedule"
)

var (
	compare = flag.Bool("policies", false, "compare the policies")
	write   = flag.String("write", "", "file for the page")
	// Not named trace: that is a flag of go test, which writes to the file.
	traceFile = flag.String("mooncake", "", "a trace in Mooncake's format; empty: the generated ones")
)

// newOptions are the scheduler's options with the defaults of package config.
func newOptions(policy string) schedule.Options {
	return schedule.Options{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1, HostWeight: 0.8, DiskWeight: 0.5, InFlightWeight: 0.9, EvictionWeight: 0.5, OthersWeight: 4, Policy: policy}
}

// simulate is Run in a bubble.
func simulate(t *testing.T, tr *Trace, o Options, v Variant) (res Result) {
	synctest.Test(t, func(*testing.T) {
		o.Advance = time.Sleep
		res = Run(tr, o, v)
	})
	return res
}

// measuredFleet returns the fleet for a trace: 8 engines, with caches in which about the working set
// of the trace fits.
func measuredFleet(tr *Trace) Options {
	o := Options{Engines: 8, Engine: DefaultEngine, KVTokens: 2_000_000}
	for _, s := range Shapes {
		if s.Name == tr.Name {
			o.KVTokens = s.KVTokens
		}
	}
	return o
}

// comparedPolicies are the rows of a trace and load.
func comparedPolicies(b *Bounds) []Variant {
	ownTime := newOptions("kv")
	ownTime.EvictionWeight, ownTime.OthersWeight = 0, 0
	return []Variant{
		{Name: "KV-aware", Options: newOptions("kv")},
		{Name: "KV-aware, own time only", Options: ownTime},
		{Name: "least loaded", Options: newOptions("least_loaded")},
		{Name: "round robin", Options: newOptions("round_robin")},
		{Name: "oracle", Fixed: b.Families},
	}
}

func TestPolicies(t *testing.T) {
	if !*compare {
		t.Skip("a comparison: make policies")
	}
	var traces []*Trace
	if *traceFile != "" {
		tr, err := ReadTrace(*traceFile)
		if err != nil {
			t.Fatal(err)
		}
		traces = append(traces, tr)
	} else {
		for _, s := range Shapes {
			traces = append(traces, s.Generate(6000, 1))
		}
	}
	var rows strings.Builder
	for _, tr := range traces {
		o := measuredFleet(tr)
		b := Bound(tr, o)
		closed := o
		closed.Concurrency = 16 * o.Engines
		capacity := simulate(t, tr, closed, Variant{Options: newOptions("round_robin")}).Requests
		fmt.Fprintf(&rows, "\n### %s\n\n%s requests of %s prompt tokens, %s KV tokens on each engine.\n100 %% load is %.1f requests a second.\nAt best %.1f %% of the prompt tokens are cached (one cache without limit), %.1f %% with one cache of the fleet's size.\n\n%s",
			tr.Name, humanize.Comma(int64(len(tr.Requests))), humanize.Comma(int64(tr.promptTokens()/len(tr.Requests))), humanize.Comma(int64(o.KVTokens)), capacity, 100*b.Infinite, 100*b.Pooled,
			"| load | policy | cached | first token mean, ms | p50 | p99 | output tokens/s | computed by the busiest / mean |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
		for _, load := range []int{60, 90, 200, 300} {
			o.Speed = capacity * float64(load) / 100 * tr.span().Seconds() / float64(len(tr.Requests))
			for _, v := range comparedPolicies(&b) {
				r := simulate(t, tr, o, v)
				fmt.Fprintf(&rows, "| %d %% | %s | %.1f %% | %s | %s | %s | %s | %.2f |\n", load, v.Name, 100*r.Hit, toMS(r.Mean), toMS(r.P50), toMS(r.P99), humanize.Comma(int64(r.Output)), r.Imbalance)
			}
		}
	}
	t.Log(rows.String())
	if *write == "" {
		return
	}
	shapes := ""
	for _, s := range Shapes {
		shapes += fmt.Sprintf("- **%s**: %s.\n", s.Name, s.Text)
	}
	if err := os.WriteFile(*write, []byte(fmt.Sprintf(pageText, shapes, rows.String())), 0o644); err != nil {
		t.Fatal(err)
	}
}

func toMS(d time.Duration) string { return humanize.Comma(int64(d.Milliseconds())) }

// pageText is the page; %s are the traces and the tables.
const pageText = `# Placement on modelled engines

This page compares how the policies place requests: how much of the prompts engines find cached, and the time to first token.
` + "`make policies` (`bench/placement`)" + ` writes it, in about a minute on a quiet one.

The scheduler and the index are the router's own.
Eight engines are models with finite caches, and the clock is simulated, so the same command always gives the same figures.
A step of an engine takes 8 ms, 50 µs more for each prompt token that it computes, of which it takes up to 4,096, and 40 µs for each running request.
The model has no processes, no HTTP and no failures; [policies.md](policies.md) has a smaller comparison with those.

` + "```" + `
make policies                   # the traces of this page
make policies TRACE=FILE        # a trace in the format of Mooncake's FAST'25 release
` + "```" + `

%s
- **KV-aware** is the default.
- **Own time only** is the same with ` + "`schedule.others_weight` and `schedule.eviction_weight`" + ` 0: each request minimises its own time ([scheduler.md](scheduler.md#what-others-pay)).
- The **oracle** knows the trace. It gives each prefix family one engine and balances their prompt tokens, but does not see the load of the moment.
- 100 %% load is what round robin does in a closed loop of 128 requests. The first fifth of a trace fills the caches and is not measured.

## Results
%s`
