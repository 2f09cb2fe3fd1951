package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// abortSlack is how late a cut may be seen on a loaded machine; the rule says
// 100 ms, the tests log what it took, and the front's hold it to that within a few tries.
const abortSlack = 2 * time.Second

// abortingClient is one request of a client that is going to leave.
type abortingClient struct {
	nc net.Conn
	br *bufio.Reader
}

// startRequest writes a request on a connection of its own and does not wait.
func startRequest(t *testing.T, r *testRouter, id, body string) *abortingClient {
	t.Helper()
	l := dialClient(t, r)
	l.send(id, body)
	return l
}

func dialClient(t *testing.T, r *testRouter) *abortingClient {
	t.Helper()
	nc, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	return &abortingClient{nc: nc, br: bufio.NewReader(nc)}
}

func (l *abortingClient) send(id, body string) { l.sendTo("/v1/chat/completions", id, body) }

func (l *abortingClient) sendTo(path, id, body string) {
	fmt.Fprintf(l.nc, "POST "+path+" HTTP/1.1\r\nHost: x\r\nX-Request-Id: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", id, len(body), body)
}

// wantClosed waits until somebody has called leave.
func (l *abortingClient) wantClosed(t *testing.T) {
	t.Helper()
	l.nc.SetReadDeadline(time.Now().Add(30 * time.Second))
	answer, err := io.ReadAll(l.br)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		l.nc.Close()
		t.Errorf("the client did not leave within 30 s; it was answered %.300q", answer)
	}
}

// event waits for the response head and the first event of its stream.
func (l *abortingClient) event(t *testing.T) {
	t.Helper()
	l.nc.SetReadDeadline(time.Now().Add(10 * time.Second))
	for {
		line, err := l.br.ReadString('\n')
		if err != nil {
			t.Fatalf("no event came: %v", err)
		}
		if strings.HasPrefix(line, "data: ") {
			return
		}
	}
}

// disconnect closes the connection, every other time by a reset.
func (l *abortingClient) disconnect() time.Time {
	if rand.IntN(2) == 0 {
		l.nc.(*net.TCPConn).SetLinger(0)
	}
	l.nc.Close()
	return time.Now()
}

// hangingHandler is an engine handler that waits until it is cut; it tells when a request
// has come, and when it was cut.
func hangingHandler() (http.HandlerFunc, chan time.Time, chan time.Time) {
	arrived, cancelled := make(chan time.Time, 100), make(chan time.Time, 100)
	return func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // only then net/http watches the connection
		arrived <- time.Now()
		<-r.Context().Done()
		cancelled <- time.Now()
	}, arrived, cancelled
}

func receiveTime(t *testing.T, c chan time.Time, what string) time.Time {
	t.Helper()
	select {
	case at := <-c:
		return at
	case <-time.After(10 * time.Second):
		t.Fatalf("not within 10s: %s", what)
	}
	return time.Time{}
}

func wantPrompt(t *testing.T, what string, elapsed time.Duration) {
	t.Helper()
	t.Logf("%s %v after the client left", what, elapsed.Round(100*time.Microsecond))
	if elapsed > abortSlack {
		t.Errorf("%s only %v after the client left; want 100ms", what, elapsed)
	}
}

// wantClientGone waits for a request's record to say that its client left.
func wantClientGone(t *testing.T, r *testRouter, id string) {
	t.Helper()
	if o := r.outcome(t, id).Outcome; o.Reason != "client_gone" {
		t.Errorf("%s: outcome %+v, want client_gone", id, o)
	}
}

const endlessChat = `{"model":"sim","messages":[{"role":"user","content":"tell me all of it"}],"max_tokens":20000,"ignore_eos":true%s}`

func TestClientAbortsWhileWaitingForPool(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, func(c *config.Config) { c.Timeouts.PoolWait, c.PD.PlainDecode = time.Minute, false }, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	p.Crash()
	eventually(t, 5*time.Second, "p0 is out", func() bool { return r.state("p0") == worker.Unhealthy })
	l := startRequest(t, r, "waits", chat(""))
	eventually(t, 5*time.Second, "the request waits", func() bool { return r.metric("sluice_requests_accepted_total") == 1 })
	time.Sleep(50 * time.Millisecond) // it may be on its way to the wait
	abortedAt := l.disconnect()
	o := r.outcome(t, "waits").Outcome
	wantPrompt(t, "the wait ended", time.Since(abortedAt))
	if o.Reason != "client_gone" {
		t.Errorf("outcome %+v", o)
	}
	eventually(t, 5*time.Second, "its line", func() bool {
		return strings.Contains(r.logs.String(), `msg="request refused" reason=client_gone status=499 request_id=waits client=127.0.0.1 endpoint=/v1/chat/completions`)
	})
	if n := len(generateRequests(d)); n != 0 {
		t.Errorf("%d decodes", n)
	}
}

func TestClientAbortsDuringTokenize(t *testing.T) {
	e := startScripted(t, replyHandler(200, "{}"))
	var arrived, cancelled chan time.Time
	e.tokenize, arrived, cancelled = hangingHandler()
	r := startRouter(t, func(c *config.Config) { c.Tokens.Timeout = time.Minute }, e.worker(worker.Aggregated, "w0"))
	l := startRequest(t, r, "tok", chat(""))
	receiveTime(t, arrived, "tokenize was asked")
	abortedAt := l.disconnect()
	wantPrompt(t, "tokenize was cut", receiveTime(t, cancelled, "tokenize is cut").Sub(abortedAt))
	wantClientGone(t, r, "tok")
	if n := e.requests(); n != 0 {
		t.Errorf("the engine was sent %d requests for a client that had left", n)
	}
}

func TestClientAbortsDuringPrefill(t *testing.T) {
	for _, stream := range []string{"", `,"stream":true`} {
		infer, arrived, cancelled := hangingHandler()
		p, d := startScripted(t, infer), startSim(t, simRole("decode"))
		r := startRouter(t, nil, p.worker(worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
		l := startRequest(t, r, "pre", chat(stream))
		receiveTime(t, arrived, "prefill runs")
		abortedAt := l.disconnect()
		// It may be answering: then its answer names blocks that only the router can free.
		took := receiveTime(t, cancelled, "prefill is cut").Sub(abortedAt)
		t.Logf("prefill was cut %v after the client left", took.Round(time.Millisecond))
		if took < 900*time.Millisecond || took > time.Second+abortSlack {
			t.Errorf("prefill was cut %v after the client left, want 1 s", took)
		}
		wantClientGone(t, r, "pre")
		if n := len(generateRequests(d)); n != 0 || p.requests() != 1 {
			t.Errorf("%d prefills, %d decodes for a client that had left", p.requests(), n)
		}
		wantIdle(t, r, 5*time.Second, d)
		if s := r.state("p0"); s != worker.Ready {
			t.Errorf("p0 is %v: a cut of our own is no failure", s)
		}
	}
}

// Between the legs: the client leaves at the very moment prefill answers, a
// little before or after. Whatever the router was doing, it has the blocks given
// back, and no lease is let run out.
func TestClientAbortsBetweenLegs(t *testing.T) {
	const lease = 5 * time.Second
	p := startSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", lease })
	d := startSim(t, func(o *sim.Options) { o.Role, o.Lease = "decode", lease })
	var client atomic.Pointer[abortingClient]
	var delay atomic.Int64
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		out, _ := http.NewRequestWithContext(req.Context(), req.Method, p.URL()+req.URL.Path, bytes.NewReader(body))
		out.Header = req.Header.Clone()
		resp, err := http.DefaultClient.Do(out)
		if err != nil {
			return // cut
		}
		defer resp.Body.Close()
		answer, _ := io.ReadAll(resp.Body)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
		w.WriteHeader(resp.StatusCode)
		l := client.Load()
		if req.Method != "POST" || req.URL.Path == "/tokenize" || l == nil {
			w.Write(answer)
			return
		}
		if wait := time.Duration(delay.Load()); wait < 0 {
			l.disconnect()
			time.Sleep(-wait)
			w.Write(answer)
		} else {
			w.Write(answer)
			w.(http.Flusher).Flush()
			time.Sleep(wait)
			l.disconnect()
		}
	}))
	defer front.Close()
	defer front.CloseClientConnections()
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	r := startRouter(t, func(c *config.Config) {
		c.PD.Lease, c.PD.AbortDelay, c.PD.AbandonedDecode = lease, 100*time.Millisecond, 0
		c.Health.FailAfter, c.Health.BreakAfter = 1000, 1000 // a busy machine takes nobody out
	},
		config.Worker{ID: "p0", URL: front.URL, Role: worker.Prefill, KVEvents: []string{"off"}}, simWorker(d, worker.Decode, "d0"))
	// Whether one leaves between the legs is chance: until some did, and bounded.
	for i := 0; i < 40 || i < 400 && r.fallbacks("abandoned_handle") == 0; i++ {
		delay.Store(int64(rand.IntN(1500)-700) * int64(time.Microsecond))
		id := fmt.Sprint("between-", i)
		l := dialClient(t, r)
		client.Store(l)
		l.send(id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0)))
		l.wantClosed(t)
		wantClientGone(t, r, id)
	}
	wantIdle(t, r, lease+time.Second, p, d)
	if s := d.Stats().Sum(); s.GarbageReads != 0 || s.IncompleteHandles != 0 {
		t.Errorf("decode: %d garbage reads, %d incomplete handles", s.GarbageReads, s.IncompleteHandles)
	}
	if r.fallbacks("abandoned_handle") == 0 {
		t.Error("nobody left between the legs: the test shows nothing")
	}
	if s := p.Stats().Sum(); s.LeasesExpired != 0 {
		t.Errorf("%d leases were let run out, %d given back", s.LeasesExpired, s.LeasesReleased)
	}
}

// A client that leaves between the legs of a message with a budget of thinking: decode would
// refuse one token with such a budget, and the blocks would stay.
func TestReasoningClientAbortsBetweenLegs(t *testing.T) {
	for _, name := range []string{"nixl", "nixl-push"} {
		t.Run(name, func(t *testing.T) {
			engine := func(role string) *sim.Engine {
				return startSim(t, func(o *sim.Options) { o.Role, o.Lease, o.AbortTimeout, o.PD = role, time.Hour, time.Hour, name })
			}
			p, d := engine("prefill"), engine("decode")
			var client atomic.Pointer[abortingClient]
			front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				body, _ := io.ReadAll(req.Body)
				out, _ := http.NewRequest(req.Method, p.URL()+req.URL.Path, bytes.NewReader(body))
				out.Header = req.Header.Clone()
				resp, err := http.DefaultClient.Do(out)
				if err != nil {
					return
				}
				defer resp.Body.Close()
				answer, _ := io.ReadAll(resp.Body)
				if l := client.Load(); l != nil && req.Method == "POST" && req.URL.Path == "/v1/messages" {
					l.disconnect()
					time.Sleep(rand.N(500 * time.Microsecond))
				}
				w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
				w.WriteHeader(resp.StatusCode)
				w.Write(answer)
			}))
			defer front.Close()
			defer front.CloseClientConnections()
			d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
			r := startRouter(t, func(c *config.Config) {
				c.PD.Family, c.PD.AbortDelay, c.PD.AbandonedDecode = name, 100*time.Millisecond, 0
				c.Health.FailAfter, c.Health.BreakAfter = 1000, 1000 // a busy machine takes nobody out
			},
				config.Worker{ID: "p0", URL: front.URL, Role: worker.Prefill, KVEvents: []string{"off"}}, simWorker(d, worker.Decode, "d0"))
			// As above; of nixl-push no answer tells that it happened.
			for i := 0; i < 10 || i < 400 && name == "nixl" && r.fallbacks("abandoned_handle") == 0; i++ {
				id := fmt.Sprint("thinks-", i)
				l := dialClient(t, r)
				client.Store(l)
				l.sendTo("/v1/messages", id, fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"think of %d"}],"max_tokens":20000,"ignore_eos":true,"stream":%v,"thinking":{"type":"enabled","budget_tokens":1024}}`, i, i%2 == 0))
				l.wantClosed(t)
				wantClientGone(t, r, id)
			}
			wantIdle(t, r, 30*time.Second, p, d)
			if n := r.fallbacks("abandoned_handle"); name == "nixl" && n == 0 {
				t.Error("nobody left between the legs: the test shows nothing")
			}
			if s := p.Stats().Sum(); s.LeasesExpired != 0 {
				t.Errorf("%d leases ran out", s.LeasesExpired)
			}
			if n := d.Stats().Sum().GeneratedTokens; n > 2000 {
				t.Errorf("decode made %d tokens for nobody", n)
			}
			for _, rec := range generateRequests(d) {
				if got := member(t, rec.Body, "max_tokens"); got != "20000" {
					t.Errorf("decode was asked for %s tokens, with the budget", got)
				}
			}
		})
	}
}

// A streamed decode is not cut before its response head: until then the engine
// may not know the request, and prefill's blocks would stay pinned.
func TestStreamIsNotAbortedBeforeHead(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, nil, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	for i := range 5 {
		d.Fault(sim.Fault{Kind: sim.Stall, Leg: "decode", Delay: 150 * time.Millisecond, N: 1})
		id := fmt.Sprint("head-", i)
		l := startRequest(t, r, id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d,"stream":true`, i)))
		eventually(t, 5*time.Second, "decode was sent", func() bool { return len(generateRequests(d)) == i+1 })
		l.disconnect()
		wantClientGone(t, r, id)
	}
	wantIdle(t, r, 5*time.Second, p, d) // the lease is 30 s: only a release frees the blocks so soon
	if s := d.Stats(); s.AbortedEarly != 0 {
		t.Errorf("%d decodes were cut before the engine knew them", s.AbortedEarly)
	}
	if s := p.Stats().Sum(); s.LeasesExpired != 0 || s.LeasesReleased != 5 {
		t.Errorf("%d leases expired, %d freed; want 0, 5", s.LeasesExpired, s.LeasesReleased)
	}
}

// An engine that never sends the head of a stream holds the leg no longer than
// the lease.
func TestStreamWithoutHeadIsAbortedAtLeaseEnd(t *testing.T) {
	infer, arrived, cancelled := hangingHandler()
	p, d := startSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", 500*time.Millisecond }), startScripted(t, infer)
	r := startRouter(t, func(c *config.Config) { c.PD.Lease, c.PD.LeaseMargin = time.Second, 300*time.Millisecond }, simWorker(p, worker.Prefill, "p0"), d.worker(worker.Decode, "d0"))
	began := time.Now() // a busy machine may see it run long after it was sent
	l := startRequest(t, r, "nohead", chat(`,"stream":true`))
	receiveTime(t, arrived, "decode runs")
	l.disconnect()
	at := receiveTime(t, cancelled, "decode is cut")
	if after := at.Sub(began); after < time.Second || after > time.Second+abortSlack {
		t.Errorf("decode was cut %v after it was sent, want with the lease of 1 s", after)
	}
	wantClientGone(t, r, "nohead")
	wantIdle(t, r, 5*time.Second, p)
}

func TestClientAbortsStream(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, nil, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	for i := range 5 {
		id := fmt.Sprint("stream-", i)
		l := startRequest(t, r, id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d,"stream":true`, i)))
		l.event(t)
		abortedAt := l.disconnect()
		eventually(t, 5*time.Second, "decode is cut", func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting == 0 })
		wantPrompt(t, "decode ended", time.Since(abortedAt))
		wantClientGone(t, r, id)
	}
	wantIdle(t, r, 5*time.Second, p, d)
	if n := d.Stats().Sum().Aborted; n != 5 {
		t.Errorf("%d aborts on decode, want 5", n)
	}
	if n := r.metric(`sluice_streams_total{cause="client_gone"}`); n != 5 {
		t.Errorf("%v streams counted as client_gone, want 5", n)
	}
}

// A decode that is not streamed shows nothing until its end: it is cut only once
// it has run for pd.abort_delay, and its engine has answered a later question.
func TestNonStreamingDecodeIsAbortedAfterDelay(t *testing.T) {
	const after = 400 * time.Millisecond
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, func(c *config.Config) { c.PD.AbortDelay, c.PD.AbandonedDecode = after, 0 }, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	running := func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting > 0 }

	began := time.Now() // a busy machine may see it run long after it was sent
	l := startRequest(t, r, "early", fmt.Sprintf(endlessChat, ""))
	eventually(t, 5*time.Second, "decode runs", running)
	l.disconnect()
	eventually(t, 5*time.Second, "decode is cut", func() bool { return !running() })
	ran := time.Since(began)
	t.Logf("a decode left at once was cut after %v (pd.abort_delay %v)", ran.Round(time.Millisecond), after)
	if ran < after || ran > after+abortSlack {
		t.Errorf("cut after %v, want %v", ran, after)
	}
	wantClientGone(t, r, "early")

	l = startRequest(t, r, "late", fmt.Sprintf(endlessChat, `,"seed":1`))
	eventually(t, 5*time.Second, "decode runs", running)
	time.Sleep(after + 50*time.Millisecond)
	abortedAt := l.disconnect()
	eventually(t, 5*time.Second, "decode is cut", func() bool { return !running() })
	wantPrompt(t, "decode ended", time.Since(abortedAt))
	wantClientGone(t, r, "late")
	wantIdle(t, r, 5*time.Second, p, d)
	if n := p.Stats().Sum().LeasesExpired; n != 0 {
		t.Errorf("%d leases expired", n)
	}
}

// An engine that stands still is not taken to have admitted anything: its decodes are
// cut when it goes on, however late that is.
func TestSuspendedEngineLegIsNotAborted(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	var suspended atomic.Bool
	resume := make(chan struct{})
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		if suspended.Load() {
			<-resume
		}
		out, _ := http.NewRequestWithContext(req.Context(), req.Method, d.URL()+req.URL.Path, bytes.NewReader(body))
		out.Header = req.Header.Clone()
		resp, err := http.DefaultClient.Do(out)
		if err != nil {
			return
		}
		defer resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
		io.Copy(w, resp.Body)
	}))
	defer front.Close()
	defer front.CloseClientConnections()
	const after = 50 * time.Millisecond
	r := startRouter(t, func(c *config.Config) {
		c.PD.AbortDelay = after
		c.Health.Timeout, c.Health.FailAfter = time.Minute, 1000
	}, simWorker(p, worker.Prefill, "p0"), config.Worker{ID: "d0", URL: front.URL, Role: worker.Decode, KVEvents: []string{"off"}})
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	suspended.Store(true)
	l := startRequest(t, r, "stands", fmt.Sprintf(endlessChat, ""))
	eventually(t, 20*time.Second, "prefill is done", func() bool { return p.Stats().Sum().Leases == 1 })
	l.disconnect()
	time.Sleep(10 * after)
	if rec, ok := r.Scheduler.Explain("stands"); ok && bytes.Contains(rec, []byte("client_gone")) {
		t.Errorf("decode was cut before its engine had answered anything: %s", rec)
	}
	suspended.Store(false)
	close(resume)
	wantClientGone(t, r, "stands")
	wantIdle(t, r, 20*time.Second, p, d) // the lease is 30 s: only a release frees the blocks so soon
	if s := p.Stats().Sum(); s.LeasesExpired != 0 || s.LeasesReleased != 1 {
		t.Errorf("%d leases expired, %d freed; want 0, 1", s.LeasesExpired, s.LeasesReleased)
	}
}

// Without a handle nothing is pinned elsewhere: the leg is cut at once.
func TestAggregatedLegIsAbortedImmediately(t *testing.T) {
	for _, stream := range []string{"", `,"stream":true`} {
		infer, arrived, cancelled := hangingHandler()
		e := startScripted(t, infer)
		r := startRouter(t, nil, e.worker(worker.Aggregated, "w0"))
		l := startRequest(t, r, "agg", chat(stream))
		receiveTime(t, arrived, "the leg runs")
		abortedAt := l.disconnect()
		wantPrompt(t, "the leg was cut", receiveTime(t, cancelled, "the leg is cut").Sub(abortedAt))
		wantClientGone(t, r, "agg")
		eventually(t, 5*time.Second, "nothing is booked", func() bool { return r.reservedLoad() == "" })
	}
}

// TestAbortStorm: clients that leave at any moment leave nothing behind.
func TestAbortStorm(t *testing.T) {
	n := 300
	if os.Getenv("SLUICE_SOAK") != "" {
		n = 10_000
	}
	const lease = 700 * time.Millisecond
	cost := sim.Cost{Step: 2 * time.Millisecond, Handshake: 5 * time.Millisecond, Transfer: time.Millisecond}
	engine := func(r string) *sim.Engine {
		return startSim(t, func(o *sim.Options) { o.Role, o.Lease, o.Speed, o.Cost, o.Records = r, lease, 1, cost, -1 })
	}
	p0, p1, d0, d1 := engine("prefill"), engine("prefill"), engine("decode"), engine("decode")
	all := []*sim.Engine{p0, p1, d0, d1}
	r := startRouter(t, func(c *config.Config) {
		c.PD.Lease, c.PD.LeaseMargin, c.PD.AbortDelay = time.Second, 500*time.Millisecond, 50*time.Millisecond
	},
		simWorker(p0, worker.Prefill, "p0"), simWorker(p1, worker.Prefill, "p1"), simWorker(d0, worker.Decode, "d0"), simWorker(d1, worker.Decode, "d1"))
	// One of each first, so that what stays for good is there.
	for i := range 16 {
		wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0))), 200)
	}
	dropIdle()
	wantIdle(t, r, 10*time.Second, all...)
	time.Sleep(50 * time.Millisecond) // answered connections are being put away
	before := moduleGoroutines()

	var wg sync.WaitGroup
	var whole, aborted atomic.Int64
	work := make(chan int)
	span := 3 * unloadedLatency(t, r)
	for range 16 {
		wg.Go(func() {
			for i := range work {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(span))))
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, i%40, prompt, 1+rand.IntN(20), rand.IntN(2) == 0)
				if a, err := tryPost(ctx, r.URL+"/v1/chat/completions", body); err == nil {
					whole.Add(1)
					if a.Status != 200 {
						t.Errorf("status %d: %s", a.Status, a.Body)
					}
				} else {
					aborted.Add(1)
				}
				cancel()
			}
		})
	}
	few := func() bool { return aborted.Load() < int64(n)/10 || whole.Load() == 0 }
	until := time.Now().Add(time.Minute)
	for i := 0; i < n || few() && time.Now().Before(until); i++ {
		work <- i
	}
	close(work)
	wg.Wait()
	ended := time.Now()
	t.Logf("%d left, %d whole", aborted.Load(), whole.Load())
	if few() {
		t.Errorf("%d left, %d whole: the test shows little", aborted.Load(), whole.Load())
	}
	wantIdle(t, r, lease+time.Second+abortSlack, all...)
	t.Logf("all was quiet %v after the last", time.Since(ended).Round(time.Millisecond))
	for i, e := range all {
		s := e.Stats().Sum()
		if s.GarbageReads != 0 || s.LateNotifications != 0 || s.IncompleteHandles != 0 || s.BlocksFree != s.BlocksTotal {
			t.Errorf("engine %d: %+v", i, s)
		}
	}
	for _, id := range []string{"p0", "p1", "d0", "d1"} {
		if s := r.state(id); s != worker.Ready {
			t.Errorf("%s is %v", id, s)
		}
	}
	dropIdle()
	eventually(t, 10*time.Second, "goroutines are back", func() bool { return moduleGoroutines() <= before })
	wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat("")), 200)
}

// moduleGoroutines counts those that run code of the router; idle workers of
// fasthttp and the simulated engines' connections come and go by themselves.
func moduleGoroutines() (n int) {
	buf := make([]byte, 16<<20)
	for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(g, "sluice/router/") || strings.Contains(g, "sluice/dataplane/") {
			n++
		}
	}
	return n
}
