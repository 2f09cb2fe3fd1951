package load

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/dustin/go-humanize"
)

// recorder collects results. Latencies are recorded in HDR histograms in microseconds,
// from 1 µs to 1 h with three digits.
type recorder struct {
	sources []Source
	window  window

	mu           sync.Mutex
	groups       grouping
	dropped      int64
	sessions     sessions
	ttft         *hdrhistogram.Histogram
	inter        *hdrhistogram.Histogram
	total        *hdrhistogram.Histogram
	sendDelay    *hdrhistogram.Histogram
	ok           int64
	errors       map[string]int64
	statusCounts map[int]int64 // by status
	chunks       int64         // of responses that ended in the window
	bytes        int64
	requestBytes int64 // bytes of requests with a response
	prompt       int64
	output       int64
	cached       int64
	// predicted is the sum of the router's predictions. Each is that of the rank that computes the
	// prompt, so the sum is comparable with cached where the engines report a count.
	predicted int64
	byWorker  map[string]int64 // by decode worker
}

// sessions counts those of agents.
type sessions struct {
	finished, unfinished, retries int64
	time                          *hdrhistogram.Histogram // of finished ones
}

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, int64(time.Hour/time.Microsecond), 3)
}

// newRecorder returns a recorder of the requests that are due in a window; named reports whether
// the sources have names that the user chose.
func newRecorder(sources []Source, w window, named bool) *recorder {
	return &recorder{
		sources: sources, window: w, groups: newGrouping(sources, named), sessions: sessions{time: newHistogram()},
		ttft: newHistogram(), inter: newHistogram(), total: newHistogram(), sendDelay: newHistogram(),
		errors: map[string]int64{}, statusCounts: map[int]int64{}, byWorker: map[string]int64{},
	}
}

func record(h *hdrhistogram.Histogram, d time.Duration) {
	// Only values above an hour are out of range; they count as an hour.
	_ = h.RecordValue(min(max(1, d.Microseconds()), int64(time.Hour/time.Microsecond)))
}

func (r *recorder) gap(d time.Duration) {
	r.mu.Lock()
	record(r.inter, d)
	r.mu.Unlock()
}

const maxErrorKinds = 20

// drop counts a request that was not sent.
func (r *recorder) drop(source int, due time.Time) {
	if !r.window.has(due) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped++
	for _, g := range r.groups.of[source] {
		g.dropped++
	}
}

// retry counts a refused request of an agent, which it sends again.
func (r *recorder) retry() {
	r.mu.Lock()
	r.sessions.retries++
	r.mu.Unlock()
}

// session counts a session that took d.
func (r *recorder) session(d time.Duration, finished bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !finished {
		r.sessions.unfinished++
		return
	}
	r.sessions.finished++
	record(r.sessions.time, d)
}

// result counts a request that was due at due.
func (r *recorder) result(res *Result, job *Job, due time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	groups := r.groups.of[job.source]
	if r.window.has(due.Add(res.Total)) {
		r.chunks += int64(res.Chunks)
		for _, g := range groups {
			g.ended(res)
		}
	}
	if !r.window.has(due) {
		return
	}
	for _, g := range groups {
		g.due(&r.sources[job.source], res)
	}
	r.statusCounts[res.Status]++
	r.bytes += int64(res.Bytes)
	record(r.sendDelay, res.SendDelay)
	if res.Err != nil {
		text := errorKind(res)
		if _, known := r.errors[text]; !known && len(r.errors) >= maxErrorKinds {
			text = "other errors"
		}
		r.errors[text]++
		return
	}
	r.ok++
	r.requestBytes += int64(len(job.Body))
	record(r.total, res.Total)
	if res.TTFT > 0 {
		record(r.ttft, res.TTFT)
	}
	if res.Prompt >= 0 {
		r.prompt += int64(res.Prompt)
	} else {
		r.prompt += int64(job.Tokens)
	}
	r.output += int64(res.Output)
	if res.Cached > 0 {
		r.cached += int64(res.Cached)
	}
	if res.PredictedCached > 0 {
		r.predicted += int64(res.PredictedCached)
	}
	if res.Worker != "" {
		r.byWorker[res.Worker]++
	}
}

// errorKind returns the text of a failure without the numbers in an error response, which differ
// from one refusal to the next.
func errorKind(res *Result) string {
	text := res.Err.Error()
	const prefix = len("load: status 429")
	if res.Status == 200 || !strings.HasPrefix(text, "load: status ") || len(text) < prefix {
		return text
	}
	return text[:prefix] + numbers.ReplaceAllString(text[prefix:], "N")
}

var numbers = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// Snapshot is the state of a run in progress.
type Snapshot struct {
	Elapsed  time.Duration
	OK       int64
	Failed   int64
	InFlight int64
	Dropped  int64
	TTFT50   time.Duration
	TTFT99   time.Duration
}

func (r *run) snapshot() Snapshot {
	r.rec.mu.Lock()
	defer r.rec.mu.Unlock()
	s := Snapshot{Elapsed: time.Since(r.began), OK: r.rec.ok, InFlight: r.inFlight.Load(), Dropped: r.rec.dropped}
	for _, n := range r.rec.errors {
		s.Failed += n
	}
	s.TTFT50 = time.Duration(r.rec.ttft.ValueAtQuantile(50)) * time.Microsecond
	s.TTFT99 = time.Duration(r.rec.ttft.ValueAtQuantile(99)) * time.Microsecond
	return s
}

// Quantiles of a latency, in milliseconds.
type Quantiles struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean_ms"`
	P50   float64 `json:"p50_ms"`
	P90   float64 `json:"p90_ms"`
	P99   float64 `json:"p99_ms"`
	P999  float64 `json:"p999_ms"`
	Max   float64 `json:"max_ms"`
}

func quantiles(h *hdrhistogram.Histogram) Quantiles {
	at := func(q float64) float64 { return float64(h.ValueAtQuantile(q)) / 1000 }
	if h.TotalCount() == 0 {
		return Quantiles{}
	}
	return Quantiles{Count: h.TotalCount(), Mean: h.Mean() / 1000, P50: at(50), P90: at(90), P99: at(99), P999: at(99.9), Max: float64(h.Max()) / 1000}
}

// Report is the result of a run. With a warm-up or a cool-down it is of the requests that were due
// between them, and its rates are of what ended between them.
type Report struct {
	Loop                  string           `json:"loop"` // closed or open
	Seconds               float64          `json:"seconds"`
	Requests              int64            `json:"requests"`
	OK                    int64            `json:"ok"`
	Failed                int64            `json:"failed"`
	Dropped               int64            `json:"dropped"`
	Errors                map[string]int64 `json:"errors,omitempty"`
	RequestsPerSec        float64          `json:"requests_per_second"`
	ChunksPerSec          float64          `json:"chunks_per_second"`
	OutputPerSec          float64          `json:"output_tokens_per_second"`
	PromptTokens          int64            `json:"prompt_tokens"`
	OutputTokens          int64            `json:"output_tokens"`
	CachedTokens          int64            `json:"cached_tokens"`           // as engines reported
	PredictedCachedTokens int64            `json:"predicted_cached_tokens"` // as the router predicted
	Bytes                 int64            `json:"bytes"`
	RequestBytes          int64            `json:"request_bytes"` // bodies of requests with a response
	TTFT                  Quantiles        `json:"ttft"`
	InterChunk            Quantiles        `json:"inter_chunk"`
	Total                 Quantiles        `json:"end_to_end"`
	SendDelay             Quantiles        `json:"send_delay"`                   // from the time at which a request was due until it was sent
	ByWorker              map[string]int64 `json:"requests_by_worker,omitempty"` // by X-Sluice-Worker

	WindowSeconds float64          `json:"window_seconds"` // --duration, or all of the run without a warm-up and a cool-down
	Overall       Group            `json:"overall"`
	BySource      map[string]Group `json:"by_source,omitempty"`
	ByClass       map[string]Group `json:"by_class,omitempty"`
	ByTenant      map[string]Group `json:"by_tenant,omitempty"` // by X-Sluice-Tenant or key
	Fairness      float64          `json:"fairness,omitempty"`  // Jain's index over the tokens computed for the tenants
	Sessions      *Sessions        `json:"sessions,omitempty"`  // of agents
}

// Sessions is the part of a report that is about the sessions of agents.
type Sessions struct {
	Finished   int64     `json:"finished"`
	Unfinished int64     `json:"unfinished"` // ended by a failed request or the end of the run
	Retries    int64     `json:"retries"`    // refused requests that were sent again
	Time       Quantiles `json:"time"`       // from the first request to the end of the last, pauses included
}

func (r *run) report() *Report {
	r.rec.mu.Lock()
	defer r.rec.mu.Unlock()
	rec := r.rec
	total := time.Since(r.began).Seconds()
	secs := total
	if !rec.window.until.IsZero() {
		secs = min(r.o.Duration.Seconds(), max(total-r.o.Warmup.Seconds(), 1e-3))
	}
	all := rec.groups.all
	rep := &Report{
		Loop: "closed", Seconds: total, WindowSeconds: secs, OK: rec.ok, Dropped: rec.dropped, Errors: rec.errors,
		RequestsPerSec: float64(all.served) / secs, ChunksPerSec: float64(rec.chunks) / secs, OutputPerSec: float64(all.servedOutput) / secs,
		PromptTokens: rec.prompt, OutputTokens: rec.output, CachedTokens: rec.cached, PredictedCachedTokens: rec.predicted, Bytes: rec.bytes, RequestBytes: rec.requestBytes,
		TTFT: quantiles(rec.ttft), InterChunk: quantiles(rec.inter), Total: quantiles(rec.total), SendDelay: quantiles(rec.sendDelay),
		ByWorker: rec.byWorker,
		Overall:  all.report(secs), BySource: reportGroups(rec.groups.bySource, secs), ByClass: reportGroups(rec.groups.byClass, secs),
		ByTenant: reportGroups(rec.groups.byTenant, secs), Fairness: fairness(rec.groups.byTenant),
	}
	if s := &rec.sessions; s.finished+s.unfinished > 0 {
		rep.Sessions = &Sessions{Finished: s.finished, Unfinished: s.unfinished, Retries: s.retries, Time: quantiles(s.time)}
	}
	if r.open {
		rep.Loop = "open"
	}
	for _, n := range rec.errors {
		rep.Failed += n
	}
	rep.Requests = rep.OK + rep.Failed
	return rep
}

// WriteJSON writes the report as one JSON object. It has send_delay and requests_by_worker under
// their deprecated names, too.
func (rep *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(struct {
		*Report
		SentLate Quantiles        `json:"sent_late"`
		Placed   map[string]int64 `json:"placed,omitempty"`
	}{rep, rep.SendDelay, rep.ByWorker})
}

// WriteTable writes the report as a table for people.
func (rep *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "\tcount\tmean\tp50\tp90\tp99\tp99.9\tmax\t\n")
	for _, row := range []struct {
		name string
		q    Quantiles
	}{{"first token", rep.TTFT}, {"between chunks", rep.InterChunk}, {"end to end", rep.Total}} {
		q := row.q
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", row.name, humanize.Comma(q.Count), ms(q.Mean), ms(q.P50), ms(q.P90), ms(q.P99), ms(q.P999), ms(q.Max))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%s requests in %.1f s (%s loop): %s ok, %s failed", humanize.Comma(rep.Requests), rep.Seconds, rep.Loop, humanize.Comma(rep.OK), humanize.Comma(rep.Failed))
	if rep.Dropped > 0 {
		fmt.Fprintf(w, ", %s dropped (too many in flight)", humanize.Comma(rep.Dropped))
	}
	fmt.Fprintf(w, "\n%s requests/s, %s chunks/s, %s output tokens/s, %s received\n",
		humanize.CommafWithDigits(rep.RequestsPerSec, 1), humanize.CommafWithDigits(rep.ChunksPerSec, 0), humanize.CommafWithDigits(rep.OutputPerSec, 0), humanize.IBytes(uint64(rep.Bytes)))
	if rep.PromptTokens > 0 {
		fmt.Fprintf(w, "%s prompt tokens; cached by the engines' count %.1f %%, predicted by the router %.1f %%\n", humanize.Comma(rep.PromptTokens),
			100*float64(rep.CachedTokens)/float64(rep.PromptTokens), 100*float64(rep.PredictedCachedTokens)/float64(rep.PromptTokens))
	}
	if len(rep.ByWorker) > 0 {
		var names []string
		for n := range rep.ByWorker {
			names = append(names, n)
		}
		slices.Sort(names)
		for i, n := range names {
			names[i] = fmt.Sprintf("%s %s", n, humanize.Comma(rep.ByWorker[n]))
		}
		fmt.Fprintf(w, "requests by worker: %s\n", strings.Join(names, ", "))
	}
	if err := rep.writeGroups(w); err != nil {
		return err
	}
	for text, n := range rep.Errors {
		fmt.Fprintf(w, "  %s × %s\n", humanize.Comma(n), text)
	}
	return nil
}

// writeGroups writes what became of the requests of each source, if there are several, and of
// the sessions of agents.
func (rep *Report) writeGroups(w io.Writer) error {
	if len(rep.BySource) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintf(t, "\nsource\tdue\tok\twithin targets/s\trefused\tunanswered\tfailed\tfirst token p50\tp99\tper token p50\tp99\tcomputed tokens\t\n")
		row := func(name string, g Group) {
			fmt.Fprintf(t, "%s\t%s\t%s\t%.2f\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", name, humanize.Comma(g.Requests), humanize.Comma(g.OK), g.Goodput,
				humanize.Comma(g.Refused), humanize.Comma(g.Unanswered), humanize.Comma(g.Failed), ms(g.TTFT.P50), ms(g.TTFT.P99), ms(g.TPOT.P50), ms(g.TPOT.P99), humanize.Comma(g.ServedComputed))
		}
		for _, name := range slices.Sorted(maps.Keys(rep.BySource)) {
			row(name, rep.BySource[name])
		}
		row("all", rep.Overall)
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if len(rep.ByTenant) > 1 {
		fmt.Fprintf(w, "fairness between tenants (Jain's index of computed tokens) %.3f\n", rep.Fairness)
	}
	if s := rep.Sessions; s != nil {
		fmt.Fprintf(w, "sessions: %s finished, %s not, %s refused requests repeated; time p50 %s, p99 %s, max %s\n", humanize.Comma(s.Finished), humanize.Comma(s.Unfinished),
			humanize.Comma(s.Retries), ms(s.Time.P50), ms(s.Time.P99), ms(s.Time.Max))
	}
	return nil
}

func ms(v float64) string {
	switch {
	case v == 0:
		return "–"
	case v < 1:
		return fmt.Sprintf("%.0f µs", v*1000)
	case v < 100:
		return fmt.Sprintf("%.2f ms", v)
	case v < 10_000:
		return fmt.Sprintf("%.0f ms", v)
	}
	return fmt.Sprintf("%.1f s", v/1000)
}
