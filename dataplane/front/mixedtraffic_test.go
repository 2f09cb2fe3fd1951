package front

import (
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

// Many clients of every kind run at once, and afterwards all resources are released.
func TestMixedTraffic(t *testing.T) { withBothRelayModes(t, testMixedTraffic) }

func testMixedTraffic(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		if _, err := io.WriteString(nc, streamHead); err != nil {
			return false
		}
		for range rand.IntN(4) {
			if _, err := io.WriteString(nc, chunk(helloStream)); err != nil {
				return false
			}
			testwait.Pace(time.Duration(rand.IntN(500)) * time.Microsecond)
		}
		if rand.IntN(10) == 0 {
			return false // dies
		}
		_, err := io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return err == nil
	})
	var relays, ends atomic.Int64
	stream := relayTo(e, func() RelayHooks {
		relays.Add(1)
		return RelayHooks{Handler: streamHooks{end: func(relay.Result) { ends.Add(1) }}}
	})
	r := start(t, Options{RelayMode: by}, func(x Exchange) {
		switch {
		case x.Request().Endpoint.Kind == Chat:
			stream(x)
		case len(x.Request().Doc.Body) > 20_000:
			panic("large")
		default:
			x.OnClientGone(func() {})
			echo(x)
		}
	})
	requests := []string{
		chatPost(hello), chatPost(hello), chatPost(hello, "Connection: close"), post("/v1/embeddings", doc(5000)),
		post("/v1/embeddings", doc(30_000)), chatPost("nonsense"), chunkedHead + helloChunks, length("13, 13"),
		"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + strings.Repeat("x", 5000),
	}
	var wg sync.WaitGroup
	for range 24 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var c *client
			for range 40 {
				if c == nil {
					c = r.dial()
				}
				_, _ = io.WriteString(c, requests[rand.IntN(len(requests))])
				if rand.IntN(6) == 0 {
					testwait.Pace(time.Duration(rand.IntN(1000)) * time.Microsecond)
					_ = c.Close()
					c = nil
					continue
				}
				resp, err := http.ReadResponse(c.br, nil)
				if err != nil {
					t.Errorf("no answer: %v", err)
					return
				}
				_, err = io.Copy(io.Discard, resp.Body)
				if err != nil || resp.Close {
					_ = c.Close()
					c = nil
				}
			}
			if c != nil {
				_ = c.Close()
			}
		}()
	}
	wg.Wait()
	testwait.Until(t, "connections closed", func() bool { return r.server.conns.len() == 0 })
	if relays.Load() != ends.Load() || relays.Load() == 0 {
		t.Errorf("%d relays, %d ends", relays.Load(), ends.Load())
	}
	if n := r.server.budget.Used(); n != 0 {
		t.Errorf("%d bytes of the budget left", n)
	}
}
