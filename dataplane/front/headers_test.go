package front

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"sluice/dataplane/headerrules"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// TestClientHeaders sends each header of the table, in several spellings, with and without API
// keys of the router, and checks the header lines that an engine would get.
func TestClientHeaders(t *testing.T) {
	kept := []string{"Accept", "Anthropic-Version", "Anthropic-Beta", "OpenAI-Beta", "User-Agent", "traceparent", "tracestate", "X-Session-ID", "X-Other", "X", "Cookies", "X-Api-Keys", "X_Other", "Xx-Forwarded-For"}
	for _, own := range []bool{false, true} {
		var got []string
		r := start(t, Options{WithholdClientKeys: own}, func(x Exchange) {
			for _, f := range x.ForwardFields(nil) {
				got = append(got, strings.ToLower(strings.Clone(f.Name))) // it is borrowed
			}
			x.ReplyJSON(200, nil)
		})
		ask := func(name string) (forwarded bool) {
			got = nil
			c := r.dial()
			value := "secret"
			if strings.EqualFold(name, "Connection") {
				value = "close"
			}
			c.send(chatPost(hello, name+": "+value))
			if resp, body := c.readResponse(); resp.StatusCode != 200 {
				t.Fatalf("%s: %d %s", name, resp.StatusCode, body)
			}
			return slices.Contains(got, strings.ToLower(name))
		}
		for _, name := range kept {
			if !ask(name) {
				t.Errorf("keys of our own %v: %s is not forwarded", own, name)
			}
		}
		for name, class := range headerrules.RequestTable {
			switch name {
			case "content-length", "transfer-encoding", "host", "expect", "content-encoding": // of the request's own framing
				if strings.Contains(name, "-") && ask(strings.ReplaceAll(name, "-", "_")) {
					t.Errorf("%s is forwarded with _ in the place of -", name)
				}
				continue
			}
			for _, spelt := range []string{strings.ReplaceAll(name, "*", "a"), strings.ToUpper(strings.ReplaceAll(name, "*", "Any-Thing")), strings.ReplaceAll(name, "*", ""), strings.ReplaceAll(strings.ReplaceAll(name, "*", "a"), "-", "_")} {
				if want := class == headerrules.Key && !own; ask(spelt) != want {
					t.Errorf("keys of our own %v: %s is forwarded: %v, want %v", own, spelt, !want, want)
				}
			}
		}
	}
}

// TestEngineHeaders makes an engine send each header of the table, in several spellings, in
// non-streaming responses and in streams, and checks the header lines that the client gets.
func TestEngineHeaders(t *testing.T) { withBothRelayModes(t, testEngineHeaders) }

func testEngineHeaders(t *testing.T, by RelayMode) {
	kept := []string{"X-Ratelimit-Remaining-Tokens", "Retry-After", "Content-Language", "Cache-Control", "X-Accel-Buffering", "Server", "Openai-Processing-Ms"}
	var head atomic.Pointer[string]
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, *head.Load())
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	streams := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	whole := start(t, Options{}, func(x Exchange) {
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/"}, nil)
		if err != nil {
			x.Error(UpstreamFailed, "", err.Error(), 0)
			return
		}
		defer resp.Release()
		body, _ := resp.ReadAll(nil, 100)
		x.SetHeader("X-Sluice-Worker", "w1")
		x.Reply(resp, body)
	})
	const ofEngine = "of the engine"
	ask := func(name string, status int, stream bool) (values []string) {
		t.Helper()
		text := fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: 2\r\n%s: %s\r\n\r\n{}", status, name, ofEngine)
		r := whole
		if stream {
			text = strings.Replace(streamHead, "x-engine: one", name+": "+ofEngine, 1) + chunk(helloStream) + "0\r\n\r\n"
			r = streams
		}
		head.Store(&text)
		c := r.dial()
		defer c.Close()
		c.send(chatPost(streamDoc))
		resp, body := c.readResponse()
		if stream {
			<-ends
		}
		if resp.StatusCode != status || len(resp.Header["Date"]) != 1 || resp.Header.Get("X-Sluice-Worker") != "w1" {
			t.Fatalf("%s: %d %v %s", name, resp.StatusCode, resp.Header, body)
		}
		return resp.Header.Values(name)
	}
	for _, stream := range []bool{false, true} {
		for _, name := range kept {
			if got := ask(name, 200, stream); len(got) != 1 || got[0] != ofEngine {
				t.Errorf("stream %v: %s is %q, want the engine's", stream, name, got)
			}
		}
		for _, name := range []string{"kv_transfer_params", "X-KV-Transfer-Params", "Link", "Content-Security-Policy", "Content-Security-Policy-Report-Only", "Authorization"} {
			if got := ask(name, 200, stream); slices.Contains(got, ofEngine) {
				t.Errorf("stream %v: the client sees the engine's %s", stream, name)
			}
		}
		for name := range headerrules.ResponseTable {
			one := strings.ReplaceAll(name, "*", "Reason")
			for _, spelt := range []string{one, strings.ToUpper(one), strings.ReplaceAll(one, "-", "_")} {
				if got := ask(spelt, 200, stream); slices.Contains(got, ofEngine) {
					t.Errorf("stream %v: the client sees the engine's %s", stream, spelt)
				}
			}
		}
	}
	if got := ask("WWW-Authenticate", 401, false); len(got) != 1 {
		t.Errorf("a 401 has WWW-Authenticate %q, want the engine's", got)
	}
}

// The header lines of an in-process exchange come from its caller, without credentials.
func TestInProcessHeaders(t *testing.T) {
	x, err := NewExchange(&InProcessRequest{Endpoint: &Endpoints[0], Body: []byte(`{}`), Responder: struct{ Responder }{}, Fields: []upstream.Field{{Name: "Cookie", Value: "a"}, {Name: "X-Sluice-Worker", Value: "a"}, {Name: "X-Forwarded-For", Value: "::1"}}})
	if err != nil {
		t.Fatal(err)
	}
	if got := x.ForwardFields(nil); len(got) != 2 || got[0].Name != "X-Forwarded-For" || got[1].Name != "Content-Type" {
		t.Errorf("%v", got)
	}
}
