package faults

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestEarlyEndNamesCause: the log line about a stream that ended early names the client, the key
// and the endpoint, like all log lines about a request.
func TestEarlyEndNamesCause(t *testing.T) {
	e := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"text\":\"x\"}]}\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	auth, mod := harness.TokenKey(0)
	r := harness.StartRouter(t, mod, e.Worker(worker.Aggregated, "e"))
	harness.Post(t, r.URL+"/v1/completions", `{"model":"sim","prompt":"x","stream":true}`, append(auth, "X-Request-Id", "cut-1")...)
	testwait.UntilWithin(t, 5*time.Second, "a line about the stream", func() bool { return strings.Contains(r.Logs.String(), "stream ended early") })
	for line := range strings.Lines(r.Logs.String()) {
		if !strings.Contains(line, "stream ended early") {
			continue
		}
		for _, want := range []string{"request=cut-1", "client=127.0.0.1", "endpoint=/v1/completions", "key=a", "rank=e/0", "cause="} {
			if !strings.Contains(line, want) {
				t.Errorf("no %s in %s", want, line)
			}
		}
	}
}

// TestEngineClosesAfterStreamEnd: if an engine closes the connection after a complete stream, the
// metrics, the record and the breaker treat the stream as complete.
func TestEngineClosesAfterStreamEnd(t *testing.T) {
	e := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
		w.(http.Flusher).Flush()
		testwait.Pace(20 * time.Millisecond)
		panic(http.ErrAbortHandler)
	})
	r := harness.StartRouter(t, nil, e.Worker(worker.Aggregated, "e"))
	const streams = 10 // more than the failures that open a breaker
	for i := range streams {
		id := "whole-" + strconv.Itoa(i)
		a := harness.Post(t, r.URL+"/v1/completions", `{"model":"sim","prompt":"x","stream":true}`, "X-Request-Id", id)
		if a.Status != 200 || !strings.HasSuffix(string(a.Body), "data: [DONE]\n\n") || strings.Contains(string(a.Body), "error") {
			t.Fatalf("%d %q", a.Status, a.Body)
		}
		if o := r.Outcome(t, id).Outcome; o.Reason != "" {
			t.Errorf("%s: outcome %+v", id, o)
		}
	}
	if n := r.Metric(`sluice_streams_total{cause="completed"}`); n != streams {
		t.Errorf("%v of %d are counted as completed", n, streams)
	}
	if n := r.Metric(`sluice_rank_breaker_state{worker="e",rank="0"}`); n != 0 || strings.Contains(r.Logs.String(), "stream ended early") {
		t.Errorf("the breaker's state is %v; %s", n, r.Logs)
	}
}

// TestEngineErrorIsACause: a stream in which its engine sent an error is counted with that cause,
// and the log line contains the type and the code of the error.
func TestEngineErrorIsACause(t *testing.T) {
	e := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"x\"}]}\n\n")
		w.(http.Flusher).Flush()
		io.WriteString(w, "data: {\"error\":{\"message\":\"boom\",\"type\":\"InternalServerError\",\"code\":500}}\n\ndata: [DONE]\n\n")
	})
	r := harness.StartRouter(t, nil, e.Worker(worker.Aggregated, "e"))
	harness.Post(t, r.URL+"/v1/completions", `{"model":"sim","prompt":"x","stream":true}`, "X-Request-Id", "said-1")
	testwait.UntilWithin(t, 5*time.Second, "a line about the stream", func() bool { return strings.Contains(r.Logs.String(), "stream ended early") })
	if o := r.Outcome(t, "said-1").Outcome; o.Reason != "engine_error" {
		t.Errorf("outcome %+v", o)
	}
	if n := r.Metric(`sluice_streams_total{cause="engine_error"}`); n != 1 {
		t.Errorf("%v are counted", n)
	}
	if text := r.Logs.String(); !strings.Contains(text, `cause=engine_error error="the engine sent an error event: InternalServerError 500"`) || strings.Contains(text, "boom") {
		t.Error(text)
	}
}

// TestEngineConnectionsExhausted: a request that is refused because limits.engine_conns is reached
// receives an error with a reason of its own.
func TestEngineConnectionsExhausted(t *testing.T) {
	active, block := make(chan struct{}), make(chan struct{})
	e := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		close(active)
		<-block
		harness.ReplyJSON(w, 200, `{"choices":[{"text":"hi"}]}`)
	})
	r := harness.StartRouter(t, func(c *config.Config) { c.Limits.EngineConns = 1 }, e.Worker(worker.Aggregated, "e"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		harness.Post(t, r.URL+"/v1/completions", harness.KeyBody)
	}()
	<-active
	a := harness.Post(t, r.URL+"/v1/completions", harness.KeyBody)
	close(block)
	<-done
	if a.Status != 503 || a.Header.Get("X-Sluice-Reason") != "engine_connections" || !strings.Contains(string(a.Body), "the 1 that limits.engine_conns allows") {
		t.Errorf("%d %v %s", a.Status, a.Header, a.Body)
	}
	if n := r.Metric(`sluice_requests_refused_total{endpoint="/v1/completions",reason="engine_connections"}`); n != 1 {
		t.Errorf("%v are counted", n)
	}
}
