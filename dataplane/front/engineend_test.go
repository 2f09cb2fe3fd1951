package front

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

// The engine closes or resets its connection after each event and inside each event. After an
// event the client gets the events so far and an error event, and its connection stays open.
// Inside an event the client gets the bytes so far and the connection ends. With a pause the
// end arrives alone, otherwise together with the last bytes.
func TestEngineEndsAtEveryEvent(t *testing.T) { withBothRelayModes(t, testEngineEndsAtEveryEvent) }

func testEngineEndsAtEveryEvent(t *testing.T, by RelayMode) {
	var events []string
	for i := range 6 {
		events = append(events, fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"w%d\"}}]}\n\n", i))
	}
	type end struct {
		after  int  // whole events
		inside bool // and a half of the next event
		reset  bool
		pause  time.Duration // between the last byte and the end
		seen   chan struct{} // closed when the client has all bytes; a reset would discard unread ones
	}
	var next atomic.Pointer[end]
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		k := next.Load()
		_, _ = io.WriteString(nc, streamHead)
		for _, ev := range events[:k.after] {
			_, _ = io.WriteString(nc, chunk(ev))
			testwait.Pace(k.pause / 8)
		}
		if k.inside {
			half := chunk(events[k.after])
			_, _ = io.WriteString(nc, half[:len(half)/2])
		}
		testwait.Pace(k.pause)
		if k.reset {
			<-k.seen
			_ = nc.(*net.TCPConn).SetLinger(0)
		}
		return false
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	for after := range len(events) {
		for i := range 8 {
			k := &end{after: after, inside: i&1 != 0, reset: i&2 != 0, seen: make(chan struct{})}
			if i&4 != 0 {
				k.pause = 4 * time.Millisecond
			}
			name := fmt.Sprintf("%d events, inside %v, reset %v, pause %v", after, k.inside, k.reset, k.pause)
			next.Store(k)
			c := r.dial()
			c.send(chatPost(`{"model":"m","stream":true}`))
			if k.inside && after == 0 {
				time.AfterFunc(20*time.Millisecond, func() { close(k.seen) }) // the client does not see half an event
			}
			resp, err := http.ReadResponse(c.br, nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			want := strings.Join(events[:after], "")
			got := make([]byte, len(want))
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
				t.Fatalf("%s: the client got %q (%v)", name, got, err)
			}
			if !k.inside || after > 0 {
				close(k.seen)
			}
			rest, err := io.ReadAll(resp.Body)
			res := wantEnd(t, ends, relay.EngineClosed)
			if err != nil || !res.Reusable || bytes.Count(rest, []byte(`"upstream_error"`)) != 1 || !bytes.HasPrefix(rest, []byte("data: {\"error\"")) || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
				t.Errorf("%s: %q at the end (%v), %+v", name, rest, err, res)
			}
			c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
			if resp, _ := c.readResponse(); resp.StatusCode != 200 {
				t.Errorf("%s: %d on the kept connection", name, resp.StatusCode)
			}
			_ = c.Close()
		}
	}
	testwait.Until(t, "connections closed", func() bool { return r.server.conns.len() == 0 })
	if s := e.ep.Stats(); s.Open != 0 {
		t.Errorf("%d engine connections are left", s.Open)
	}
}

// An engine without TCP_NODELAY sends no small packet while another is not acknowledged. The
// kernel delays acknowledgements on an event loop's connection until it detects that the peer
// waits. Events are therefore late only at the beginning.
func TestEngineWaitsForACKs(t *testing.T) { withBothRelayModes(t, testEngineWaitsForACKs) }

func testEngineWaitsForACKs(t *testing.T, by RelayMode) {
	const late = 20 * time.Millisecond // half of the kernel's least delay of an acknowledgement
	if lag := testwait.MedianOf(5, func() time.Duration { return delayedEvents(t, by) }); lag > late {
		t.Errorf("half of a stream's last events came %v and more after they were sent, want less than %v", lag, late)
	}
}

// delayedEvents returns the median delay of the second half of a stream's events, with a new engine
// and a new server.
func delayedEvents(t *testing.T, by RelayMode) time.Duration {
	const n, pause = 60, 5 * time.Millisecond
	sent := make(chan []time.Time, 1)
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_ = nc.(*net.TCPConn).SetNoDelay(false)
		_, _ = io.WriteString(nc, streamHead)
		var at []time.Time
		for i := range n {
			testwait.Pace(pause)
			at = append(at, time.Now())
			_, _ = io.WriteString(nc, chunk(fmt.Sprintf("data: %04d\n\n", i)))
		}
		_, _ = io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		sent <- at
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	c.send(chatPost(`{"model":"m","stream":true}`))
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		t.Fatal(err)
	}
	ev := make([]byte, len("data: 0000\n\n"))
	var at []time.Time
	for range n {
		if _, err := io.ReadFull(resp.Body, ev); err != nil {
			t.Fatal(err)
		}
		at = append(at, time.Now())
	}
	if _, err := io.ReadAll(resp.Body); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, ends, relay.Completed)
	var lags []time.Duration
	for i, s := range <-sent {
		lags = append(lags, at[i].Sub(s))
	}
	worst := slices.Max(lags[:n/2])
	slices.Sort(lags[n/2:])
	t.Logf("the latest of the first %d events came %v after it was sent; of the others p50 %v, worst %v", n/2, worst, lags[n*3/4], lags[n-1])
	return lags[n*3/4]
}

// Once the router has detected a few times that an engine waits for acknowledgements, it
// acknowledges at once. From then on the first events of a stream are not late either.
func TestDelayedACKEngineIsDetected(t *testing.T) {
	const n, pause = 10, 5 * time.Millisecond
	sent := make(chan time.Time, n)
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_ = nc.(*net.TCPConn).SetNoDelay(false)
		_, _ = io.WriteString(nc, streamHead)
		for i := range n {
			testwait.Pace(pause)
			sent <- time.Now()
			_, _ = io.WriteString(nc, chunk(fmt.Sprintf("data: %04d\n\n", i)))
		}
		_, err := io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: RelayLoop}, relayTo(e, endHook(ends)))
	c := r.dial()
	for end, k := time.Now().Add(2*testTimeout), 0; ; k++ {
		_ = c.SetDeadline(time.Now().Add(testTimeout))
		c.send(chatPost(`{"model":"m","stream":true}`))
		resp, err := http.ReadResponse(c.br, nil)
		if err != nil {
			t.Fatal(err)
		}
		var worst time.Duration
		ev := make([]byte, len("data: 0000\n\n"))
		for range n {
			if _, err := io.ReadFull(resp.Body, ev); err != nil {
				t.Fatal(err)
			}
			worst = max(worst, time.Since(<-sent))
		}
		if _, err := io.ReadAll(resp.Body); err != nil {
			t.Fatal(err)
		}
		wantEnd(t, ends, relay.Completed)
		if worst < 20*time.Millisecond {
			t.Logf("stream %d has no event later than %v", k, worst)
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the worst event of stream %d still came %v after it was sent", k, worst)
		}
	}
}
