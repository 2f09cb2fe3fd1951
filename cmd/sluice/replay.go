package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/recording"
	"sluice/router/recording/replay"
)

const replayLong = `Computes what other weights or policies would have done with a recording of sluice record. It puts
the recorded events through the index and the recorded requests through the scheduler, with
simulated caches that each variant's own choices fill. The table shows for each variant the share
of prompt tokens that were cached, the load of the busiest rank relative to the mean, and an
estimate of the time to first token. Files of several recordings get a table for each recording.

Compare the rows of the model with each other; the lines below the table say how well the model
matches the recording. Without --set and --policy the variants are round_robin, least_loaded and
overlap_weight=0.`

const replayExamples = `
  sluice replay /var/tmp/rec/*.rec
  sluice replay --set overlap_weight=0.5 --set overlap_weight=2,queue_weight=2 FILE
  sluice replay --policy round_robin --policy random FILE`

func replayCommand() *cobra.Command {
	var list []replay.Variant
	var asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "replay [flags] FILE...", GroupID: groupTest, Short: "compute what other weights or policies would have done with a recording", Long: replayLong, Example: replayExamples,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("want the files of a recording, which `sluice record` makes")
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"rec"}, cobra.ShellCompDirectiveFilterFileExt
		},
	}, "0 printed, 1 a file cannot be used", func(cmd *cobra.Command, args []string) int {
		return runReplay(args, list, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	cmd.Flags().Var(&variants{list: &list}, "set", "a variant with other `WEIGHTS` of schedule, comma-separated NAME=VALUE; may be repeated")
	cmd.Flags().Var(&variants{list: &list, policy: true}, "policy", "a variant with another `POLICY`: round_robin, least_loaded, random, kv; may be repeated")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the results as JSON")
	completeFlag(cmd, "policy", "kv", "round_robin", "random", "least_loaded")
	return cmd
}

// variants is the flag value of --set and --policy. Both append to one list, which keeps the
// order of the command line.
type variants struct {
	list   *[]replay.Variant
	policy bool
}

func (v *variants) String() string { return "" }

func (v *variants) Type() string { return "variant" }

func (v *variants) Set(s string) error {
	d := config.Default().Schedule
	if v.policy {
		if known := []string{"kv", "round_robin", "random", "least_loaded"}; !slices.Contains(known, s) {
			return fmt.Errorf("want one of %s", strings.Join(known, ", "))
		}
		*v.list = append(*v.list, replay.Variant{Name: s, Policy: s})
		return nil
	}
	known := app.ScheduleWeights(&d)
	set := make(map[string]float64)
	for _, pair := range strings.Split(s, ",") {
		name, text, found := strings.Cut(pair, "=")
		x, err := strconv.ParseFloat(text, 64)
		if _, is := known[name]; !is || !found || err != nil || !(x >= 0 && x <= 1e9) { // the comparison is false for NaN
			return fmt.Errorf("want NAME=VALUE[,…] with a value of 0 or more and a name among %s", strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
		set[name] = x
	}
	*v.list = append(*v.list, replay.Variant{Name: s, Policy: "kv", Weights: set})
	return nil
}

// runReplay groups the files by recording and prints, for each recording, what the variants
// would have done.
func runReplay(files []string, list []replay.Variant, asJSON bool, stdout, stderr io.Writer) int {
	groups, err := recording.GroupByRecording(files)
	if err != nil {
		fmt.Fprintln(stderr, "sluice replay:", err)
		return 1
	}
	if len(list) == 0 {
		list = []replay.Variant{{Name: "round_robin", Policy: "round_robin"}, {Name: "least_loaded", Policy: "least_loaded"},
			{Name: "overlap_weight=0", Policy: "kv", Weights: map[string]float64{"overlap_weight": 0}}}
	}
	code, reports := 1, []replayReport{}
	for i, g := range groups {
		trace, err := replay.Load(g.Files, func(err error) {
			fmt.Fprintf(stderr, "sluice replay: %v; using the part that can be read\n", err)
		})
		if err != nil {
			fmt.Fprintln(stderr, "sluice replay:", err)
			return 1
		}
		if len(groups) > 1 && !asJSON {
			recordingHeading(stdout, i, &g)
		}
		if len(trace.Requests) == 0 {
			fmt.Fprintln(stderr, "sluice replay: no request was placed during this recording")
			continue
		}
		r := replayRecording(trace, list)
		if code = 0; asJSON {
			reports = append(reports, r.report(&g))
		} else {
			r.print(stdout)
		}
	}
	if asJSON && code == 0 {
		if err := encodeJSON(stdout, map[string]any{"recordings": reports}); err != nil {
			fmt.Fprintln(stderr, "sluice replay:", err)
			return 1
		}
	}
	return code
}

// recordingHeading prints the heading that identifies the recording of the table below it.
func recordingHeading(w io.Writer, i int, g *recording.Group) {
	if i > 0 {
		fmt.Fprintln(w)
	}
	files := g.Files[0]
	if more := len(g.Files) - 1; more > 0 {
		files += fmt.Sprintf(" and %d more", more)
	}
	if g.Began.IsZero() {
		fmt.Fprintf(w, "%s:\n", files)
		return
	}
	fmt.Fprintf(w, "Recording begun %s, %s:\n", g.Began.Format(time.DateTime), files)
}

// replayed is what the variants would have done with one recording.
type replayed struct {
	trace   *replay.Trace
	results []replay.Result
	rates   replay.Rates
	timed   bool // the rates are those of the recording
	took    time.Duration
}

// replayRecording runs the variants concurrently.
func replayRecording(trace *replay.Trace, list []replay.Variant) *replayed {
	all := []replay.Variant{{Name: "recorded choices", Recorded: true}, {Name: "same weights", Policy: trace.Policy, Weights: trace.Weights}}
	for _, v := range list {
		weights := maps.Clone(trace.Weights)
		if weights == nil {
			weights = make(map[string]float64)
		}
		maps.Copy(weights, v.Weights)
		v.Weights = weights
		all = append(all, v)
	}
	r := &replayed{trace: trace, results: make([]replay.Result, len(all))}
	r.rates, r.timed = trace.Calibrate()
	began := time.Now()
	var wg sync.WaitGroup
	for i, v := range all {
		wg.Go(func() { r.results[i] = trace.Run(v, r.rates) })
	}
	wg.Wait()
	r.took = time.Since(began)
	return r
}

// print prints the table and what it rests on.
func (r *replayed) print(w io.Writer) {
	fmt.Fprintf(w, "%v, policy %s\n\n", r.trace, r.trace.Policy)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tw, "\tcached\timbalance\tTTFT p50\tTTFT p99\t\n")
	if m, ok := r.trace.Measured(); ok || m.Requests > 0 {
		row(tw, "measured", &m, ok)
	}
	for i := range r.results {
		name := r.results[i].Variant.Name
		row(tw, "model, "+name, &r.results[i], r.timed)
	}
	tw.Flush()
	explainModel(w, r.trace, &r.results[0], r.rates, r.timed)
	fmt.Fprintf(w, "%s choices in %v.\n", humanize.Comma(int64(len(r.results)*len(r.trace.Requests))), r.took.Round(time.Millisecond))
}

// replayReport is the JSON of one recording. Times are in milliseconds.
type replayReport struct {
	Files      []string    `json:"files"`
	Began      *time.Time  `json:"began,omitempty"` // nil for files before version 3
	Policy     string      `json:"policy"`
	Requests   int         `json:"requests"`
	Ranks      int         `json:"ranks"`
	Seconds    float64     `json:"seconds"`
	Events     int         `json:"index_changes"`
	Measured   *replayRow  `json:"measured,omitempty"` // as the engines reported
	Model      []replayRow `json:"model"`
	Reported   int         `json:"requests_with_reported_cached_tokens"`
	WithinOne  int         `json:"requests_modelled_within_a_block"`
	MeanError  float64     `json:"mean_error_tokens"`
	Compared   int         `json:"choices_compared_with_index"`
	Agreed     int         `json:"choices_equal_to_index"`
	Dropped    uint64      `json:"entries_dropped"`
	SkippedFor int         `json:"requests_skipped"`
}

type replayRow struct {
	Name      string   `json:"name"`
	Cached    float64  `json:"cached"`
	Imbalance float64  `json:"imbalance"`
	P50       *float64 `json:"ttft_p50_ms"` // null: no stream was recorded
	P99       *float64 `json:"ttft_p99_ms"`
}

func (r *replayed) report(g *recording.Group) replayReport {
	t, f := r.trace, r.results[0].Fidelity
	out := replayReport{
		Files: g.Files, Policy: t.Policy, Requests: len(t.Requests), Ranks: len(t.Ranks), Seconds: t.Span.Seconds(), Events: t.Events,
		Reported: f.Requests, WithinOne: f.WithinOneBlock, MeanError: f.MeanError, Compared: t.Compared, Agreed: t.Agreed,
		Dropped: t.Dropped, SkippedFor: t.Skipped,
	}
	if !g.Began.IsZero() {
		out.Began = &g.Began
	}
	if m, ok := t.Measured(); ok || m.Requests > 0 {
		out.Measured = new(jsonRow("measured", &m, ok))
	}
	for i := range r.results {
		out.Model = append(out.Model, jsonRow(r.results[i].Variant.Name, &r.results[i], r.timed))
	}
	return out
}

func jsonRow(name string, r *replay.Result, timed bool) replayRow {
	row := replayRow{Name: name, Cached: r.HitRate, Imbalance: r.Imbalance}
	if timed {
		row.P50, row.P99 = new(float64(r.P50)/1e6), new(float64(r.P99)/1e6)
	}
	return row
}

func row(w io.Writer, name string, r *replay.Result, timed bool) {
	p50, p99 := "-", "-"
	if timed {
		p50, p99 = millis(r.P50), millis(r.P99)
	}
	fmt.Fprintf(w, "%s\t%.1f %%\t%.2f\t%s\t%s\t\n", name, 100*r.HitRate, r.Imbalance, p50, p99)
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

// explainModel prints how well the replay's model matches the recording, and what it assumes.
func explainModel(w io.Writer, t *replay.Trace, recorded *replay.Result, rates replay.Rates, timed bool) {
	fmt.Fprintln(w)
	if f := recorded.Fidelity; f.Requests > 0 {
		fmt.Fprintf(w, "With the recorded choices the model finds %s cached tokens, and the engines reported %s: within a block for %.1f %% of %s requests, with a mean error of %.0f tokens.\n",
			humanize.Comma(int64(f.Modelled)), humanize.Comma(int64(f.Reported)), 100*float64(f.WithinOneBlock)/float64(f.Requests), humanize.Comma(int64(f.Requests)), f.MeanError)
	} else {
		fmt.Fprintln(w, "No engine reported cached tokens, so the accuracy of the model's caches is unknown (vLLM: --enable-prompt-tokens-details).")
	}
	if timed {
		fmt.Fprintf(w, "A prompt token takes %.1f µs and a first token another %.1f ms; these rates make the recorded choices yield the recorded median. p99 is an estimate of the model.\n",
			float64(rates.PerToken)/float64(time.Microsecond), float64(rates.Base)/float64(time.Millisecond))
	} else {
		fmt.Fprintln(w, "No stream was recorded, so there are no times to first token to calibrate the model with.")
	}
	if t.Compared > 0 {
		fmt.Fprintf(w, "The index, with the recorded events, gives the recorded overlap in %.1f %% of %s choices", 100*float64(t.Agreed)/float64(t.Compared), humanize.Comma(int64(t.Compared)))
		if t.IndexTime > 0 {
			fmt.Fprintf(w, " (%s events a second)", humanize.Comma(int64(float64(t.Events)/t.IndexTime.Seconds())))
		}
		fmt.Fprintln(w, ". It is less than 100 % if ranks had blocks that were not recorded, feeds were catching up, or the choice counted blocks whose events had not arrived.")
	}
	for i := range t.Ranks {
		if t.Ranks[i].CapacityEstimated {
			fmt.Fprintf(w, "The capacity of %v is unknown; %s blocks are assumed, the largest number that it held.\n", t.Ranks[i].ID, humanize.Comma(int64(t.Ranks[i].Capacity)))
		}
	}
	if t.Dropped > 0 {
		fmt.Fprintf(w, "%s entries were dropped while recording.\n", humanize.Comma(int64(t.Dropped)))
	}
	if t.Skipped > 0 {
		fmt.Fprintf(w, "%s requests did not fit into memory and are left out.\n", humanize.Comma(int64(t.Skipped)))
	}
}
