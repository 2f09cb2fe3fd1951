// Package metrics tests what a scrape of a whole router shows.
package metrics

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

const (
	openMetrics = "application/openmetrics-text;version=1.0.0"
	protobuf    = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
	traceID     = "4bf92f3577b34da6a3ce929d0e0e4736"
)

// TestModelMetrics: a P/D request shows in every series of its model, and its trace id in the
// exemplars of OpenMetrics.
func TestModelMetrics(t *testing.T) {
	t.Parallel()
	p := harness.StartSim(t, harness.SimRole("prefill"))
	d := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Speed = "decode", 1 }) // each token in a read of its own
	r := harness.StartRouter(t, func(c *config.Config) { c.Metrics.NativeHistograms = true },
		harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	const streams, tokens = 3, 12 // tokens: harness.Chat
	for i := range streams {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d,"stream":true,"stream_options":{"include_usage":true}`, i)),
			"traceparent", "00-"+traceID+"-00f067aa0ba902b7-01")
		harness.WantStatus(t, a, 200)
	}
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"seed":9`)), 200)
	if a := harness.Post(t, r.URL+"/v1/chat/completions", strings.Replace(harness.Chat(``), `"model":"`, `"model":"made-up-`, 1)); a.Status != 404 {
		t.Errorf("an unknown model gets %d", a.Status)
	}
	var page string
	testwait.UntilWithin(t, 5*time.Second, "all requests are counted", func() bool {
		page = string(harness.Get(t, r.URL+"/metrics").Body)
		return strings.Contains(page, `,outcome="ok"} 4`)
	})
	_, model, _ := strings.Cut(page, `sluice_model_requests_total{model="`)
	model, _, _ = strings.Cut(model, `"`)
	label := `{model="` + model + `"`
	for series, want := range map[string]float64{
		`sluice_model_requests_total` + label + `,outcome="failed"}`:                  0,
		`sluice_model_queue_seconds_count` + label + `}`:                              4,
		`sluice_model_time_to_first_token_seconds_count` + label + `}`:                streams,
		`sluice_model_time_per_output_token_seconds_count` + label + `}`:              streams,
		`sluice_model_request_duration_seconds_count` + label + `}`:                   4,
		`sluice_model_leg_duration_seconds_count` + label + `,leg="prefill"}`:         4,
		`sluice_model_leg_duration_seconds_count` + label + `,leg="decode"}`:          4,
		`sluice_rank_leg_seconds_total{worker="d0",rank="0",leg="prefill"}`:           0,
		`sluice_rank_info{worker="p0",rank="0",role="prefill",model="` + model + `"}`: 1,
	} {
		if got := r.Metric(series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	// One event for each token, but those that come together with the first count as no interval.
	// Engines add events with the role, the usage and the end.
	if n := r.Metric(`sluice_model_inter_token_latency_seconds_count` + label + `}`); n < streams*tokens/2 || n > streams*(tokens+4) {
		t.Errorf("%v intervals between the tokens of %d streams of %d tokens", n, streams, tokens)
	}
	if in, out := r.Metric(`sluice_model_input_tokens_total`+label+`}`), r.Metric(`sluice_model_output_tokens_total`+label+`}`); in < 4*10 || out < 4*8 || out > 4*tokens {
		t.Errorf("%v input tokens, %v output tokens", in, out)
	}
	if strings.Contains(page, "made-up") {
		t.Error("a model that a client made up has series")
	}
	open := harness.Get(t, r.URL+"/metrics", "Accept", openMetrics)
	if got := open.Header.Get("Content-Type"); !strings.HasPrefix(got, "application/openmetrics-text") {
		t.Errorf("Content-Type %q", got)
	}
	for _, name := range []string{"sluice_model_time_to_first_token_seconds_bucket", "sluice_model_request_duration_seconds_bucket"} {
		found := false
		for line := range strings.Lines(string(open.Body)) {
			found = found || strings.HasPrefix(line, name) && strings.Contains(line, `# {trace_id="`+traceID+`"}`)
		}
		if !found {
			t.Errorf("%s has no exemplar with the request's trace", name)
		}
	}
	if got := harness.Get(t, r.URL+"/metrics", "Accept", protobuf).Header.Get("Content-Type"); !strings.HasPrefix(got, "application/vnd.google.protobuf") {
		t.Errorf("Content-Type %q", got)
	}
}

// TestMigratedStreamCounts: a stream that continues on another engine is one request of its model,
// with both legs and the tokens of both.
func TestMigratedStreamCounts(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 2, nil)
	m.Fail("breaks", sim.Fault{Kind: sim.Reset, After: 5})
	a := harness.Post(t, m.URL+"/v1/completions", `{"model":"sim","stream":true,"prompt":"go on","max_tokens":40,"ignore_eos":true,"stream_options":{"include_usage":true}}`, "X-Request-Id", "breaks")
	harness.WantStatus(t, a, 200)
	testwait.UntilWithin(t, 5*time.Second, "the migration is counted", func() bool { return m.Migrated("done") == 1 })
	testwait.UntilWithin(t, 5*time.Second, "the request is counted", func() bool {
		return m.Metric(`sluice_model_requests_total{model="sim",outcome="ok"}`) == 1
	})
	for series, want := range map[string]float64{
		`sluice_model_requests_total{model="sim",outcome="failed"}`:        0,
		`sluice_model_queue_seconds_count{model="sim"}`:                    1,
		`sluice_model_time_to_first_token_seconds_count{model="sim"}`:      1,
		`sluice_model_request_duration_seconds_count{model="sim"}`:         1,
		`sluice_model_leg_duration_seconds_count{model="sim",leg="whole"}`: 1, // the leg that did not fail
		`sluice_model_output_tokens_total{model="sim"}`:                    40,
	} {
		if got := m.Metric(series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
}
