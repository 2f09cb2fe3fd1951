package obs

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/router/admission"
	"sluice/router/apikey"
	"sluice/router/kvevents"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

var rewrite = flag.Bool("rewrite", false, "write docs/metrics.md")

var (
	_ kvevents.CounterSink = (*Metrics)(nil)
)

var testTrace = [16]byte{0x4b, 0xf9, 0x2f, 15: 0x36}

func rank(id string, n uint16) *worker.Rank {
	w := worker.New(worker.Spec{ID: id, Ranks: []uint16{n}, Role: worker.Decode})
	return w.Ranks[0]
}

func scrape(m *Metrics) string {
	var b bytes.Buffer
	m.WritePrometheus(&b)
	return b.String()
}

// exercise creates every series.
func exercise(m *Metrics, r *worker.Rank) {
	m.RankAdded(r)
	m.ExposeWorkers(func() []*worker.Worker { return []*worker.Worker{r.Worker} })
	m.ExposeIndex(kvindex.New(kvindex.Options{}), kvindex.NewApprox(kvindex.ApproxOptions{}))
	m.ExposeTokenizer(tokenize.New(tokenize.Options{}))
	m.GaugeFunc(func() float64 { return 1 }, "sluice_build_info", "version", "1.0")
	m.Accepted()
	m.Refused("/v1/completions", front.BadJSON)
	m.Refused("/made/up/by/a/client", front.UnknownRoute)
	m.ResponseEnded("/v1/completions", 200, 20*time.Millisecond)
	m.Panicked("id", nil, nil)
	m.ResponseIncomplete("/v1/completions", relay.ClientStalled)
	m.Connections(3)
	for l := range schedule.LegKind(3) {
		m.LegStarted(l, r.ID)
		m.LegEnded(l, r.ID, "ok", time.Millisecond)
		m.Retried(l)
	}
	m.LegStarted(schedule.DecodeLeg, r.ID)
	m.FallbackUsed("incomplete_handle")
	m.Migrated("done")
	m.Planned("local", "few_uncached")
	m.PromptSent("ids")
	m.Enqueued("interactive", "team-a")
	m.Dequeued("interactive", "team-a", admission.Dispatched, 40*time.Millisecond, 30*time.Millisecond)
	m.AdmissionRefused("batch", "", front.TargetUnmet)
	m.StreamSuspended("batch", "team-b")
	m.StreamResumed("batch", "resumed", 300*time.Millisecond)
	m.FirstToken("/v1/completions", 7*time.Millisecond)
	m.Streamed("/v1/completions", &relay.Result{Cause: relay.Completed, Events: 5, Bytes: 100, SawErrorEvent: true, Unscanned: 1, Usage: relay.Usage{Completion: 9}})
	m.Cached(r.ID, 100, 64, 80)
	m.Cached(r.ID, 100, 0, -1)
	for _, k := range feedCounterNames {
		m.AddFeedCount(r.ID, k, 2)
	}
	r.Running.Store(1)
	r.Waiting.Store(0)
	r.QueuedTokens.Store(0)
	r.SetKVUsage(0.25)
	for w := range r.Price {
		r.Price[w].Store(50_000)
	}
	model := m.Model("llama")
	model.Queued(2 * time.Millisecond)
	model.FirstToken(70*time.Millisecond, testTrace)
	model.Intervals().Buckets[3].Add(5)
	model.Transferred(4 * time.Millisecond)
	for l := range schedule.LegKind(legKinds) {
		model.LegEnded(l, 30*time.Millisecond)
	}
	model.Ended(schedule.Outcome{Status: 200, PromptTokens: 100, CachedTokens: 64, OutputTokens: 11, TTFT: 70 * time.Millisecond, Total: 270 * time.Millisecond}, 100, testTrace)
	r.Feed.Store(uint32(worker.FeedLive))
}

func TestExposition(t *testing.T) {
	m := NewMetrics()
	r := rank("d1", 3)
	exercise(m, r)
	got := scrape(m)
	for _, want := range []string{
		"sluice_requests_accepted_total 1\n",
		`sluice_requests_refused_total{endpoint="/v1/completions",reason="bad_json"} 1`,
		`sluice_requests_refused_total{endpoint="other",reason="unknown_route"} 1`,
		`sluice_responses_total{endpoint="/v1/completions",code="200"} 1`,
		`sluice_request_duration_seconds_bucket{endpoint="/v1/completions",le="0.01"} 0`,
		`sluice_request_duration_seconds_bucket{endpoint="/v1/completions",le="0.025"} 1`,
		`sluice_request_duration_seconds_bucket{endpoint="/v1/completions",le="+Inf"} 1`,
		`sluice_request_duration_seconds_count{endpoint="/v1/completions"} 1`,
		`sluice_time_to_first_token_seconds_sum{endpoint="/v1/completions"} 0.007`,
		`sluice_legs_total{leg="prefill",outcome="ok"} 1`,
		`sluice_admission_enqueued_total{class="interactive"} 1`, `sluice_admission_ended_total{class="interactive",outcome="dispatched"} 1`,
		`sluice_admission_wait_seconds_sum{class="interactive"} 0.04`, `sluice_admission_forecast_error_seconds_sum{class="interactive"} 0.01`,
		`sluice_admission_refused_total{class="batch",reason="target_unmet"} 1`,
		`sluice_admission_preemptions_total{class="batch"} 1`, `sluice_admission_suspensions_ended_total{class="batch",outcome="resumed"} 1`,
		`sluice_admission_suspension_seconds_sum{class="batch"} 0.3`, `sluice_admission_tenant_requests_total{tenant="team-b",outcome="preempted"} 1`,
		`sluice_admission_tenant_requests_total{tenant="none",outcome="refused"} 1`, `sluice_admission_tenant_requests_total{tenant="team-a",outcome="dispatched"} 1`,
		`sluice_legs_in_flight{leg="decode"} 1`,
		`sluice_rank_legs_total{worker="d1",rank="3",leg="decode",outcome="ok"} 1`,
		`sluice_worker_state{worker="d1",role="decode",state="joining"} 1`,
		`sluice_rank_kv_usage_ratio{worker="d1",rank="3"} 0.25`,
		`sluice_rank_feed_live{worker="d1",rank="3"} 1`,
		`sluice_kv_feed_total{worker="d1",rank="3",kind="gaps"} 2`,
		`sluice_cache_prompt_tokens_total 200`, `sluice_cache_predicted_tokens_total 64`,
		`sluice_cache_compared_prompt_tokens_total 100`, `sluice_cache_reported_tokens_total 80`, `sluice_cache_prediction_error_tokens_total 16`,
		"# TYPE sluice_legs_total counter\n", "# TYPE sluice_leg_duration_seconds histogram\n", "process_resident_memory_bytes", "go_goroutines",
		"\nprocess_open_fds ", "\nprocess_max_fds ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if n := strings.Count(got, "# TYPE sluice_rank_requests "); n != 1 {
		t.Errorf("%d TYPE lines of one family", n)
	}
}

// TestTenantLabels checks that no tenant is counted as the others, or as requests without a tenant.
func TestTenantLabels(t *testing.T) {
	m := NewMetrics()
	for _, tenant := range []string{"", "none", "other", `"none"`} {
		m.AdmissionRefused("batch", tenant, front.TargetUnmet)
	}
	for i := range maxTenants * 6 {
		m.AdmissionRefused("batch", fmt.Sprint("t", i), front.TargetUnmet)
	}
	got := scrape(m)
	for _, label := range []string{"none", `\"none\"`, `\"other\"`, `\"\"none\"\"`} {
		if want := `sluice_admission_tenant_requests_total{tenant="` + label + `",outcome="refused"} 1` + "\n"; !strings.Contains(got, want) {
			t.Errorf("no series %q", want)
		}
	}
	if want := `sluice_admission_tenant_requests_total{tenant="other",outcome="refused"} `; !strings.Contains(got, want) {
		t.Errorf("no series %q", want)
	}
}

// TestWaitingTenants: what waits is reported by tenant within the bound of series, those beyond it together, and as
// 0 once a tenant's requests wait no more.
func TestWaitingTenants(t *testing.T) {
	m := NewMetrics()
	waits := map[string]admission.TenantWait{}
	for i := range maxTenants + 50 {
		waits[fmt.Sprint("t", i)] = admission.TenantWait{Requests: 2, Oldest: time.Duration(i+1) * time.Second}
	}
	m.addCollector(func(p *page) { m.admission.collectTenants(p, waits) })
	sums := func() (series int, requests, oldest float64) {
		for line := range strings.Lines(scrape(m)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
			v, err := strconv.ParseFloat(value, 64)
			switch {
			case err != nil:
			case strings.HasPrefix(name, "sluice_admission_tenant_waiting_requests{"):
				series, requests = series+1, requests+v
			case strings.HasPrefix(name, "sluice_admission_tenant_oldest_wait_seconds{"):
				oldest = max(oldest, v)
			}
		}
		return series, requests, oldest
	}
	if series, requests, oldest := sums(); series != maxTenants+1 || requests != 2*(maxTenants+50) || oldest != maxTenants+50 {
		t.Errorf("%d series, %v requests, the oldest has waited %v s; want %d, %d and %d", series, requests, oldest, maxTenants+1, 2*(maxTenants+50), maxTenants+50)
	}
	clear(waits)
	if series, requests, oldest := sums(); series != maxTenants+1 || requests != 0 || oldest != 0 {
		t.Errorf("%d series, %v requests, the oldest has waited %v s after all have started; want %d, 0 and 0", series, requests, oldest, maxTenants+1)
	}
}

// TestEveryNameIsDocumented checks that every exposed series, with its labels, is in the Catalog
// and so in the docs.
func TestEveryNameIsDocumented(t *testing.T) {
	m := NewMetrics()
	exercise(m, rank("d1", 0))
	m.ExposePairs(func() []TransferPair {
		return []TransferPair{{"p0/0", "d1/0", 3, 1e9, 1e-6}, {From: "p0/0", To: "d1/1", Transfers: 1}}
	})
	ring, err := apikey.NewKeyring([]apikey.Spec{{Name: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	m.ExposeKeys(ring)
	seen := map[string]bool{}
	all, err := m.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_") {
			continue
		}
		entry := families[f.GetName()]
		if entry == nil {
			t.Errorf("not in the catalog: %s", f.GetName())
			continue
		}
		seen[entry.Name] = true
		for _, s := range f.Metric {
			var labels []string
			for _, l := range s.Label {
				labels = append(labels, l.GetName())
			}
			if got := strings.Join(labels, ", "); got != entry.Labels {
				t.Errorf("%s has labels %q, the catalog says %q", entry.Name, got, entry.Labels)
			}
		}
	}
	// Series of other packages, added through GaugeFunc and ExposePairs.
	elsewhere := map[string]bool{"sluice_engine_api_connections": true, "sluice_engine_api_streams": true, "sluice_engine_api_stalled_total": true, "sluice_engine_api_request_bytes": true, "sluice_engine_api_requests_total": true, "sluice_engine_api_refused_total": true, "sluice_engine_api_certificate_expiry_timestamp_seconds": true,
		"sluice_access_log_lines_total": true, "sluice_traces_total": true,
		"sluice_log_lines_dropped_total": true, "sluice_fd_limit_events_total": true, "sluice_pool_waiters": true, "sluice_admission_waiting_requests": true, "sluice_admission_waiting_tokens": true, "sluice_admission_oldest_wait_seconds": true, "sluice_admission_suspended_streams": true, "sluice_admission_tenant_waiting_requests": true, "sluice_admission_tenant_oldest_wait_seconds": true, "sluice_sessions": true, "sluice_sessions_active": true, "sluice_sessions_active_tokens": true, "sluice_sessions_limited_models": true, "sluice_sessions_limit_tokens": true, "sluice_session_turns_waiting": true, "sluice_session_waits_total": true, "sluice_session_requests_total": true, "sluice_sessions_ended_total": true, "sluice_relay_threads": true, "sluice_relay_loop_streams": true, "sluice_certificate_expiry_timestamp_seconds": true, "sluice_retries_denied_total": true, "sluice_engine_restarts_total": true, "sluice_engine_frozen_total": true, "sluice_engine_frozen_calls_total": true, "sluice_engine_frozen_ranks": true, "sluice_kv_handles_leased": true, "sluice_kv_notification_breakers_open": true, "sluice_kv_uncredited_blocks_total": true, "sluice_models_without_handover": true, "sluice_kv_notifications_total": true, "sluice_kv_notifications_unmatched": true, "sluice_zmq_connections": true, "sluice_zmq_refused_total": true, "sluice_load_messages_total": true, "sluice_memory_budget_used_bytes": true, "sluice_memory_budget_limit_bytes": true,
		"sluice_kv_orphan_ranks":         true,
		"sluice_recording_entries_total": true, "sluice_recording_dropped_total": true, "sluice_recording_bytes_total": true, "sluice_recording_active": true,
		"sluice_kv_snapshots_total": true, "sluice_kv_snapshot_timestamp_seconds": true, "sluice_kv_snapshot_ranks_restored_total": true,
		"sluice_kv_tier_up": true, "sluice_kv_side_channel_total": true, "sluice_kv_transfers_pending": true, "sluice_kv_transfers_total": true, "sluice_kv_reports_total": true}
	for _, f := range Catalog {
		if !seen[f.Name] && !elsewhere[f.Name] {
			t.Errorf("%s is documented and never exposed", f.Name)
		}
	}
}

func TestDocument(t *testing.T) {
	const path = "../../docs/metrics.md"
	var b bytes.Buffer
	Document(&b)
	if *rewrite {
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b.Bytes()) {
		t.Errorf("%s is not what the catalog says: go test ./router/obs -run TestDocument -rewrite", path)
	}
}

func TestSeriesAreRemovedWithRank(t *testing.T) {
	m := NewMetrics()
	a, b := rank("a", 0), rank("b", 1)
	exercise(m, a)
	exercise(m, b)
	if got := scrape(m); !strings.Contains(got, `worker="a"`) || !strings.Contains(got, `worker="b"`) {
		t.Fatal("series of a joined rank are missing")
	}
	m.RankRemoved(a)
	m.ExposeWorkers(nil)
	m.LegEnded(schedule.DecodeLeg, a.ID, "ok", 0) // a leg that ends after the removal
	m.AddFeedCount(a.ID, "gaps", 1)
	if got := scrape(m); strings.Contains(got, `worker="a"`) || !strings.Contains(got, `worker="b"`) {
		t.Errorf("stale series, or the other's are gone:\n%s", got)
	}
}

// TestSeriesOfReaddedRank covers two ranks with the same id at the same time: header workers with
// different keys. The series belong to the newer rank and stay when the older one is removed.
func TestSeriesOfReaddedRank(t *testing.T) {
	m := NewMetrics()
	first, second := rank("a", 0), rank("a", 0)
	m.RankAdded(first)
	m.RankAdded(second)
	m.RankRemoved(first)
	if !strings.Contains(scrape(m), `worker="a"`) {
		t.Error("the series of the second went with the first")
	}
	m.RankRemoved(second)
	if strings.Contains(scrape(m), `worker="a"`) {
		t.Error("series are left")
	}
}

func TestLabelsAreEscaped(t *testing.T) {
	m := NewMetrics()
	m.RankAdded(rank("a\"b\\c\nd", 0))
	if got := scrape(m); !strings.Contains(got, `worker="a\"b\\c\nd"`) {
		t.Errorf("got %s", got)
	}
}

func TestSeriesAreBounded(t *testing.T) {
	m := NewMetrics()
	for i := range 5000 {
		m.ResponseEnded("/v1/completions", 100+i, 0)
		m.FallbackUsed(fmt.Sprint(i))
	}
	page := scrape(m)
	if n := strings.Count(page, "sluice_fallbacks_total{"); n != maxSeries+1 {
		t.Errorf("%d series", n)
	}
	for _, want := range []string{fmt.Sprintf("\nsluice_fallbacks_total{kind=\"other\"} %d\n", 5000-maxSeries), fmt.Sprintf("\nsluice_responses_total{endpoint=\"/v1/completions\",code=\"other\"} %d\n", 5000-maxSeries)} {
		if !strings.Contains(page, want) {
			t.Errorf("no%s", want)
		}
	}
}

func TestCountingDoesNotAllocate(t *testing.T) {
	m := NewMetrics()
	r := rank("d1", 0)
	exercise(m, r)
	res := &relay.Result{Cause: relay.Completed, Events: 5}
	if n := testing.AllocsPerRun(200, func() {
		m.Accepted()
		m.ResponseEnded("/v1/completions", 200, time.Millisecond)
		m.LegStarted(schedule.DecodeLeg, r.ID)
		m.LegEnded(schedule.DecodeLeg, r.ID, "ok", time.Millisecond)
		m.FirstToken("/v1/completions", time.Millisecond)
		m.Streamed("/v1/completions", res)
		m.Cached(r.ID, 10, 5, 5)
		m.AddFeedCount(r.ID, "stored", 1)
		m.Refused("/v1/completions", front.BadJSON)
		m.FallbackUsed("incomplete_handle")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestConcurrentUse(t *testing.T) {
	m := NewMetrics()
	r := rank("d1", 0)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 200 {
				m.ResponseEnded("/v1/completions", 200+i%7, 0)
				m.LegEnded(schedule.DecodeLeg, r.ID, fmt.Sprint(i%5), 0)
				if g == 0 {
					m.RankAdded(r)
					scrape(m)
					m.RankRemoved(r)
				}
			}
		})
	}
	wg.Wait()
	var tot Totals
	m.Totals(&tot)
	if tot.Ended != 800 {
		t.Errorf("%d responses counted, want 800", tot.Ended)
	}
}

// TestTotalOutputTokens: the console's output tokens are those of all responses, streams and others.
func TestTotalOutputTokens(t *testing.T) {
	m := NewMetrics()
	m.Model("a").Ended(schedule.Outcome{Status: 200, OutputTokens: 11}, 0, [16]byte{})
	m.Model("b").Ended(schedule.Outcome{Status: 200, OutputTokens: 5}, 0, [16]byte{})
	m.Model("b").Ended(schedule.Outcome{Status: 200, OutputTokens: -1}, 0, [16]byte{}) // not reported
	var tot Totals
	if m.Totals(&tot); tot.OutputTokens != 16 {
		t.Errorf("%d output tokens, want 16", tot.OutputTokens)
	}
}

func TestQuantiles(t *testing.T) {
	var f fineHistogram
	var before, d Distribution
	f.observe(time.Hour) // before the window starts
	f.copyTo(&before)
	for i := 1; i <= 1000; i++ {
		f.observe(time.Duration(i) * time.Millisecond)
	}
	f.copyTo(&d)
	win, n := d.Since(&before)
	if n != 1000 {
		t.Fatalf("%d in the window", n)
	}
	for _, c := range []struct {
		q    float64
		want time.Duration
	}{{0.5, 500 * time.Millisecond}, {0.99, 990 * time.Millisecond}, {1, time.Second}, {0, time.Millisecond}} {
		got := win.Quantile(c.q)
		if diff := float64(got-c.want) / float64(c.want); diff > 0.13 || diff < -0.13 {
			t.Errorf("quantile %v is %v, want %v within 12.5 %%", c.q, got, c.want)
		}
	}
	if (&Distribution{}).Quantile(0.5) != 0 {
		t.Error("a quantile of nothing")
	}
	for _, d := range []time.Duration{-1, 0, 1, 1 << 62} {
		f.observe(d) // must not panic
	}
}

func TestLogger(t *testing.T) {
	var b bytes.Buffer
	log, level, err := NewLogger(&b, "warn", "json")
	if err != nil {
		t.Fatal(err)
	}
	log.Info("quiet")
	log.Warn("loud", "admin_token", "s3cret", slog.Group("auth", "Authorization", "Bearer s3cret"), "prompt_tokens", 12, "tokenizer", "engine")
	got := b.String()
	if strings.Contains(got, "quiet") || strings.Contains(got, "s3cret") || !strings.Contains(got, `"prompt_tokens":12`) || !strings.Contains(got, `"tokenizer":"engine"`) {
		t.Errorf("got %s", got)
	}
	level.Set(slog.LevelInfo)
	if log.Info("heard now"); !strings.Contains(b.String(), "heard now") {
		t.Error("the level does not change")
	}
	// Durations have the same text in both formats.
	for format, want := range map[string]string{"json": `"took":"1.5s","in":{"left":"20ms"}`, "text": "took=1.5s in.left=20ms"} {
		b.Reset()
		log, _, err := NewLogger(&b, "info", format)
		if err != nil {
			t.Fatal(err)
		}
		log.With("token_age", time.Hour).Info("x", "took", 1500*time.Millisecond, slog.Group("in", "left", 20*time.Millisecond))
		if !strings.Contains(b.String(), want) || strings.Contains(b.String(), "1h") {
			t.Errorf("got %s", b.String())
		}
	}
	// Text of a client is written without characters that a terminal interprets: controls of 7 and 8
	// bits, and those that change the direction of text.
	const hostile = "a\x1b[2J\u009b31m\u202e\u2066\u200f\x7f\n\x9bb"
	for _, format := range []string{"json", "text"} {
		b.Reset()
		log, _, err := NewLogger(&b, "info", format)
		if err != nil {
			t.Fatal(err)
		}
		log.Info("x "+hostile, "client", hostile, "error", errors.New(hostile), hostile, []byte(hostile))
		line, ended := strings.CutSuffix(b.String(), "\n")
		if at := strings.IndexFunc(line, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }); at >= 0 || !ended || !strings.Contains(line, `\u202e`) {
			t.Errorf("%s, unprintable from byte %d: %q", format, at, line)
		}
	}
	for _, bad := range [][2]string{{"loud", "text"}, {"info", "xml"}} {
		if _, _, err := NewLogger(&b, bad[0], bad[1]); err == nil || !strings.Contains(err.Error(), "want") {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

// TestFeedCountersAreNamed checks that no counter of the feeds is counted as "other".
func TestFeedCountersAreNamed(t *testing.T) {
	for _, name := range kvevents.Counters {
		if !slices.Contains(feedCounterNames[:], name) {
			t.Errorf("the feed counter %q has no series of its own", name)
		}
	}
}
