package obs

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/encoding/protodelim"

	"sluice/router/apikey"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// scrapeAs returns a scrape with the Accept header and its Content-Type.
func scrapeAs(m *Metrics, accept string) (body []byte, contentType string) {
	var b bytes.Buffer
	m.WriteAs(&b, accept, func(t string) { contentType = t })
	return b.Bytes(), contentType
}

const (
	acceptProto       = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,text/plain;q=0.2"
	acceptOpenMetrics = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
)

func TestFormats(t *testing.T) {
	m := NewMetrics()
	exercise(m, rank("d1", 0))
	for accept, want := range map[string]string{
		"":                "text/plain; version=0.0.4; charset=utf-8",
		"*/*":             "text/plain; version=0.0.4; charset=utf-8",
		"text/html":       "text/plain; version=0.0.4; charset=utf-8",
		acceptOpenMetrics: "application/openmetrics-text; version=1.0.0; charset=utf-8",
		acceptProto:       "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited",
	} {
		if _, got := scrapeAs(m, accept); got != want {
			t.Errorf("Accept %q: Content-Type %q, want %q", accept, got, want)
		}
	}
	open, _ := scrapeAs(m, acceptOpenMetrics)
	for _, want := range []string{
		"# TYPE sluice_model_output_tokens counter\n", "\nsluice_model_output_tokens_total{model=\"llama\"} 11.0\n",
		`sluice_model_time_to_first_token_seconds_bucket{model="llama",le="0.1"} 1 # {trace_id="4bf92f00000000000000000000000036"} 0.07 `,
	} {
		if !strings.Contains(string(open), want) {
			t.Errorf("OpenMetrics lacks %s", want)
		}
	}
	if !bytes.HasSuffix(open, []byte("# EOF\n")) {
		t.Error("OpenMetrics does not end with # EOF")
	}
	text, _ := scrapeAs(m, "")
	if strings.Contains(string(text), "trace_id") {
		t.Error("the text format has exemplars, which it cannot")
	}
}

// protoFamilies decodes a scrape as protocol buffers.
func protoFamilies(t *testing.T, m *Metrics) map[string]*dto.MetricFamily {
	t.Helper()
	body, _ := scrapeAs(m, acceptProto)
	r, out := bytes.NewReader(body), map[string]*dto.MetricFamily{}
	for {
		f := new(dto.MetricFamily)
		if err := protodelim.UnmarshalFrom(r, f); err == io.EOF {
			return out
		} else if err != nil {
			t.Fatal(err)
		}
		out[f.GetName()] = f
	}
}

// TestNativeHistograms: with the option, the protobuf format has native buckets whose counts agree
// with the classic ones; the text format stays as it is.
func TestNativeHistograms(t *testing.T) {
	for _, native := range []bool{false, true} {
		m := NewMetrics()
		if native {
			m.UseNativeHistograms()
		}
		model := m.Model("llama")
		model.FirstToken(0, [16]byte{})
		for range 50 {
			model.FirstToken(40*time.Millisecond, testTrace)
		}
		model.FirstToken(2*time.Hour, [16]byte{})
		h := protoFamilies(t, m)["sluice_model_time_to_first_token_seconds"].Metric[0].Histogram
		if h.GetSampleCount() != 52 || h.Bucket[3].GetCumulativeCount() != 51 {
			t.Errorf("native %v: %v", native, h)
		}
		if !native {
			if h.Schema != nil || len(h.PositiveSpan) > 0 {
				t.Errorf("native buckets without the option: %v", h)
			}
			continue
		}
		count, sum := int64(0), int64(h.GetZeroCount())
		for _, d := range h.PositiveDelta {
			count += d
			sum += count
		}
		// 2^(-38/8) = 37.2 ms < 40 ms <= 2^(-37/8) = 40.5 ms
		if h.GetSchema() != 3 || sum != 52 || h.GetZeroCount() != 1 || len(h.PositiveSpan) != 2 || h.PositiveSpan[0].GetOffset() != -37 {
			t.Errorf("native: %v", h)
		}
		if e := h.Bucket[3].Exemplar; e == nil || e.Label[0].GetValue() != "4bf92f00000000000000000000000036" {
			t.Errorf("no exemplar: %v", h.Bucket[3])
		}
	}
}

func TestNativeIndex(t *testing.T) {
	bound := func(i int) float64 { return math.Exp2(float64(i+nativeFrom*nativePerPower+1) / nativePerPower) }
	random := rand.New(rand.NewSource(1))
	for range 100_000 {
		d := time.Duration(math.Exp(random.Float64()*25) * 1e3)
		i, s := nativeIndex(d), d.Seconds()
		switch {
		case i < 0:
			if s > math.Exp2(nativeFrom) {
				t.Fatalf("%v is in the zero bucket", d)
			}
		case i == nativeCount-1:
			if s <= bound(i-1) {
				t.Fatalf("%v is in the last bucket", d)
			}
		case s > bound(i)*(1+1e-12) || s <= bound(i-1)*(1-1e-12):
			t.Fatalf("%v is in the bucket from %v to %v s", d, bound(i-1), bound(i))
		}
	}
	if i := nativeIndex(time.Second); bound(i) != 1 {
		t.Errorf("1 s is in the bucket to %v", bound(i))
	}
}

// largeFleet gives m ranks, with 40 series each.
func largeFleet(m *Metrics, ranks int) {
	for i := range ranks {
		r := worker.New(worker.Spec{ID: fmt.Sprintf("worker-%04d", i), Ranks: []uint16{0}, Role: worker.Decode}).Ranks[0]
		m.RankAdded(r)
		m.LegEnded(schedule.DecodeLeg, r.ID, "ok", time.Second)
		m.LegEnded(schedule.DecodeLeg, r.ID, "5xx", time.Second)
		for _, k := range feedCounterNames[:12] {
			m.AddFeedCount(r.ID, k, 2)
		}
		r.Running.Store(1)
		r.Waiting.Store(0)
		r.QueuedTokens.Store(0)
		r.SetKVUsage(0.25)
		for w := range r.Price {
			r.Price[w].Store(50_000)
		}
	}
}

// TestCardinality: the number of series of a large fleet, and the bounds of models, keys and ranks.
func TestCardinality(t *testing.T) {
	m := NewMetrics()
	largeFleet(m, 1000)
	for i := range 200 {
		model := m.Model(fmt.Sprintf("model-%03d", i))
		model.Queued(time.Millisecond)
		model.FirstToken(time.Millisecond, [16]byte{})
		model.Intervals().Buckets[0].Add(1)
		model.Transferred(time.Millisecond)
		for l := range schedule.LegKind(legKinds) {
			model.LegEnded(l, time.Millisecond)
		}
		model.Ended(schedule.Outcome{Status: 200, PromptTokens: 1, OutputTokens: 2, TTFT: 1, Total: time.Millisecond}, 1, [16]byte{})
	}
	specs := make([]apikey.Spec, maxKeys+1)
	for i := range specs {
		specs[i].Name = fmt.Sprintf("key-%03d", i)
		specs[i].Hash = apikey.HashOf(specs[i].Name)
	}
	ring, err := apikey.NewKeyring(specs)
	if err != nil {
		t.Fatal(err)
	}
	m.ExposeKeys(ring)
	page := scrape(m)
	lines := strings.Count(page, "\n") - strings.Count(page, "\n#")
	t.Logf("%d series, %.1f MiB", lines, float64(len(page))/(1<<20))
	if lines > 60_000 {
		t.Errorf("%d series, want at most 60,000", lines)
	}
	for want, n := range map[string]int{
		`sluice_model_queue_seconds_count{`:                   maxModels + 1,
		`sluice_model_queue_seconds_count{model="other"} 100`: 1,
		`sluice_api_key_tokens_total{`:                        maxKeys + 1,
		`sluice_api_key_tokens_total{key="other"} 0`:          1,
		`sluice_rank_requests{`:                               1000,
		"sluice_metrics_hidden_ranks 0\n":                     1,
	} {
		if got := strings.Count(page, "\n"+want); got != n {
			t.Errorf("%d of %q, want %d", got, want, n)
		}
	}
	m = NewMetrics()
	largeFleet(m, maxRanks+5)
	page = scrape(m)
	if n := strings.Count(page, "\nsluice_rank_requests{"); n != maxRanks || !strings.Contains(page, "\nsluice_metrics_hidden_ranks 5\n") {
		t.Errorf("%d ranks have series, want %d and 5 hidden", n, maxRanks)
	}
}

func TestModelOutcomes(t *testing.T) {
	for _, c := range []struct {
		status int
		reason string
		want   int
	}{
		{200, "", modelOK}, {404, "unknown_model", modelRejected}, {499, "client_gone", modelClientGone},
		{200, "client_gone", modelClientGone}, {200, "client_stalled", modelClientGone}, {200, "drained", modelOK},
		{200, "engine_closed", modelFailed}, {200, "engine_error", modelFailed}, {502, "engine_5xx", modelFailed}, {503, "no_worker", modelFailed},
	} {
		if got := modelOutcome(c.status, c.reason); got != c.want {
			t.Errorf("status %d, reason %q: %s, want %s", c.status, c.reason, modelOutcomeNames[got], modelOutcomeNames[c.want])
		}
	}
}

// TestModelsDoNotAllocate: the observations of a request and its stream, without a trace.
func TestModelsDoNotAllocate(t *testing.T) {
	m := NewMetrics()
	m.UseNativeHistograms()
	m.Model("llama")
	out := &schedule.Outcome{Status: 200, PromptTokens: 10, OutputTokens: 20, TTFT: time.Millisecond, Total: time.Second}
	if n := testing.AllocsPerRun(200, func() {
		model := m.Model("llama")
		model.Queued(time.Millisecond)
		model.FirstToken(time.Millisecond, [16]byte{})
		model.LegEnded(schedule.DecodeLeg, time.Second)
		model.Transferred(time.Millisecond)
		model.Ended(*out, 10, [16]byte{})
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkScrape is one scrape of 1,000 ranks, in each format.
func BenchmarkScrape(b *testing.B) {
	m := NewMetrics()
	largeFleet(m, 1000)
	for name, accept := range map[string]string{"text": "", "openmetrics": acceptOpenMetrics, "protobuf": acceptProto} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m.WriteAs(io.Discard, accept, func(string) {})
			}
		})
	}
	b.Run("gather", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = m.Gather()
		}
	})
}

// BenchmarkRequest is all that a request counts.
func BenchmarkRequest(b *testing.B) {
	m := NewMetrics()
	r := rank("d1", 0)
	exercise(m, r)
	out := &schedule.Outcome{Status: 200, PromptTokens: 10, OutputTokens: 20, TTFT: time.Millisecond, Total: time.Second}
	b.ReportAllocs()
	for b.Loop() {
		m.Accepted()
		model := m.Model("llama")
		model.Queued(time.Millisecond)
		m.LegStarted(schedule.DecodeLeg, r.ID)
		m.FirstToken("/v1/completions", time.Millisecond)
		model.FirstToken(time.Millisecond, [16]byte{})
		m.LegEnded(schedule.DecodeLeg, r.ID, "ok", time.Millisecond)
		model.LegEnded(schedule.DecodeLeg, time.Millisecond)
		model.Ended(*out, 10, [16]byte{})
		m.ResponseEnded("/v1/completions", 200, time.Millisecond)
	}
}
