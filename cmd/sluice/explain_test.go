package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"sluice/router/admin"
	"sluice/router/fleet"
	"sluice/router/obs"
	"sluice/router/pd"
	"sluice/router/schedule"
	"sluice/router/worker"
)

type noWorkers struct{}

func (noWorkers) View() *fleet.View        { return &fleet.View{} }
func (noWorkers) Drain(string, bool) error { return nil }

func explain(args ...string) (code int, stdout, stderr string) {
	var o, e bytes.Buffer
	code = runArgs("explain", args, &o, &e)
	return code, o.String(), e.String()
}

func TestExplainTransfer(t *testing.T) {
	for want, reported := range map[string]schedule.TransferRecord{
		"KV transfer: done 45.2 ms after prefill's answer; 50 MiB in 40.0 ms as reported by the engine, 1.2 GiB/s.\n": {State: "done", Bytes: 50 << 20, TookMS: 40, AfterMS: 45.2},
		"KV transfer: failed 3.0 ms after prefill's answer.\n":                                                        {State: "failed", AfterMS: 3},
		"KV transfer: expired.\n": {State: "expired"},
		"KV transfer: unknown; ":  {State: "unknown"},
	} {
		var out bytes.Buffer
		writeOutcome(&out, &schedule.OutcomeRecord{Status: 200, Transfer: &reported})
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %q in\n%s", want, &out)
		}
	}
	var out bytes.Buffer
	if writeOutcome(&out, &schedule.OutcomeRecord{Status: 200}); strings.Contains(out.String(), "KV") {
		t.Errorf("of a request that was not watched:\n%s", &out)
	}
}

func TestExplain(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv("SLUICE_ADMIN_TOKEN", "")
	if code, _, stderr := explain("x"); code != 1 || !strings.Contains(stderr, "no router") || !strings.Contains(stderr, "sluice serve") {
		t.Errorf("without a router: %d %q", code, stderr)
	}
	s := schedule.New(schedule.Options{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1})
	a, err := admin.New(admin.Options{Listen: "127.0.0.1:0", Workers: noWorkers{}, Scheduler: s, Metrics: obs.NewMetrics()})
	if err != nil {
		t.Fatal(err)
	}
	go a.Serve()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		a.Close(ctx)
	}()
	var ranks []*worker.Rank
	for _, id := range []string{"p1", "p2", "p3"} {
		ranks = append(ranks, worker.New(worker.Spec{ID: id}).Ranks[0])
	}
	ranks[2].PrefillTokens.Store(500)
	s.AddNote("req-1", "prefill on p1/0 failed: connection refused")
	s.Choose(&schedule.Query{Leg: schedule.PrefillLeg, Candidates: ranks, Excluded: ranks[:1], PromptTokens: 1000, RequestID: "req-1", Attempt: 2})
	s.EndRecord("req-1", schedule.Outcome{Status: 200, CachedTokens: 64, PromptTokens: 1000, OutputTokens: 20, TTFT: 41500 * time.Microsecond, Total: 180 * time.Millisecond})
	s.Choose(&schedule.Query{Leg: schedule.DecodeLeg, RequestID: "req-2", Attempt: 1})

	code, out, stderr := explain("req-1")
	if code != 0 {
		t.Fatalf("%d %s", code, stderr)
	}
	for _, want := range []string{"Request req-1", "Prefill leg, attempt 2", ": p2/0", "1 excluded (failed for this request)\n", "→  p2/0   100.00", "150.00", "×  p1/0",
		"connection refused", "Ended: status 200 after 180.0 ms, first token after 41.5 ms; 1000 prompt tokens (64 cached as reported by the engine), 20 output tokens."} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.Contains(out, "pressure") {
		t.Errorf("a term that is nought everywhere is shown:\n%s", out)
	}
	if _, out, _ := explain("req-2"); !strings.Contains(out, "none: no candidate was left") || !strings.Contains(out, "In progress") {
		t.Errorf("a refused request:\n%s", out)
	}
	var rec schedule.Record
	if code, out, _ := explain("--json", "req-1"); code != 0 || json.Unmarshal([]byte(out), &rec) != nil || rec.RequestID != "req-1" {
		t.Errorf("--json: %d\n%s", code, out)
	}
	if code, out, _ := explain("req-1", "--json", "--admin", a.Addr()); code != 0 || !strings.HasPrefix(out, "{") {
		t.Errorf("flags behind the id: %d\n%s", code, out)
	}
	if code, _, stderr := explain("--runtime-file", a.RuntimeFile(), "other"); code != 1 || !strings.Contains(stderr, "not among the last 10000") {
		t.Errorf("unknown: %d %q", code, stderr)
	}
	for _, bad := range [][]string{{}, {"a", "b"}, {"--nothing", "a"}} {
		if code, _, stderr := explain(bad...); code != 2 || stderr == "" {
			t.Errorf("%q: %d %q", bad, code, stderr)
		}
	}
	if code, out, _ := explain("--help"); code != 0 || !strings.Contains(out, "Examples:") {
		t.Errorf("--help: %d %q", code, out)
	}
	// A router of another user or machine is found by address and token.
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(t.TempDir(), "other"))
	rt, err := admin.ReadRuntimeFile(a.RuntimeFile())
	if err != nil {
		t.Fatal(err)
	}
	os.Setenv("SLUICE_ADMIN_TOKEN", rt.Token)
	if code, _, stderr := explain("--admin", a.Addr(), "req-1"); code != 0 {
		t.Errorf("by address and token: %d %q", code, stderr)
	}
}

// TestExplainExclusions: the reason for excluded ranks is that of the choice, by the notes before it.
func TestExplainExclusions(t *testing.T) {
	const slow = " of 3 " + pd.LeftOutForTargets + ": the first token within 1s"
	rec := schedule.Record{
		Notes: []schedule.Note{{AtMS: 1, Text: "1" + slow}, {AtMS: 2, Text: "decode on d1/0 failed: migration on d2/0 failed: broken"}, {AtMS: 2.5, Text: "2" + slow}, {AtMS: 4, Text: "admission: waited"}},
		Decisions: []schedule.Decision{
			{Leg: "prefill", AtMS: 1, Excluded: 1},
			{Leg: "decode", AtMS: 1.5, Excluded: 1},
			{Leg: "decode", AtMS: 2.2, Excluded: 1},
			{Leg: "decode", AtMS: 2.5, Excluded: 3},
			{Leg: "decode", AtMS: 2.5, Excluded: 4},
			{Leg: "decode", AtMS: 3, Excluded: 1},
		},
	}
	for i, want := range []string{
		"expected to miss more of its targets",
		"at a limit, without capacity, or not ready",
		"failed for this request",
		"failed for this request; expected to miss more of its targets",
		"failed for this request; expected to miss more of its targets; at a limit, without capacity, or not ready",
		"failed for this request",
	} {
		if got := exclusionReasons(&rec, i); got != want {
			t.Errorf("choice %d: %q; want %q", i, got, want)
		}
	}
}

// TestExplainClass: the class, the tenant and the place in the queue are shown, also of a request that did not
// wait, and not those of another request with the same id.
func TestExplainClass(t *testing.T) {
	at := time.Now()
	rec := schedule.Record{RequestID: "a", Started: at, Earlier: []schedule.Record{{RequestID: "a", Started: at.Add(-time.Minute)}}}
	timeline := func(class, tenant string, position int) *admin.Timeline {
		return &admin.Timeline{Request: admin.Request{Class: class, Tenant: tenant, TotalMS: 5}, Received: at.Add(-time.Millisecond), Spans: []admin.TimelineSpan{{Name: "queue", Position: position}}}
	}
	for want, line := range map[string]*admin.Timeline{
		"":                         timeline("", "", 0),
		"Class batch, tenant acme": timeline("batch", "acme", 0),
		"Class batch; it did not wait for a rank\n":                                                     timeline("batch", "", 0),
		"Class batch; it began to wait at place 3 among the requests of its class and of higher ones\n": timeline("batch", "", 3),
	} {
		var out bytes.Buffer
		writeRecord(&out, &rec, line)
		if n := strings.Count(out.String(), "Class"); !strings.Contains(out.String(), want) || n != min(len(want), 1) {
			t.Errorf("want %q once in\n%s", want, &out)
		}
	}
	var out bytes.Buffer
	if writeRecord(&out, &rec, nil); strings.Contains(out.String(), "Class") {
		t.Errorf("without a timeline:\n%s", &out)
	}
}

// TestExplainControlCharacters: text of clients and engines in a record does not reach a terminal's controls.
func TestExplainControlCharacters(t *testing.T) {
	const hostile = "a\x1b[2J\u009b31m\u202e\r\nb"
	rec := schedule.Record{RequestID: hostile, Notes: []schedule.Note{{Text: hostile}}, Outcome: &schedule.OutcomeRecord{Status: 500, Reason: hostile}}
	rec.Earlier = []schedule.Record{rec}
	var out bytes.Buffer
	writeRecord(&out, &rec, nil)
	text := out.String()
	if strings.Count(text, "a [2J 31m   b") != 6 {
		t.Errorf("%q", text)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
		t.Errorf("control characters in %q", text)
	}
	out.Reset()
	var read []string
	if err := encodeJSON(&out, []string{hostile}); err != nil || json.Unmarshal(out.Bytes(), &read) != nil || read[0] != hostile {
		t.Errorf("%v: %q is read as %q", err, &out, read)
	}
	if strings.ContainsFunc(out.String(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
		t.Errorf("control characters in %q", &out)
	}
}

// TestUnreportedTokens: an engine that reports no usage has no number of tokens, rather than -1.
func TestUnreportedTokens(t *testing.T) {
	var explained, listed bytes.Buffer
	writeOutcome(&explained, &schedule.OutcomeRecord{Status: 200, PromptTokens: 9, OutputTokens: -1, CachedTokens: -1})
	writeRequests(&listed, []admin.Request{{ID: "q", Done: true, Status: 200, PromptTokens: 9, OutputTokens: -1, Reported: -1}}, time.Now(), 0)
	if text := explained.String(); !strings.Contains(text, "; 9 prompt tokens, ? output tokens") {
		t.Error(text)
	}
	if text := listed.String(); strings.Contains(text, "-1") || !strings.Contains(text, "?") {
		t.Error(text)
	}
}

// TestOneOfEach: counts of one are written in the singular.
func TestOneOfEach(t *testing.T) {
	var out bytes.Buffer
	writeDecision(&out, &schedule.Decision{Leg: "prefill", PromptTokens: 1, PromptSource: "native", Candidates: 1}, "")
	writeDecision(&out, &schedule.Decision{Leg: "decode", PromptTokens: 13, Candidates: 2}, "")
	writeOutcome(&out, &schedule.OutcomeRecord{Status: 200, PromptTokens: 1, CachedTokens: -1, OutputTokens: 1})
	(&checkedServer{BlockSize: 16, EventRanks: 1, answered: true}).print(&out)
	for _, want := range []string{
		"  1 prompt token (native ids), about 0 to come; 1 candidate",
		"  13 prompt tokens, about 0 to come; 2 candidates",
		"; 1 prompt token, 1 output token.\n",
		"; 16 tokens a block; events of 1 rank\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %q in\n%s", want, &out)
		}
	}
	if got := plural(1, "retry") + ", " + plural(1200, "retry"); got != "1 retry, 1,200 retries" {
		t.Error(got)
	}
}
