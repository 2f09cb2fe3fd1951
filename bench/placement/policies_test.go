package placement

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	// The weights' defaults were chosen with seeds 101 to 103; the page reports others.
	seedList  = flag.String("seeds", "1,2,3,4,5", "seeds of the generated traces and of ties")
	loadList  = flag.String("loads", "60,90,200,300", "loads in percent")
	shapeList = flag.String("shapes", "", "generated traces, separated by commas; empty: all")
	onlyKV    = flag.Bool("onlykv", false, "leave out the rows that do not depend on the weights")
	others    = flag.Float64("others", -1, "schedule.others_weight; below 0: the default")
	eviction  = flag.Float64("eviction", -1, "schedule.eviction_weight; below 0: the default")
)

// newOptions are the scheduler's options with the defaults of package config.
func newOptions(policy string) schedule.Options {
	return schedule.Options{Seed: 1, OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1, HostWeight: 0.8, DiskWeight: 0.5, InFlightWeight: 0.9, EvictionWeight: 0.5, OthersWeight: 4, Policy: policy}
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

// comparedPolicies are the rows of a trace and load, the first two those that the summary compares.
func comparedPolicies(b *Bounds) []Variant {
	ownTime, kv := newOptions("kv"), newOptions("kv")
	ownTime.EvictionWeight, ownTime.OthersWeight = 0, 0
	if *others >= 0 {
		kv.OthersWeight = *others
	}
	if *eviction >= 0 {
		kv.EvictionWeight = *eviction
	}
	pool := kv
	pool.EvictionWeight = 0 // whatever leaves the cache leaves it for all
	v := []Variant{
		{Name: "KV-aware", Options: kv},
		{Name: "KV-aware, own time only", Options: ownTime, CountInFull: true},
		{Name: "one cache for all", Options: pool, Pooled: true},
	}
	if *onlyKV {
		return v
	}
	return append(v,
		Variant{Name: "oracle", Fixed: b.Families},
		Variant{Name: "least loaded", Options: newOptions("least_loaded")},
		Variant{Name: "round robin", Options: newOptions("round_robin")})
}

// spread is what several seeds measured.
type spread []float64

// median returns the middle, the lowest and the highest value.
func (s spread) median() (middle, least, most float64) {
	x := slices.Sorted(slices.Values(s))
	return x[len(x)/2], x[0], x[len(x)-1]
}

// format shows the median and the range.
func (s spread) format(verb string) string {
	m, low, high := s.median()
	text := func(v float64) string { return strings.TrimSuffix(humanize.FormatFloat(verb, v), ".") }
	if len(s) == 1 {
		return text(m)
	}
	return fmt.Sprintf("%s (%s–%s)", text(m), text(low), text(high))
}

// Formats of humanize.FormatFloat.
const (
	whole    = "#,###."
	tenths   = "#,###.#"
	hundreds = "#,###.##"
)

// measured is one trace and its results by load, policy and seed.
type measured struct {
	trace    *Trace
	fleet    Options
	capacity spread // requests per second
	bounds   []Bounds
	results  map[int][][]Result // by load, policy, seed
}

// runAll runs functions, two at a time as the machine has it, each in a test of its own.
func runAll(t *testing.T, jobs []func(*testing.T)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(jobs) {
					return
				}
				t.Run(fmt.Sprint(i), jobs[i])
			}
		})
	}
	wg.Wait()
}

func numbers(t *testing.T, list string) (n []int) {
	for text := range strings.SplitSeq(list, ",") {
		v, err := strconv.Atoi(text)
		if err != nil || v < 1 {
			t.Fatalf("%q is not a list of positive numbers", list)
		}
		n = append(n, v)
	}
	return n
}

// measure plays one shape with every seed, load and policy. A trace from a file is the same with
// every seed; only ties are drawn differently.
func measure(t *testing.T, generate func(seed int) *Trace, seeds, loads []int) *measured {
	n := len(seeds)
	m := &measured{trace: generate(seeds[0]), capacity: make(spread, n), bounds: make([]Bounds, n), results: map[int][][]Result{}}
	m.fleet = measuredFleet(m.trace)
	traces := make([]*Trace, n)
	var jobs []func(*testing.T)
	for i, seed := range seeds {
		jobs = append(jobs, func(t *testing.T) {
			tr := generate(seed)
			closed := m.fleet
			closed.Concurrency = 16 * closed.Engines
			opt := newOptions("round_robin")
			opt.Seed = uint64(seed)
			traces[i], m.bounds[i] = tr, Bound(tr, m.fleet)
			m.capacity[i] = simulate(t, tr, closed, Variant{Options: opt}).Requests
		})
	}
	runAll(t, jobs)
	jobs = nil
	for _, load := range loads {
		m.results[load] = make([][]Result, len(comparedPolicies(&m.bounds[0])))
		for p := range m.results[load] {
			m.results[load][p] = make([]Result, n)
			for i, seed := range seeds {
				jobs = append(jobs, func(t *testing.T) {
					o, v := m.fleet, comparedPolicies(&m.bounds[i])[p]
					o.Speed = m.capacity[i] * float64(load) / 100 * traces[i].span().Seconds() / float64(len(traces[i].Requests))
					v.Options.Seed = uint64(seed)
					m.results[load][p][i] = simulate(t, traces[i], o, v)
				})
			}
		}
	}
	runAll(t, jobs)
	return m
}

// over collects a value of each seed's results.
func over(r []Result, value func(*Result) float64) (s spread) {
	for i := range r {
		s = append(s, value(&r[i]))
	}
	return s
}

// table is the section of a trace.
func (m *measured) table(loads []int) string {
	var rows strings.Builder
	ideal, pooled := spread{}, spread{}
	for i := range m.bounds {
		ideal, pooled = append(ideal, 100*m.bounds[i].Infinite), append(pooled, 100*m.bounds[i].Pooled)
	}
	tr := m.trace
	fmt.Fprintf(&rows, "\n### %s\n\n%s requests of %s prompt tokens, %s KV tokens on each engine.\n100 %% load is %s requests a second.\nAt best %s %% of the prompt tokens are cached if requests run one after another on one cache without limit, %s %% on one of the fleet's size.\n\n%s",
		tr.Name, humanize.Comma(int64(len(tr.Requests))), humanize.Comma(int64(tr.promptTokens()/len(tr.Requests))), humanize.Comma(int64(m.fleet.KVTokens)), m.capacity.format(tenths), ideal.format(tenths), pooled.format(tenths),
		"| load | policy | cached, % | first token mean, ms | p50 | p99 | output tokens/s | computed by the busiest / mean |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	for _, load := range loads {
		for p, v := range comparedPolicies(&m.bounds[0]) {
			r := m.results[load][p]
			fmt.Fprintf(&rows, "| %d %% | %s | %s | %s | %s | %s | %s | %s |\n", load, v.Name,
				over(r, func(r *Result) float64 { return 100 * r.Hit }).format(tenths),
				over(r, func(r *Result) float64 { return ms(r.Mean) }).format(whole),
				over(r, func(r *Result) float64 { return ms(r.P50) }).format(whole),
				over(r, func(r *Result) float64 { return ms(r.P99) }).format(whole),
				over(r, func(r *Result) float64 { return r.Output }).format(whole),
				over(r, func(r *Result) float64 { return r.Imbalance }).format(hundreds))
		}
	}
	return rows.String()
}

// summary is a trace's lines of the first table: the KV-aware choice against that by each request's
// own time, seed by seed.
func (m *measured) summary(loads []int) string {
	var rows strings.Builder
	for _, load := range loads {
		var closed, possible, mean, p99, output spread
		for i := range m.bounds {
			kv, own, pool := &m.results[load][0][i], &m.results[load][1][i], &m.results[load][2][i]
			closed = append(closed, 100*(kv.Hit-own.Hit)/(m.bounds[i].Infinite-own.Hit))
			possible = append(possible, 100*(pool.Hit-own.Hit)/(m.bounds[i].Infinite-own.Hit))
			mean = append(mean, float64(kv.Mean)/float64(own.Mean))
			p99 = append(p99, float64(kv.P99)/float64(own.P99))
			output = append(output, kv.Output/own.Output)
		}
		fmt.Fprintf(&rows, "| %s | %d %% | %s | %s | %s | %s | %s |\n", m.trace.Name, load, closed.format(whole), possible.format(whole), mean.format(hundreds), p99.format(hundreds), output.format(hundreds))
	}
	return rows.String()
}

func TestPolicies(t *testing.T) {
	if !*compare {
		t.Skip("a comparison: make policies")
	}
	seeds, loads := numbers(t, *seedList), numbers(t, *loadList)
	var rows, summary strings.Builder
	add := func(generate func(seed int) *Trace) {
		m := measure(t, generate, seeds, loads)
		rows.WriteString(m.table(loads))
		summary.WriteString(m.summary(loads))
	}
	if *traceFile != "" {
		tr, err := ReadTrace(*traceFile)
		if err != nil {
			t.Fatal(err)
		}
		add(func(int) *Trace { return tr })
	} else {
		for _, s := range Shapes {
			if *shapeList == "" || slices.Contains(strings.Split(*shapeList, ","), s.Name) {
				add(func(seed int) *Trace { return s.Generate(6000, uint64(seed)) })
			}
		}
	}
	t.Log("\n" + summaryHead + summary.String() + rows.String())
	if *write == "" {
		return
	}
	shapes := ""
	for _, s := range Shapes {
		shapes += fmt.Sprintf("- **%s**: %s.\n", s.Name, s.Text)
	}
	if err := os.WriteFile(*write, []byte(fmt.Sprintf(pageText, shapes, summaryHead+summary.String(), rows.String())), 0o644); err != nil {
		t.Fatal(err)
	}
}

const summaryHead = "| trace | load | closed, % | one cache closes, % | first token mean, ratio | p99, ratio | output tokens/s, ratio |\n| --- | --- | --- | --- | --- | --- | --- |\n"

// pageText is the page; %s are the traces, the summary and the tables.
const pageText = `# Placement on modelled engines

This page compares how the policies place requests: how much of the prompts engines find cached, and the time to first token.
` + "`make policies` (`bench/placement`)" + ` writes it, in about ten minutes on two quiet cores.

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
- **Own time only** is the same with ` + "`schedule.others_weight` and `schedule.eviction_weight`" + ` 0: each request minimises its own time ([scheduler.md](scheduler.md#what-others-pay)), and a prompt counts in full until its first token ([scheduler.md](scheduler.md#queues)).
- **One cache for all** gives the eight engines one cache of their size together. It shows about how much a placement can find at these times. That is less than the ideal, because a prompt can arrive before the one that it continues has been computed: a load is reached by making the times of a trace shorter, so that the pauses between turns become shorter too.
- The **oracle** knows the trace. It gives each prefix family one engine and balances their prompt tokens, but does not see the load of the moment.
- 100 %% load is what round robin does in a closed loop of 128 requests. The first fifth of a trace fills the caches and is not measured.
- Figures are the median of five seeds and, in brackets, their range. The weights were chosen with other seeds.

## Summary

*Closed* is the share of the distance from own time only to the ideal hit share that the KV-aware choice closes, and *one cache closes* what is possible at these times.
The ratios are of the KV-aware choice to own time only, with the same seed.

%s
## Results
%s`
