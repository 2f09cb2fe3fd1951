package admin

import (
	"context"
	"math"
	"net/http"
	"sync"
	"time"

	"sluice/router/obs"
)

const (
	sampleInterval = 500 * time.Millisecond
	maxSamples     = 600                            // five minutes of samples
	window         = 10 * time.Second               // window of rates, quantiles and hit rates
	windowLen      = int(window/sampleInterval) + 1 // number of totals kept to compute differences
)

// Sample has the router's figures at one moment. Rates and quantiles cover the last Stats.WindowS
// seconds. A figure without an observation in the window is null.
type Sample struct {
	At          int64    `json:"t"` // milliseconds since 1970
	RequestRate float64  `json:"requests_per_s"`
	TokenRate   float64  `json:"output_tokens_per_s"`
	EventRate   float64  `json:"stream_events_per_s"`
	RefusedRate float64  `json:"refused_per_s"`
	Predicted   *float64 `json:"hit_predicted"` // share of prompt tokens predicted to be cached
	Actual      *float64 `json:"hit_actual"`    // the same share, as engines report it
	TTFTP50     *float64 `json:"ttft_p50_ms"`
	TTFTP99     *float64 `json:"ttft_p99_ms"`
	InPrefill   int64    `json:"in_prefill"` // legs in flight
	InDecode    int64    `json:"in_decode"`
	InWhole     int64    `json:"in_whole"`
	Connections int64    `json:"connections"`
}

// sampler reads a Metrics twice a second and keeps the samples that the console displays.
type sampler struct {
	metrics *obs.Metrics

	mu      sync.Mutex
	samples []Sample // ring
	next    int
	totals  []timedTotals // ring buffer of the last window
	at      int
	last    obs.Totals
}

type timedTotals struct {
	at time.Time
	t  obs.Totals
}

func newSampler(m *obs.Metrics) *sampler {
	s := &sampler{metrics: m}
	s.sample(time.Now())
	return s
}

func (s *sampler) run(ctx context.Context) {
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.sample(now)
		}
	}
}

func (s *sampler) sample(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var cur obs.Totals
	s.metrics.Totals(&cur)
	old := timedTotals{at: now, t: cur}
	if len(s.totals) > 0 {
		old = s.totals[s.at%len(s.totals)] // the oldest total
	}
	if len(s.totals) < windowLen {
		if len(s.totals) > 0 {
			old = s.totals[0]
		}
		s.totals = append(s.totals, timedTotals{now, cur})
	} else {
		s.totals[s.at] = timedTotals{now, cur}
		s.at = (s.at + 1) % windowLen
	}
	s.last = cur
	x := between(&old.t, &cur, now.Sub(old.at))
	x.At = now.UnixMilli()
	if len(s.samples) < maxSamples {
		s.samples = append(s.samples, x)
	} else {
		s.samples[s.next] = x
		s.next = (s.next + 1) % maxSamples
	}
}

// between returns the Sample of the activity between totals a and b.
func between(a, b *obs.Totals, took time.Duration) Sample {
	sec := max(took.Seconds(), sampleInterval.Seconds())
	x := Sample{
		RequestRate: rate(a.Ended, b.Ended, sec), TokenRate: rate(a.OutputTokens, b.OutputTokens, sec),
		EventRate: rate(a.Events, b.Events, sec), RefusedRate: rate(a.Refused, b.Refused, sec),
		InWhole: b.LegsInFlight[0], InPrefill: b.LegsInFlight[1], InDecode: b.LegsInFlight[2], Connections: b.Connections,
		Predicted: share(b.PredictedTokens-a.PredictedTokens, b.PromptTokens-a.PromptTokens),
		Actual:    share(b.ReportedTokens-a.ReportedTokens, b.ComparedPrompt-a.ComparedPrompt),
	}
	if d, n := b.TTFT.Since(&a.TTFT); n > 0 {
		p50, p99 := millis(d.Quantile(0.5)), millis(d.Quantile(0.99))
		x.TTFTP50, x.TTFTP99 = &p50, &p99
	}
	return x
}

func rate(a, b uint64, sec float64) float64 { return round(float64(b-a) / sec) }

func share(part, of uint64) *float64 {
	if of == 0 {
		return nil
	}
	v := math.Round(float64(part)/float64(of)*1e4) / 1e4
	return &v
}

func millis(d time.Duration) float64 { return round(float64(d) / float64(time.Millisecond)) }

func round(v float64) float64 { return math.Round(v*1000) / 1000 }

// since returns the stored samples later than t (Unix milliseconds), oldest first, and the newest
// sample, which always exists.
func (s *sampler) since(t int64) (history []Sample, now Sample, totals obs.Totals) {
	s.mu.Lock()
	defer s.mu.Unlock()
	history = []Sample{}
	n := len(s.samples)
	for i := range n {
		x := s.samples[(s.next+i)%n]
		if x.At > t {
			history = append(history, x)
		}
		now = x
	}
	return history, now, s.last
}

// Stats is the response of /admin/v1/stats and /admin/v1/compare.
type Stats struct {
	Name    string   `json:"name"` // name of the policy
	Version string   `json:"version,omitempty"`
	UptimeS float64  `json:"uptime_s"`
	WindowS float64  `json:"window_s"`
	Now     Sample   `json:"now"`
	History []Sample `json:"history"`
	// Total and TTFT cover the time since the router started.
	Total SinceStart `json:"total"`
	TTFT  Quantiles  `json:"ttft_ms"`
	// HitRate is the actual hit rate since the start, or the predicted one if no engine reports
	// cached tokens; null before the first request.
	HitRate *float64 `json:"hit_rate"`
}

// SinceStart has counts since the router started.
type SinceStart struct {
	Responses    uint64            `json:"responses"`
	Refused      uint64            `json:"refused"`
	OutputTokens uint64            `json:"output_tokens"`
	Retries      uint64            `json:"retries"`
	Fallbacks    map[string]uint64 `json:"fallbacks"`
	HitPredicted *float64          `json:"hit_predicted"`
	HitActual    *float64          `json:"hit_actual"`
}

// Quantiles are in milliseconds; null before the first observation.
type Quantiles struct {
	P50 *float64 `json:"p50"`
	P90 *float64 `json:"p90"`
	P99 *float64 `json:"p99"`
}

func (s *sampler) stats(sinceMS int64) Stats {
	history, now, t := s.since(sinceMS)
	out := Stats{WindowS: window.Seconds(), Now: now, History: history, Total: SinceStart{
		Responses: t.Ended, Refused: t.Refused, OutputTokens: t.OutputTokens, Retries: t.Retries, Fallbacks: s.metrics.Fallbacks(),
		HitPredicted: share(t.PredictedTokens, t.PromptTokens), HitActual: share(t.ReportedTokens, t.ComparedPrompt)}}
	if out.HitRate = out.Total.HitActual; out.HitRate == nil {
		out.HitRate = out.Total.HitPredicted
	}
	if t.TTFT.Quantile(0.5) > 0 {
		p50, p90, p99 := millis(t.TTFT.Quantile(0.5)), millis(t.TTFT.Quantile(0.9)), millis(t.TTFT.Quantile(0.99))
		out.TTFT = Quantiles{&p50, &p90, &p99}
	}
	return out
}

func (s *Server) stats(w http.ResponseWriter, r *http.Request) {
	s.answerStats(w, r, s.ownSampler, s.opt.Scheduler.Policy())
}

func (s *Server) comparedStats(w http.ResponseWriter, r *http.Request) {
	if s.comparedSampler == nil {
		fail(w, http.StatusNotFound, "no_comparison", "this router compares itself with no other policy; `sluice demo` does")
		return
	}
	s.answerStats(w, r, s.comparedSampler, s.opt.Compared.Name)
}

func (s *Server) answerStats(w http.ResponseWriter, r *http.Request, from *sampler, name string) {
	since, err := parseMillis(r.URL.Query(), "since")
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_parameter", err.Error())
		return
	}
	answer(w, http.StatusOK, s.statsOf(from, name, since))
}

func (s *Server) statsOf(from *sampler, name string, since int64) Stats {
	st := from.stats(since)
	st.Name, st.Version, st.UptimeS = name, s.opt.Version, round(time.Since(s.started).Seconds())
	return st
}
