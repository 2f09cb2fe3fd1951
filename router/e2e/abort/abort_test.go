package abort

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

const endlessChat = `{"model":"sim","messages":[{"role":"user","content":"tell me all of it"}],"max_tokens":20000,"ignore_eos":true%s}`

func TestClientAbortsWhileWaitingForPool(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.PoolWait, c.PD.DecodeOnlyFallback = time.Minute, false }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	p.Crash()
	testwait.UntilWithin(t, 5*time.Second, "p0 is out", func() bool { return r.State("p0") == worker.Unhealthy })
	l := harness.StartRequest(t, r, "waits", harness.Chat(""))
	testwait.UntilWithin(t, 5*time.Second, "the request waits", func() bool { return r.Metric("sluice_pool_waiters") == 1 })
	abortedAt := l.Disconnect()
	o := r.Outcome(t, "waits").Outcome
	harness.WantPrompt(t, "the wait ended", time.Since(abortedAt))
	if o.Reason != "client_gone" {
		t.Errorf("outcome %+v", o)
	}
	testwait.UntilWithin(t, 5*time.Second, "its line", func() bool {
		return strings.Contains(r.Logs.String(), `msg="request refused" reason=client_gone status=499 request=waits client=127.0.0.1 endpoint=/v1/chat/completions`)
	})
	if n := len(harness.GenerateRequests(d)); n != 0 {
		t.Errorf("%d decodes", n)
	}
}

func TestClientAbortsDuringTokenize(t *testing.T) {
	e := harness.StartScripted(t, harness.ReplyHandler(200, "{}"))
	var arrived, cancelled chan time.Time
	e.Tokenize, arrived, cancelled = harness.HangingHandler()
	r := harness.StartRouter(t, func(c *config.Config) { c.Tokens.Timeout = time.Minute }, e.Worker(worker.Aggregated, "w0"))
	l := harness.StartRequest(t, r, "tok", harness.Chat(""))
	harness.ReceiveTime(t, arrived, "tokenize was asked")
	abortedAt := l.Disconnect()
	harness.WantPrompt(t, "tokenize was cut", harness.ReceiveTime(t, cancelled, "tokenize is cut").Sub(abortedAt))
	harness.WantClientGone(t, r, "tok")
	if n := e.Requests(); n != 0 {
		t.Errorf("the engine was sent %d requests for a client that had left", n)
	}
}

func TestClientAbortsDuringPrefill(t *testing.T) {
	t.Parallel()
	for _, stream := range []string{"", `,"stream":true`} {
		infer, arrived, cancelled := harness.HangingHandler()
		p, d := harness.StartScripted(t, infer), harness.StartSim(t, harness.SimRole("decode"))
		r := harness.StartRouter(t, nil, p.Worker(worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
		l := harness.StartRequest(t, r, "pre", harness.Chat(stream))
		harness.ReceiveTime(t, arrived, "prefill runs")
		abortedAt := l.Disconnect()
		// Prefill may be answering; its response then names blocks that only the router can free.
		took := harness.ReceiveTime(t, cancelled, "prefill is cut").Sub(abortedAt)
		t.Logf("prefill was cut %v after the client left", took.Round(time.Millisecond))
		if took < 900*time.Millisecond || took > time.Second+harness.AbortSlack {
			t.Errorf("prefill was cut %v after the client left, want 1 s", took)
		}
		harness.WantClientGone(t, r, "pre")
		if n := len(harness.GenerateRequests(d)); n != 0 || p.Requests() != 1 {
			t.Errorf("%d prefills, %d decodes for a client that had left", p.Requests(), n)
		}
		harness.WantIdle(t, r, 5*time.Second, d)
		if s := r.State("p0"); s != worker.Ready {
			t.Errorf("p0 is %v: a cut of our own is not a failure", s)
		}
	}
}

// TestClientAbortsBetweenLegs: the client leaves at the moment at which prefill answers, or
// shortly before or after. Whatever its state, the router has the blocks freed, and no lease
// expires.
func TestClientAbortsBetweenLegs(t *testing.T) {
	t.Parallel()
	const lease = 5 * time.Second
	p := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", lease })
	d := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease = "decode", lease })
	var client atomic.Pointer[harness.AbortingClient]
	var delay atomic.Int64
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		out, _ := http.NewRequestWithContext(req.Context(), req.Method, p.URL()+req.URL.Path, bytes.NewReader(body))
		out.Header = req.Header.Clone()
		resp, err := http.DefaultClient.Do(out)
		if err != nil {
			return // cancelled
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
			l.Disconnect()
			testwait.Pace(-wait)
			w.Write(answer)
		} else {
			w.Write(answer)
			w.(http.Flusher).Flush()
			testwait.Pace(wait)
			l.Disconnect()
		}
	}))
	defer front.Close()
	defer front.CloseClientConnections()
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.Lease, c.PD.AbortDelay, c.PD.AbandonedDecodeTimeout = lease, 100*time.Millisecond, 0
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000 // keep workers in the pool on a busy machine
	},
		config.Worker{ID: "p0", URL: front.URL, Role: worker.Prefill, KVEvents: []string{"off"}}, harness.SimWorker(d, worker.Decode, "d0"))
	// Whether a client leaves between the legs is random: repeat until one did, with a bound.
	for i := 0; i < 40 || i < 400 && r.Fallbacks("abandoned_handle") == 0; i++ {
		delay.Store(int64(rand.IntN(1500)-700) * int64(time.Microsecond))
		id := fmt.Sprint("between-", i)
		l := harness.DialClient(t, r)
		client.Store(l)
		l.Send(id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0)))
		l.WantClosed(t)
		harness.WantClientGone(t, r, id)
	}
	harness.WantIdle(t, r, lease+time.Second, p, d)
	if s := d.Stats().Sum(); s.GarbageReads != 0 || s.IncompleteHandles != 0 {
		t.Errorf("decode: %d garbage reads, %d incomplete handles", s.GarbageReads, s.IncompleteHandles)
	}
	if r.Fallbacks("abandoned_handle") == 0 {
		t.Error("nobody left between the legs: the test shows nothing")
	}
	if s := p.Stats().Sum(); s.LeasesExpired != 0 {
		t.Errorf("%d leases were let run out, %d given back", s.LeasesExpired, s.LeasesReleased)
	}
}

// TestReasoningClientAbortsBetweenLegs: the client leaves between the legs of an Anthropic message
// with a thinking budget. To free the blocks, the router sends a decode for one token; the engine
// would refuse such a limit with a thinking budget, and the blocks would stay allocated.
func TestReasoningClientAbortsBetweenLegs(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"nixl", "nixl-push"} {
		t.Run(name, func(t *testing.T) {
			engine := func(role string) *sim.Engine {
				return harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease, o.AbortTimeout, o.PD = role, time.Hour, time.Hour, name })
			}
			p, d := engine("prefill"), engine("decode")
			var client atomic.Pointer[harness.AbortingClient]
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
					l.Disconnect()
					testwait.Pace(rand.N(500 * time.Microsecond))
				}
				w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
				w.WriteHeader(resp.StatusCode)
				w.Write(answer)
			}))
			defer front.Close()
			defer front.CloseClientConnections()
			d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
			r := harness.StartRouter(t, func(c *config.Config) {
				c.PD.Family, c.PD.AbortDelay, c.PD.AbandonedDecodeTimeout = name, 100*time.Millisecond, 0
				c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000 // keep workers in the pool on a busy machine
			},
				config.Worker{ID: "p0", URL: front.URL, Role: worker.Prefill, KVEvents: []string{"off"}}, harness.SimWorker(d, worker.Decode, "d0"))
			// As above. With nixl-push no response shows that it happened.
			for i := 0; i < 10 || i < 400 && name == "nixl" && r.Fallbacks("abandoned_handle") == 0; i++ {
				id := fmt.Sprint("thinks-", i)
				l := harness.DialClient(t, r)
				client.Store(l)
				l.SendTo("/v1/messages", id, fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"think of %d"}],"max_tokens":20000,"ignore_eos":true,"stream":%v,"thinking":{"type":"enabled","budget_tokens":1024}}`, i, i%2 == 0))
				l.WantClosed(t)
				harness.WantClientGone(t, r, id)
			}
			harness.WantIdle(t, r, 30*time.Second, p, d)
			if n := r.Fallbacks("abandoned_handle"); name == "nixl" && n == 0 {
				t.Error("nobody left between the legs: the test shows nothing")
			}
			if s := p.Stats().Sum(); s.LeasesExpired != 0 {
				t.Errorf("%d leases ran out", s.LeasesExpired)
			}
			if n := d.Stats().Sum().GeneratedTokens; n > 2000 {
				t.Errorf("decode made %d tokens for nobody", n)
			}
			for _, rec := range harness.GenerateRequests(d) {
				if got := harness.Member(t, rec.Body, "max_tokens"); got != "20000" {
					t.Errorf("decode was asked for %s tokens, with the budget", got)
				}
			}
		})
	}
}

// TestStreamIsNotAbortedBeforeHead: a streamed decode is not cancelled before its response head.
// Until then the engine may not know the request, and prefill's blocks would stay allocated.
func TestStreamIsNotAbortedBeforeHead(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for i := range 5 {
		d.Fault(sim.Fault{Kind: sim.Stall, Leg: "decode", Delay: 150 * time.Millisecond, N: 1})
		id := fmt.Sprint("head-", i)
		l := harness.StartRequest(t, r, id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d,"stream":true`, i)))
		testwait.UntilWithin(t, 5*time.Second, "decode was sent", func() bool { return len(harness.GenerateRequests(d)) == i+1 })
		l.Disconnect()
		harness.WantClientGone(t, r, id)
	}
	harness.WantIdle(t, r, 5*time.Second, p, d) // the lease is 30 s, so only a release frees the blocks this early
	if s := d.Stats(); s.AbortedEarly != 0 {
		t.Errorf("%d decodes were cut before the engine knew them", s.AbortedEarly)
	}
	if s := p.Stats().Sum(); s.LeasesExpired != 0 || s.LeasesReleased != 5 {
		t.Errorf("%d leases expired, %d freed; want 0, 5", s.LeasesExpired, s.LeasesReleased)
	}
}

// TestStreamWithoutHeadIsAbortedAtLeaseEnd: if an engine never sends the head of a stream, the
// router cancels the leg when the lease ends.
func TestStreamWithoutHeadIsAbortedAtLeaseEnd(t *testing.T) {
	t.Parallel()
	infer, arrived, cancelled := harness.HangingHandler()
	p, d := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", 500*time.Millisecond }), harness.StartScripted(t, infer)
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Lease, c.PD.LeaseMargin = time.Second, 300*time.Millisecond }, harness.SimWorker(p, worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
	began := time.Now() // a busy machine may run the request long after it was sent
	l := harness.StartRequest(t, r, "nohead", harness.Chat(`,"stream":true`))
	harness.ReceiveTime(t, arrived, "decode runs")
	l.Disconnect()
	at := harness.ReceiveTime(t, cancelled, "decode is cut")
	if after := at.Sub(began); after < time.Second || after > time.Second+harness.AbortSlack {
		t.Errorf("decode was cut %v after it was sent, want with the lease of 1 s", after)
	}
	harness.WantClientGone(t, r, "nohead")
	harness.WantIdle(t, r, 5*time.Second, p)
}

func TestClientAbortsStream(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	for i := range 5 {
		id := fmt.Sprint("stream-", i)
		l := harness.StartRequest(t, r, id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d,"stream":true`, i)))
		l.Event(t)
		abortedAt := l.Disconnect()
		testwait.UntilWithin(t, 5*time.Second, "decode is cut", func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting == 0 })
		harness.WantPrompt(t, "decode ended", time.Since(abortedAt))
		harness.WantClientGone(t, r, id)
	}
	harness.WantIdle(t, r, 5*time.Second, p, d)
	if n := d.Stats().Sum().Aborted; n != 5 {
		t.Errorf("%d aborts on decode, want 5", n)
	}
	if n := r.Metric(`sluice_streams_total{cause="client_gone"}`); n != 5 {
		t.Errorf("%v streams counted as client_gone, want 5", n)
	}
}

// TestNonStreamingDecodeIsAbortedAfterDelay: a decode that is not streamed sends nothing until its
// end. The router cancels it once it has run for pd.abort_delay and its engine has answered a
// later probe.
func TestNonStreamingDecodeIsAbortedAfterDelay(t *testing.T) {
	const after = 400 * time.Millisecond
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.AbortDelay, c.PD.AbandonedDecodeTimeout = after, 0 }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	running := func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting > 0 }

	began := time.Now() // a busy machine may run the request long after it was sent
	l := harness.StartRequest(t, r, "early", fmt.Sprintf(endlessChat, ""))
	testwait.UntilWithin(t, 5*time.Second, "decode runs", running)
	l.Disconnect()
	testwait.UntilWithin(t, 5*time.Second, "decode is cut", func() bool { return !running() })
	ran := time.Since(began)
	t.Logf("a decode left at once was cut after %v (pd.abort_delay %v)", ran.Round(time.Millisecond), after)
	if ran < after || ran > after+harness.AbortSlack {
		t.Errorf("cut after %v, want %v", ran, after)
	}
	harness.WantClientGone(t, r, "early")

	l = harness.StartRequest(t, r, "late", fmt.Sprintf(endlessChat, `,"seed":1`))
	testwait.UntilWithin(t, 5*time.Second, "decode runs", running)
	testwait.Holds(t, after+50*time.Millisecond, "decode runs", running)
	abortedAt := l.Disconnect()
	testwait.UntilWithin(t, 5*time.Second, "decode is cut", func() bool { return !running() })
	harness.WantPrompt(t, "decode ended", time.Since(abortedAt))
	harness.WantClientGone(t, r, "late")
	harness.WantIdle(t, r, 5*time.Second, p, d)
	if n := p.Stats().Sum().LeasesExpired; n != 0 {
		t.Errorf("%d leases expired", n)
	}
}

// TestSuspendedEngineLegIsNotAborted: the router does not assume that a suspended engine has
// admitted a request. It cancels the engine's decodes once the engine runs again, however late.
func TestSuspendedEngineLegIsNotAborted(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
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
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.AbortDelay = after
		c.Health.Timeout, c.Health.UnhealthyThreshold = time.Minute, 1000
	}, harness.SimWorker(p, worker.Prefill, "p0"), config.Worker{ID: "d0", URL: front.URL, Role: worker.Decode, KVEvents: []string{"off"}})
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	suspended.Store(true)
	l := harness.StartRequest(t, r, "stands", fmt.Sprintf(endlessChat, ""))
	testwait.UntilWithin(t, 20*time.Second, "prefill is done", func() bool { return p.Stats().Sum().Leases == 1 })
	l.Disconnect()
	testwait.Holds(t, 10*after, "decode is not cut before its engine has answered anything", func() bool {
		rec, ok := r.Scheduler.Explain("stands")
		return !ok || !bytes.Contains(rec, []byte("client_gone"))
	})
	suspended.Store(false)
	close(resume)
	harness.WantClientGone(t, r, "stands")
	harness.WantIdle(t, r, 20*time.Second, p, d) // the lease is 30 s, so only a release frees the blocks this early
	if s := p.Stats().Sum(); s.LeasesExpired != 0 || s.LeasesReleased != 1 {
		t.Errorf("%d leases expired, %d freed; want 0, 1", s.LeasesExpired, s.LeasesReleased)
	}
}

// TestAggregatedLegIsAbortedImmediately: without a handle no other engine holds blocks, so the
// router cancels the leg at once.
func TestAggregatedLegIsAbortedImmediately(t *testing.T) {
	for _, stream := range []string{"", `,"stream":true`} {
		infer, arrived, cancelled := harness.HangingHandler()
		e := harness.StartScripted(t, infer)
		r := harness.StartRouter(t, nil, e.Worker(worker.Aggregated, "w0"))
		l := harness.StartRequest(t, r, "agg", harness.Chat(stream))
		harness.ReceiveTime(t, arrived, "the leg runs")
		abortedAt := l.Disconnect()
		harness.WantPrompt(t, "the leg was cut", harness.ReceiveTime(t, cancelled, "the leg is cut").Sub(abortedAt))
		harness.WantClientGone(t, r, "agg")
		testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
	}
}

// TestAbortStorm: many clients leave at random moments; no load, blocks or goroutines remain.
func TestAbortStorm(t *testing.T) {
	n := 300
	if os.Getenv("SLUICE_SOAK") != "" {
		n = 10_000
	}
	const lease = 700 * time.Millisecond
	cost := sim.Cost{Step: 2 * time.Millisecond, Handshake: 5 * time.Millisecond, Transfer: time.Millisecond}
	engine := func(r string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease, o.Speed, o.Cost, o.Records = r, lease, 1, cost, -1 })
	}
	p0, p1, d0, d1 := engine("prefill"), engine("prefill"), engine("decode"), engine("decode")
	all := []*sim.Engine{p0, p1, d0, d1}
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.Lease, c.PD.LeaseMargin, c.PD.AbortDelay = time.Second, 500*time.Millisecond, 50*time.Millisecond
	},
		harness.SimWorker(p0, worker.Prefill, "p0"), harness.SimWorker(p1, worker.Prefill, "p1"), harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
	// One of each first, so that goroutines that live as long as the router exist.
	for i := range 16 {
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0))), 200)
	}
	harness.DropIdle()
	harness.WantIdle(t, r, 10*time.Second, all...)
	before := testwait.Settled(t, 50*time.Millisecond, "the number of goroutines", harness.ModuleGoroutines)

	var wg sync.WaitGroup
	var whole, aborted atomic.Int64
	work := make(chan int)
	span := 3 * unloadedLatency(t, r)
	for range 16 {
		wg.Go(func() {
			for i := range work {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(span))))
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, i%40, harness.Prompt, 1+rand.IntN(20), rand.IntN(2) == 0)
				if a, err := harness.TryPost(ctx, r.URL+"/v1/chat/completions", body); err == nil {
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
	harness.WantIdle(t, r, lease+time.Second+harness.AbortSlack, all...)
	t.Logf("all was quiet %v after the last", time.Since(ended).Round(time.Millisecond))
	for i, e := range all {
		s := e.Stats().Sum()
		if s.GarbageReads != 0 || s.LateNotifications != 0 || s.IncompleteHandles != 0 || s.BlocksFree != s.BlocksTotal {
			t.Errorf("engine %d: %+v", i, s)
		}
	}
	for _, id := range []string{"p0", "p1", "d0", "d1"} {
		if s := r.State(id); s != worker.Ready {
			t.Errorf("%s is %v", id, s)
		}
	}
	harness.DropIdle()
	testwait.UntilWithin(t, 10*time.Second, "goroutines are back", func() bool { return harness.ModuleGoroutines() <= before })
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200)
}
