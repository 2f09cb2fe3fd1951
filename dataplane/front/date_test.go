package front

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

// A stream's head has one Date line, the router's own.
func TestStreamsHaveADate(t *testing.T) {
	const theirs = "Mon, 02 Jan 2006 15:04:05 GMT"
	var dated atomic.Bool
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		head := streamHead
		if dated.Load() {
			head = strings.Replace(head, "x-engine", "date: "+theirs+"\r\nx-engine", 1)
		}
		_, err := io.WriteString(nc, head+chunk(helloStream)+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{}, relayTo(e, endHook(ends)))
	early := start(t, Options{EarlyHeaders: true, KeepAlive: time.Millisecond}, dispatching(func(x Exchange) {
		testwait.Pace(20 * time.Millisecond)
		relayTo(e, endHook(ends))(x)
	}))
	dates := func(r *testServer) []string {
		c := r.dial()
		c.send(chatPost(streamDoc))
		resp, _ := c.readResponse()
		<-ends
		return resp.Header["Date"]
	}
	for name, r := range map[string]*testServer{"with the engine's": r, "before it": early} {
		got := dates(r)
		if len(got) != 1 {
			t.Fatalf("%s: %q", name, got)
		}
		if at, err := http.ParseTime(got[0]); err != nil || time.Since(at).Abs() > 5*time.Second {
			t.Errorf("%s: %q (%v)", name, got, err)
		}
	}
	dated.Store(true)
	if got := dates(r); len(got) != 1 || got[0] == theirs {
		t.Errorf("%q", got)
	}
}
