package faults

import (
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

const keepAliveComment = ": keep-alive\n\n"

// TestEarlyResponseHead: with relay.early_headers_after the router sends the head of a stream
// before an engine has answered, then comments, and then the result in the stream: the output or
// an error event in the client's API format. Without the option an error is an HTTP status.
func TestEarlyResponseHead(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	begin := func(after, firstByte time.Duration) *harness.Router {
		return harness.StartRouter(t, func(c *config.Config) {
			c.Relay.EarlyHeadersAfter, c.Relay.CommentInterval, c.Timeouts.FirstByte = after, 10*time.Millisecond, firstByte
		}, harness.SimWorker(e, worker.Aggregated, "w0"))
	}
	longDelay, shortDelay, plain := begin(0, time.Minute), begin(0, 300*time.Millisecond), begin(-1, 300*time.Millisecond)
	stream := harness.Chat(`,"stream":true`)
	direct := harness.Post(t, e.URL()+"/v1/chat/completions", stream)

	e.Fault(sim.Fault{Kind: sim.Stall, Delay: 500 * time.Millisecond, N: 1})
	late := harness.Post(t, longDelay.URL+"/v1/chat/completions", stream)
	harness.WantStatus(t, late, 200)
	if got := late.Header.Get("X-Sluice-Worker"); got != "" {
		t.Errorf("the head names worker %q, which was not known when it went out", got)
	}
	if late.Header.Get("X-Request-Id") == "" || !strings.HasPrefix(late.Header.Get("Content-Type"), "text/event-stream") {
		t.Errorf("head %v", late.Header)
	}
	body := string(late.Body)
	if !strings.HasPrefix(body, keepAliveComment) || late.Text(t) != direct.Text(t) || !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Errorf("the client got %q, want comments and then %q", body, direct.Text(t))
	}
	soon := harness.Post(t, longDelay.URL+"/v1/chat/completions", stream)
	if harness.WantStatus(t, soon, 200); soon.Text(t) != direct.Text(t) {
		t.Errorf("an answer that is not late is %q, want %q", soon.Text(t), direct.Text(t))
	}

	for path, end := range map[string]struct{ body, want, last string }{
		"/v1/chat/completions": {stream, `data: {"error":{`, "data: [DONE]\n\n"},
		"/v1/messages":         {`{"model":"sim","max_tokens":4,"stream":true,"messages":[{"role":"user","content":"hello"}]}`, "event: error\ndata: {", "}\n\n"},
	} {
		e.Fault(sim.Fault{Kind: sim.Stall}) // forever
		failed := harness.Post(t, shortDelay.URL+path, end.body)
		harness.WantStatus(t, failed, 200)
		got := strings.ReplaceAll(string(failed.Body), keepAliveComment, "")
		if !strings.HasPrefix(got, end.want) || !strings.HasSuffix(got, end.last) || !strings.HasPrefix(string(failed.Body), keepAliveComment) {
			t.Errorf("%s: the client got %q, want comments, then %s… and %s", path, failed.Body, end.want, end.last)
		}
		if refused := harness.Post(t, plain.URL+path, end.body); refused.Status != 504 && refused.Status != 502 {
			t.Errorf("%s: without early_headers_after the status is %d, want one that says what failed: %s", path, refused.Status, refused.Body)
		}
		e.ClearFaults()
	}
}
