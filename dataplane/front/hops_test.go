package front

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"sluice/dataplane/upstream"
)

// A router that is its own worker answers its own request with 508, once. Without the hop header
// it would forward the request to itself again and again.
func TestLoopIsDetected(t *testing.T) {
	var addr atomic.Pointer[string]
	var calls atomic.Int32
	r := start(t, Options{}, func(x Exchange) {
		if calls.Add(1) > 20 {
			x.Error(Internal, "", "a loop", 0)
			return
		}
		ep, err := upstream.NewEndpoint("http://"+*addr.Load(), upstream.Options{})
		if err != nil {
			x.Error(Internal, "", err.Error(), 0)
			return
		}
		defer ep.Close()
		resp, err := ep.Do(&upstream.Request{Method: "POST", Path: chat, Fields: append(x.ForwardFields(nil), HopField(x)), Body: [][]byte{x.Request().Doc.Body}}, nil)
		if err != nil {
			x.Error(UpstreamFailed, "", err.Error(), 0)
			return
		}
		defer resp.Release()
		body, _ := resp.ReadAll(nil, 1000)
		x.Reply(resp, body)
	})
	addr.Store(&r.addr)
	c := r.dial()
	c.send(chatPost(hello))
	if resp, body := c.readResponse(); resp.StatusCode != 508 || !strings.Contains(body, "routing loop") || calls.Load() != 1 {
		t.Errorf("%d %s after %d calls", resp.StatusCode, body, calls.Load())
	}
}

func TestHops(t *testing.T) {
	r := start(t, Options{}, func(x Exchange) { x.ReplyJSON(200, fmt.Appendf(nil, "%q", HopField(x).Value)) })
	for _, c := range []struct {
		via    []string
		status int
		body   string
	}{
		{nil, 200, `"` + pseudonym + `"`},
		{[]string{"a"}, 200, `"a,` + pseudonym + `"`},
		{[]string{"a,b", "c"}, 200, `"a,b,c,` + pseudonym + `"`},
		{[]string{strings.Repeat("a,", maxHops-1) + "a"}, 200, ""},
		{[]string{strings.Repeat("a,", maxHops) + "a"}, 508, "more than 8 routers"},
		{[]string{"a, " + pseudonym + " ,b"}, 508, "routing loop"},
		{[]string{"a", pseudonym}, 508, "loop_detected"},
	} {
		var lines []string
		for _, v := range c.via {
			lines = append(lines, hopHeader+": "+v)
		}
		conn := r.dial()
		conn.send(chatPost(hello, lines...))
		resp, body := conn.readResponse()
		if resp.StatusCode != c.status || !strings.Contains(body+resp.Header.Get("X-Sluice-Reason"), c.body) {
			t.Errorf("%q: %d %s %s; want %d %s", c.via, resp.StatusCode, body, resp.Header.Get("X-Sluice-Reason"), c.status, c.body)
		}
	}
}
