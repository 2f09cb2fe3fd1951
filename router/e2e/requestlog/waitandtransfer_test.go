package requestlog

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestWaitAndTransferAreLogged: a request waits in the admission queue until another one has left the
// decode engine, which then reports the request's KV transfer over ZMQ. Its trace has spans of both, its
// line in the access log their times, and the model's histogram the time that the engine measured.
func TestWaitAndTransferAreLogged(t *testing.T) {
	t.Parallel()
	mod, find := accessLog(t)
	c, traced := startCollector(t)
	reached := make(chan struct{})
	release := make(chan struct{})
	free := sync.OnceFunc(func() { close(release) })
	p := harness.StartScripted(t, harness.ReplyHandler(200, harness.PrefillReply(harness.GoodHandle)))
	var r *harness.TransferReporter
	d := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
		id := req.Header.Get("X-Request-Id")
		body, _ := io.ReadAll(req.Body)
		if bytes.Contains(body, []byte("words of occupant")) {
			close(reached)
			<-release
		} else {
			r.Report("recv", "ok", id, string(body))
			if !testwait.Poll(10*time.Second, func() bool { return r.Transfers.Reports()["recv_ok"] > 0 }) {
				t.Error("the router has not read the report")
			}
		}
		harness.ReplyJSON(w, 200, harness.ChatReply("good"))
	})
	t.Cleanup(free) // before the engine's own, which waits for its requests
	r = harness.StartTransferReporter(t, harness.AllOf(mod, traced, func(cfg *config.Config) { cfg.Limits.RankRequests = 1 }),
		p.Worker(worker.Prefill, "p0"), harness.WithReportingConnector(d.Worker(worker.Decode, "d0")))

	var sent sync.WaitGroup
	send := func(id string) {
		sent.Go(func() {
			if a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.ChatOf("words of "+id), "X-Request-Id", id); err != nil || a.Status != 200 {
				t.Errorf("%s: %v, %+v", id, err, a)
			}
		})
	}
	send("occupant")
	<-reached
	send("waits")
	var seen time.Time
	testwait.UntilWithin(t, 20*time.Second, "the request is seen to wait twice", func() bool {
		first := seen.IsZero()
		if first && r.Metric(`sluice_admission_waiting_requests{class="default"}`) == 1 {
			seen = time.Now()
		}
		return !first
	})
	waited := time.Since(seen)
	free()
	sent.Wait()

	line := find("waits")
	want(t, line, map[string]any{"status": 200, "class": "default", "queue_position": 1, "transfer": "done", "transfer_bytes": float64(1 << 20)})
	queue, _ := line["queue_ms"].(float64)
	transfer, _ := line["transfer_ms"].(float64)
	if total := line["total_ms"].(float64); queue < waited.Seconds()*1e3 || transfer <= 0 || queue+transfer > total {
		t.Errorf("queue_ms %v, transfer_ms %v, total_ms %v; want at least %v of queue, some transfer, and no more than the total", line["queue_ms"], line["transfer_ms"], total, waited)
	}
	want(t, find("occupant"), map[string]any{"queue_position": nil, "transfer": "unknown"})

	spans := make(map[string]*tracepb.Span)
	for _, s := range c.trace(t, fmt.Sprint(line["trace_id"])) {
		spans[s.Name] = s
	}
	root, q, k := spans["chat sim"], spans["queue"], spans["kv_transfer"]
	if root == nil || q == nil || k == nil || !bytes.Equal(q.ParentSpanId, root.SpanId) || !bytes.Equal(k.ParentSpanId, root.SpanId) {
		t.Fatalf("want the spans queue and kv_transfer below that of the request; the trace is %v", spans)
	}
	took := func(s *tracepb.Span) float64 { return float64(s.EndTimeUnixNano-s.StartTimeUnixNano) / 1e6 }
	// The line rounds to microseconds.
	if a := attributes(q); a["sluice.class"] != "default" || a["sluice.queue.position"] != "1" || abs(took(q)-queue) > 0.01 {
		t.Errorf("the span queue has %v and took %v ms; want class default, position 1 and %v ms", a, took(q), queue)
	}
	if a := attributes(k); a["sluice.transfer.state"] != "done" || a["sluice.transfer.bytes"] != "1048576" || abs(took(k)-transfer) > 0.01 || k.StartTimeUnixNano < spans["prefill"].EndTimeUnixNano {
		t.Errorf("the span kv_transfer has %v and took %v ms; want 1 MiB done in %v ms, after prefill", a, took(k), transfer)
	}

	page := string(harness.Get(t, r.URL+"/metrics").Body)
	const histogram = "sluice_model_kv_transfer_seconds"
	for _, series := range []string{histogram + `_count{model="sim"`, histogram + `_sum{model="sim"`} {
		i := strings.Index(page, series)
		if i < 0 {
			t.Fatalf("no %s in %s", series, page)
		}
		value, _, _ := strings.Cut(page[i:], "\n")
		value = value[strings.LastIndexByte(value, ' ')+1:]
		if want := map[bool]string{true: "1", false: "0.0025"}[strings.Contains(series, "_count")]; value != want {
			t.Errorf("%s} is %s, want %s, as the engine reported", series, value, want)
		}
	}
}

func abs(x float64) float64 { return max(x, -x) }
