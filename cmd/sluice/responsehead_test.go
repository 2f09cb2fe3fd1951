package main

import (
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

const keepAliveComment = ": keep-alive\n\n"

// TestEarlyResponseHead: with relay.early_headers_after a stream's head goes out while no engine has
// answered yet, comments follow, and what comes of the request after that is in the
// stream: the answer, or an event of the client's protocol. Without, it is the status.
func TestEarlyResponseHead(t *testing.T) {
	e := startSim(t, nil)
	begin := func(after, firstByte time.Duration) *testRouter {
		return startRouter(t, func(c *config.Config) {
			c.Relay.HeadAfter, c.Relay.KeepAlive, c.Timeouts.FirstByte = after, 10*time.Millisecond, firstByte
		}, simWorker(e, worker.Aggregated, "w0"))
	}
	longDelay, shortDelay, plain := begin(0, time.Minute), begin(0, 300*time.Millisecond), begin(-1, 300*time.Millisecond)
	stream := chat(`,"stream":true`)
	direct := post(t, e.URL()+"/v1/chat/completions", stream)

	e.Fault(sim.Fault{Kind: sim.Stall, Delay: 500 * time.Millisecond, N: 1})
	late := post(t, longDelay.URL+"/v1/chat/completions", stream)
	wantStatus(t, late, 200)
	if got := late.Header.Get("X-Sluice-Worker"); got != "" {
		t.Errorf("the head names worker %q, which was not known when it went out", got)
	}
	if late.Header.Get("X-Request-Id") == "" || !strings.HasPrefix(late.Header.Get("Content-Type"), "text/event-stream") {
		t.Errorf("head %v", late.Header)
	}
	body := string(late.Body)
	if !strings.HasPrefix(body, keepAliveComment) || late.text(t) != direct.text(t) || !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Errorf("the client got %q, want comments and then %q", body, direct.text(t))
	}
	soon := post(t, longDelay.URL+"/v1/chat/completions", stream)
	if wantStatus(t, soon, 200); soon.text(t) != direct.text(t) {
		t.Errorf("an answer that is not late is %q, want %q", soon.text(t), direct.text(t))
	}

	for path, end := range map[string]struct{ body, want, last string }{
		"/v1/chat/completions": {stream, `data: {"error":{`, "data: [DONE]\n\n"},
		"/v1/messages":         {`{"model":"sim","max_tokens":4,"stream":true,"messages":[{"role":"user","content":"hello"}]}`, "event: error\ndata: {", "}\n\n"},
	} {
		e.Fault(sim.Fault{Kind: sim.Stall}) // for ever
		failed := post(t, shortDelay.URL+path, end.body)
		wantStatus(t, failed, 200)
		got := strings.ReplaceAll(string(failed.Body), keepAliveComment, "")
		if !strings.HasPrefix(got, end.want) || !strings.HasSuffix(got, end.last) || !strings.HasPrefix(string(failed.Body), keepAliveComment) {
			t.Errorf("%s: the client got %q, want comments, then %s… and %s", path, failed.Body, end.want, end.last)
		}
		if refused := post(t, plain.URL+path, end.body); refused.Status != 504 && refused.Status != 502 {
			t.Errorf("%s: without early_headers_after the status is %d, want one that says what failed: %s", path, refused.Status, refused.Body)
		}
		e.ClearFaults()
	}
}
