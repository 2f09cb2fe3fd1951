package faults

import (
	bin "encoding/binary"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// engineProxy is a proxy in front of a simulated engine that hides every sign of a restart except
// the handles: it serves no metrics, refuses no connection, and keeps the event connection open
// with continuous sequence numbers.
type engineProxy struct {
	*sim.Engine
	URL        string
	Events     string
	restarting sync.RWMutex // write-locked while the engine restarts
}

func startEngineProxy(t *testing.T, e *sim.Engine) *engineProxy {
	t.Helper()
	c := &engineProxy{Engine: e}
	to, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	forward := &http.Transport{DisableKeepAlives: true}
	proxy := &httputil.ReverseProxy{Transport: forward, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.restarting.RLock()
		defer c.restarting.RUnlock()
		if r.URL.Path == "/metrics" || r.URL.Path == "/kv_event_sources" {
			http.NotFound(w, r)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	c.URL = front.URL
	c.Events = renumberEvents(t, e.KVEndpoints()[0])
	return c
}

func (c *engineProxy) restart(t *testing.T) {
	t.Helper()
	c.restarting.Lock()
	defer c.restarting.Unlock()
	id := c.EngineID()
	if err := c.Restart(); err != nil {
		t.Fatal(err)
	}
	if c.EngineID() == id {
		t.Fatal("the new life has the old one's id: this test shows nothing")
	}
}

// renumberEvents forwards the events of an endpoint with sequence numbers of its own, and returns
// the endpoint at which it publishes them.
func renumberEvents(t *testing.T, endpoint string) string {
	t.Helper()
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	in, err := ctx.NewSocket(zmq.SUB)
	if err == nil {
		in.SetRcvtimeo(20 * time.Millisecond)
		in.SetReconnectIvl(10 * time.Millisecond)
		err = in.Connect(endpoint)
	}
	if err == nil {
		err = in.SetSubscribe("")
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := ctx.NewSocket(zmq.PUB)
	if err == nil {
		out.SetLinger(0)
		err = out.Bind("tcp://127.0.0.1:*")
	}
	if err != nil {
		t.Fatal(err)
	}
	at, err := out.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer out.Close()
		defer in.Close()
		for next := uint64(0); ; {
			select {
			case <-stop:
				return
			default:
			}
			if m, err := in.RecvMessageBytes(0); err == nil && len(m) == 3 {
				out.SendMessage(m[0], bin.BigEndian.AppendUint64(nil, next), m[2])
				next++
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done; ctx.Term() })
	return at
}

// predictedTokens posts a prompt and returns how many of its tokens the router predicted to be
// cached on the chosen prefill rank.
func predictedTokens(t *testing.T, r *harness.Router, salt int, id string) int {
	t.Helper()
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":4}`, harness.PromptWords(60, salt)), "X-Request-Id", id), 200)
	cached := -1
	for _, d := range r.Outcome(t, id).Decisions {
		for _, c := range d.Shown {
			if d.Leg == "prefill" && c.Chosen {
				cached = c.Cached
			}
		}
	}
	if cached < 0 {
		t.Fatalf("%s: no prefill rank was chosen", id)
	}
	return cached
}

// TestEngineIDDetectsRestart: an engine restarts behind a proxy that hides the restart, and
// publishes no events afterwards. The router detects the restart by the engine id in the next
// handle, and predicts no cached blocks for the request after that.
func TestEngineIDDetectsRestart(t *testing.T) {
	t.Parallel()
	for _, pd := range []string{"nixl", "nixl-push", "mooncake"} {
		for _, events := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/events=%v", pd, events), func(t *testing.T) { testEngineIDDetectsRestart(t, pd, events) })
		}
	}
}

func testEngineIDDetectsRestart(t *testing.T, pd string, events bool) {
	p, d := startEngineProxy(t, harness.StartSim(t, harness.UsingPD(pd, "prefill"))), harness.StartSim(t, harness.UsingPD(pd, "decode"))
	w := config.Worker{ID: "p0", URL: p.URL, Role: worker.Prefill, KVEvents: []string{"off"}}
	if events {
		w.KVEvents = []string{p.Events}
	}
	if pd == "mooncake" {
		_, port := p.Bootstrap()
		w.Options = map[string][]string{"bootstrap_port": {fmt.Sprint(port)}}
	}
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = pd }, w, harness.SimWorker(d, worker.Decode, "d0"))
	rank := r.Fleet.View().Workers[1].Ranks[0]
	if rank.ID.Worker != "p0" {
		t.Fatalf("the second worker is %s", rank.ID.Worker)
	}
	n := 0
	request := func(salt int) int {
		n++
		return predictedTokens(t, r, salt, fmt.Sprintf("e-%d", n))
	}
	const still = 1000
	testwait.UntilWithin(t, 60*time.Second, "what the engine holds is predicted", func() bool { return request(still) > 0 })
	if events && (r.Index.CachedBlocks(rank.Slot) == 0 || worker.FeedState(rank.Feed.Load()) != worker.FeedLive) {
		// The hit may be a prediction from the request just sent: wait for the events.
		testwait.UntilWithin(t, 60*time.Second, "events are heard", func() bool { request(still + n); return r.Index.CachedBlocks(rank.Slot) > 0 })
	}
	restarts := `sluice_engine_restarts_total{evidence="engine_id"}`
	if got := r.Metric(restarts); got != 0 {
		t.Fatalf("%v restarts before there was one", got)
	}

	p.Fault(sim.Fault{Kind: sim.LoseEvents}) // the restarted engine publishes no events
	p.restart(t)
	if pd != "mooncake" {
		request(1) // another prompt, whose handle contains the engine id
	}
	testwait.UntilWithin(t, 60*time.Second, "the restart is seen", func() bool {
		if pd == "mooncake" && r.Metric(restarts) == 0 {
			// Decode receives the cached id of the engine before its restart, and fails; only
			// then does the router query the id again.
			harness.Post(t, r.URL+"/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":4}`, harness.PromptWords(60, 2)))
		}
		return r.Metric(restarts) == 1 && harness.AllInPools(r)
	})
	if cached := r.Index.CachedBlocks(rank.Slot); cached != 0 {
		t.Errorf("%d blocks of the life before are in the index", cached)
	}
	if got := request(still); got != 0 {
		t.Errorf("%d tokens of a prompt are believed to be held that only the life before has seen", got)
	}
	for salt := range 5 {
		request(salt) // without a change
	}
	if got := r.Metric(restarts); got != 1 {
		t.Errorf("%v restarts counted, want 1", got)
	}
	if !strings.Contains(r.Logs.String(), "engine id in hand-overs changed") {
		t.Error("the log does not say by what the restart was known")
	}
	harness.WantIdle(t, r, 20*time.Second, d)
}
