package abort

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// slowAdmission is the time between the response head of a stream and the moment at which the
// decode engines of these tests admit the request. If the client leaves in between, the router
// must not close the connection to the engine.
const slowAdmission = 400 * time.Millisecond

// slowAdmissionFleet starts a family's fleet of such engines, with a router that uses the given
// relay driver. Leases and pd.abort_delay are longer than a test.
func slowAdmissionFleet(t *testing.T, name, driver string) *harness.MatrixFleet {
	t.Helper()
	var own harness.MatrixFamily
	for _, fam := range harness.MatrixFamilies {
		if fam.Name == name {
			own = fam
		}
	}
	engine, on := own.Engine, harness.WithEngineAPI(harness.SocketIn(t))
	own.Engine = func(o *sim.Options) {
		if engine != nil {
			engine(o)
		}
		o.Lease, o.AbortTimeout = time.Hour, time.Hour
		if o.Role == "decode" {
			o.Speed, o.Cost = 1, sim.Cost{Admit: slowAdmission, Step: time.Millisecond, Handshake: time.Millisecond, Transfer: time.Millisecond}
		}
	}
	own.Config = func(c *config.Config) {
		on(c)
		c.PD.AbortDelay, c.PD.Lease, c.Relay.Driver = 10*time.Minute, time.Hour, driver
	}
	f := harness.StartMatrixFleet(t, &own)
	for range 4 { // so that the router knows the bootstrap data of prefill
		harness.WantStatus(t, harness.Post(t, f.Router.URL+"/v1/chat/completions", harness.Chat("")), 200)
	}
	if !f.BecomesIdle(harness.TestTimeout) {
		t.Fatal("the fleet does not come to rest")
	}
	return f
}

// awaitDecodeRequest waits until decode has a request, and then for a moment in which the head
// may reach the router: the client may leave before or after that.
func awaitDecodeRequest(t *testing.T, f *harness.MatrixFleet) {
	t.Helper()
	testwait.UntilWithin(t, harness.TestTimeout, "decode is asked", func() bool { return harness.LegCount(f.Decodes) > 0 })
	// Of two concurrent legs decode may be the first to arrive. If prefill's has not been sent when the
	// client leaves, it is dropped, and decode waits for blocks that nobody offers, until its
	// connection closes after pd.abort_delay, which is 10 minutes here.
	testwait.Poll(time.Second, func() bool { return harness.LegCount(f.Prefills) > 0 })
	time.Sleep(20 * time.Millisecond)
}

// disconnection is a way for a request to lose its client.
type disconnection struct {
	name string
	run  func(t *testing.T, f *harness.MatrixFleet, prompt []uint32)
}

// disconnections returns all of them: over HTTP with each kind of response and connection, over
// the engine API socket, and by deadlines.
func disconnections() (ways []disconnection) {
	for _, c := range []struct{ name, version, path, extra string }{
		{"a client closes", "HTTP/1.1", "/v1/completions", ""},
		{"a client of HTTP/1.0 closes", "HTTP/1.0", "/v1/completions", ""},
		{"a client of messages closes", "HTTP/1.1", "/v1/messages", `,"messages":[{"role":"user","content":"tell me"}]`},
		{"a caller closes", "HTTP/1.1", "/v1/engine/generate", ""},
	} {
		ways = append(ways, disconnection{c.name, func(t *testing.T, f *harness.MatrixFleet, prompt []uint32) {
			nc, err := net.Dial("tcp", f.Router.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			body := fmt.Sprintf(`{"model":"sim","prompt":%v,"max_tokens":2000,"ignore_eos":true,"stream":true%s}`, idList(prompt), c.extra)
			if c.path == "/v1/engine/generate" {
				body = harness.EngineAPIRequestJSON(harness.EngineAPIRequest(prompt, 2000))
			}
			fmt.Fprintf(nc, "POST %s %s\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", c.path, c.version, len(body), body)
			awaitDecodeRequest(t, f)
		}})
	}
	for _, end := range harness.RequestEnds {
		if strings.Contains(end.Name, "HTTP") {
			continue
		}
		ways = append(ways, disconnection{end.Name, func(t *testing.T, f *harness.MatrixFleet, prompt []uint32) {
			end.Run(t, f, harness.EngineAPIRequest(prompt, 2000), func(*client.Stream) { awaitDecodeRequest(t, f) })
		}})
	}
	const ms = 250 // after prefill, and before decode is admitted
	return append(ways,
		disconnection{"a deadline", func(t *testing.T, f *harness.MatrixFleet, prompt []uint32) {
			req := harness.EngineAPIRequest(prompt, 2000)
			req.Context.TimeoutMS = ms
			if a := harness.GenerateEngineAPI(t, harness.DialEngine(t, f.Router, "unix"), req); a.Failure == nil || a.Failure.Code != 504 {
				t.Errorf("a request whose time is over ends with %v, %v", a.Failure, a.Err)
			}
		}},
		disconnection{"a deadline over HTTP", func(t *testing.T, f *harness.MatrixFleet, prompt []uint32) {
			body := fmt.Sprintf(`{"model":"sim","token_ids":%s,"stop_conditions":{"max_tokens":2000,"ignore_eos":true},"context":{"timeout_ms":%d}}`, idList(prompt), ms)
			ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
			defer cancel()
			a, err := harness.TryPost(ctx, f.Router.URL+"/v1/engine/generate", body)
			if err != nil || !strings.Contains(string(a.Body), "time") || a.Status == 200 != strings.Contains(string(a.Body), `"code":504`) {
				t.Errorf("a request whose time is over ends with %v, %+v", err, a)
			}
		}},
	)
}

func idList(list []uint32) string { return strings.ReplaceAll(fmt.Sprint(list), " ", ",") }

// TestDecodeIsAdmittedBeforeAbort: vLLM's server sends the head of a stream before its engine
// core has the request. A request cancelled in between leaves prefill's blocks leased until the
// lease ends. For every disconnection, and every family whose engines send early heads, the
// router cancels the decode only after the engine has admitted it.
func TestDecodeIsAdmittedBeforeAbort(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"nixl", "nixl-push", "mooncake"} {
		for _, driver := range harness.Drivers {
			t.Run(name+"/"+driver, func(t *testing.T) {
				t.Parallel()
				f := slowAdmissionFleet(t, name, driver)
				for i, disconnect := range disconnections() {
					t.Run(disconnect.name, func(t *testing.T) {
						f.ForgetRequests()
						// An engine notices only later that the request before, which nothing was leased for, was cut.
						early := testwait.Settled(t, 250*time.Millisecond, "the count of early disconnects", func() int { return abortedBeforeAdmission(f) })
						disconnect.run(t, f, harness.TokenIDs(50, 10+i))
						handoverSent := harness.LegCount(f.Prefills) > 0
						if !f.BecomesIdle(harness.TestTimeout) {
							t.Errorf("blocks are kept for a request that nobody waits for: %s%s", f.Router.ReservedLoad(), f.EngineLoad())
						}
						if !handoverSent {
							t.Skip("not handed over by this family: nothing is leased")
						}
						if n := abortedBeforeAdmission(f) - early; n != 0 {
							t.Errorf("%d decodes were cut before their engine knew them", n)
						}
					})
				}
			})
		}
	}
}

func abortedBeforeAdmission(f *harness.MatrixFleet) (n int) {
	for _, d := range f.Decodes {
		n += d.Stats().AbortedEarly
	}
	return n
}

// TestSidecarDecodeIsAdmittedBeforeAbort is TestDecodeIsAdmittedBeforeAbort for a sidecar.
func TestSidecarDecodeIsAdmittedBeforeAbort(t *testing.T) {
	t.Parallel()
	p := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", time.Hour })
	d := harness.StartSim(t, func(o *sim.Options) {
		o.Role, o.Speed, o.Cost = "decode", 1, sim.Cost{Admit: slowAdmission, Step: time.Millisecond, Handshake: time.Millisecond, Transfer: time.Millisecond}
	})
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8", "--prefill-ports", "1024-65535", "--model", "sim", "--set", "pd.abort_delay=10m")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = harness.TryPost(ctx, r.URL+"/v1/chat/completions", fmt.Sprintf(endlessChat, `,"stream":true`), "X-Sluice-Prefill", p.Addr())
	}()
	testwait.UntilWithin(t, harness.TestTimeout, "decode is asked", func() bool { return len(harness.GenerateRequests(d)) > 0 })
	time.Sleep(20 * time.Millisecond)
	cancel()
	<-done
	harness.WantIdle(t, r, harness.TestTimeout, p, d)
	if s := p.Stats().Sum(); s.LeasesReleased != 1 || d.Stats().AbortedEarly != 0 {
		t.Errorf("%d leases freed, %d decodes were cut before their engine knew them; want 1, 0", s.LeasesReleased, d.Stats().AbortedEarly)
	}
}

// TestSilentStreamIsAbortedAfterDelay: if an engine sends a head and then nothing, the router
// cancels the leg pd.abort_delay after the client has left.
func TestSilentStreamIsAbortedAfterDelay(t *testing.T) {
	const after = 300 * time.Millisecond
	var headAt atomic.Pointer[time.Time]
	arrived, cut := make(chan time.Time, 1), make(chan time.Time, 1)
	d := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
		io.Copy(io.Discard, req.Body)
		now := time.Now()
		headAt.Store(&now)
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		arrived <- now
		<-req.Context().Done()
		cut <- time.Now()
	})
	p := harness.StartSim(t, harness.SimRole("prefill"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.AbortDelay = after }, harness.SimWorker(p, worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
	l := harness.StartRequest(t, r, "silent", fmt.Sprintf(endlessChat, `,"stream":true`))
	harness.ReceiveTime(t, arrived, "decode runs")
	abortedAt := l.Disconnect()
	harness.WantClientGone(t, r, "silent")
	requestTime := time.Since(abortedAt)
	at := harness.ReceiveTime(t, cut, "decode is cut")
	if took := at.Sub(*headAt.Load()); took < after {
		t.Errorf("decode was cut %v behind its head; want %v at least", took, after)
	}
	t.Logf("the request ended %v after its client left, its leg %v", requestTime.Round(time.Millisecond), at.Sub(abortedAt).Round(time.Millisecond))
}
