package placement

import (
	"flag"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/schedule"
)

var (
	compare   = flag.Bool("policies", false, "compare the policies")
	traceFile = flag.String("trace", "", "a trace in Mooncake's format; empty: the generated ones")
)

// newOptions are the scheduler's options with the defaults of package config.
func newOptions(policy string) schedule.Options {
	return schedule.Options{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1, HostWeight: 0.8, DiskWeight: 0.5, InFlightWeight: 0.9, Policy: policy}
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
	for _, tr := range traces {
		o := measuredFleet(tr)
		b := Bound(tr, o)
		closed := o
		closed.Concurrency = 16 * o.Engines
		capacity := simulate(t, tr, closed, Variant{Options: newOptions("round_robin")}).Requests
		t.Logf("%s: %d requests, %d prompt tokens each, round robin serves %.1f a second; cached at best %.1f %% with infinite caches, %.1f %% with one cache of the fleet's size",
			tr.Name, len(tr.Requests), tr.promptTokens()/len(tr.Requests), capacity, 100*b.Infinite, 100*b.Pooled)
		for _, load := range []int{60, 90} {
			o.Speed = capacity * float64(load) / 100 * tr.span().Seconds() / float64(len(tr.Requests))
			for _, v := range []Variant{
				{Name: "KV-aware", Options: newOptions("kv")},
				{Name: "least loaded", Options: newOptions("least_loaded")},
				{Name: "round robin", Options: newOptions("round_robin")},
				{Name: "oracle", Fixed: b.Families},
			} {
				r := simulate(t, tr, o, v)
				t.Logf("%3d %% %-13s cached %5.1f %%  first token mean %6.0f p50 %6.0f p99 %7.0f ms  output %6.0f/s", load, v.Name, 100*r.Hit, toMS(r.Mean), toMS(r.P50), toMS(r.P99), r.Output)
			}
		}
	}
}

func toMS(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
