package main

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
	"sluice/router/config"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// slowAdmission is how long decode engines here take to take a request in behind the head
// of its stream. Who leaves meanwhile must not take the connection along.
const slowAdmission = 400 * time.Millisecond

// slowAdmissionFleet is a family's fleet of such engines, driven in a way. Blocks wait for longer
// than a test, and a decode that shows nothing is not cut within one.
func slowAdmissionFleet(t *testing.T, name, driver string) *matrixFleet {
	t.Helper()
	var own matrixFamily
	for _, fam := range matrixFamilies {
		if fam.name == name {
			own = fam
		}
	}
	engine, on := own.engine, withEngineAPI(socketIn(t))
	own.engine = func(o *sim.Options) {
		if engine != nil {
			engine(o)
		}
		o.Lease, o.AbortTimeout = time.Hour, time.Hour
		if o.Role == "decode" {
			o.Speed, o.Cost = 1, sim.Cost{Admit: slowAdmission, Step: time.Millisecond, Handshake: time.Millisecond, Transfer: time.Millisecond}
		}
	}
	own.config = func(c *config.Config) {
		on(c)
		c.PD.AbortDelay, c.PD.Lease, c.Relay.Driver = 10*time.Minute, time.Hour, driver
	}
	f := startMatrixFleet(t, &own)
	for range 4 { // what must be known of prefill is, from here on
		wantStatus(t, post(t, f.router.URL+"/v1/chat/completions", chat("")), 200)
	}
	if !f.becomesIdle(testTimeout) {
		t.Fatal("the fleet does not come to rest")
	}
	return f
}

// awaitDecodeRequest waits until decode has a request, and for its head to be on its way: it may
// have to be there, or not, when who asked leaves.
func awaitDecodeRequest(t *testing.T, f *matrixFleet) {
	t.Helper()
	eventually(t, testTimeout, "decode is asked", func() bool { return legCount(f.decodes) > 0 })
	time.Sleep(20 * time.Millisecond)
}

// disconnection is a way for a request to lose who asked.
type disconnection struct {
	name string
	run  func(t *testing.T, f *matrixFleet, prompt []uint32)
}

// disconnections are all there are: over HTTP with its kinds of answers and connections, by the
// engine socket, and by deadlines.
func disconnections() (ways []disconnection) {
	for _, c := range []struct{ name, version, path, extra string }{
		{"a client closes", "HTTP/1.1", "/v1/completions", ""},
		{"a client of HTTP/1.0 closes", "HTTP/1.0", "/v1/completions", ""},
		{"a client of messages closes", "HTTP/1.1", "/v1/messages", `,"messages":[{"role":"user","content":"tell me"}]`},
		{"a caller closes", "HTTP/1.1", "/v1/routed/generate", ""},
	} {
		ways = append(ways, disconnection{c.name, func(t *testing.T, f *matrixFleet, prompt []uint32) {
			nc, err := net.Dial("tcp", f.router.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			body := fmt.Sprintf(`{"model":"sim","prompt":%v,"max_tokens":2000,"ignore_eos":true,"stream":true%s}`, idList(prompt), c.extra)
			if c.path == "/v1/routed/generate" {
				body = engineAPIRequestJSON(engineAPIRequest(prompt, 2000))
			}
			fmt.Fprintf(nc, "POST %s %s\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", c.path, c.version, len(body), body)
			awaitDecodeRequest(t, f)
		}})
	}
	for _, end := range requestEnds {
		if strings.Contains(end.name, "HTTP") {
			continue
		}
		ways = append(ways, disconnection{end.name, func(t *testing.T, f *matrixFleet, prompt []uint32) {
			end.run(t, f, engineAPIRequest(prompt, 2000), func(*client.Stream) { awaitDecodeRequest(t, f) })
		}})
	}
	const ms = 250 // behind prefill, and before decode is admitted
	return append(ways,
		disconnection{"a deadline", func(t *testing.T, f *matrixFleet, prompt []uint32) {
			req := engineAPIRequest(prompt, 2000)
			req.Context.TimeoutMS = ms
			if a := generateEngineAPI(t, dialEngine(t, f.router, "unix"), req); a.failure == nil || a.failure.Code != 504 {
				t.Errorf("a request whose time is over ends with %v, %v", a.failure, a.err)
			}
		}},
		disconnection{"a deadline over HTTP", func(t *testing.T, f *matrixFleet, prompt []uint32) {
			body := fmt.Sprintf(`{"model":"sim","token_ids":%s,"stop_conditions":{"max_tokens":2000,"ignore_eos":true},"context":{"timeout_ms":%d}}`, idList(prompt), ms)
			ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
			defer cancel()
			a, err := tryPost(ctx, f.router.URL+"/v1/routed/generate", body)
			if err != nil || !strings.Contains(string(a.Body), "time") || a.Status == 200 != strings.Contains(string(a.Body), `"code":504`) {
				t.Errorf("a request whose time is over ends with %v, %+v", err, a)
			}
		}},
	)
}

func idList(list []uint32) string { return strings.ReplaceAll(fmt.Sprint(list), " ", ",") }

// TestDecodeIsAdmittedBeforeAbort: vLLM sends the head of a stream before its engine has
// the request, and one that is cut in between leaves prefill's blocks to the lease. Of
// every way out, and of every family whose engines send heads so, the engine hears when it
// has taken the request in.
func TestDecodeIsAdmittedBeforeAbort(t *testing.T) {
	for _, name := range []string{"nixl", "nixl-push", "mooncake"} {
		for _, driver := range drivers {
			t.Run(name+"/"+driver, func(t *testing.T) {
				t.Parallel()
				f := slowAdmissionFleet(t, name, driver)
				for i, disconnect := range disconnections() {
					t.Run(disconnect.name, func(t *testing.T) {
						f.forgetRequests()
						early := abortedBeforeAdmission(f)
						disconnect.run(t, f, tokenIDs(50, 10+i))
						handoverSent := legCount(f.prefills) > 0
						if !f.becomesIdle(testTimeout) {
							t.Error("blocks are kept for a request that nobody waits for")
						}
						if !handoverSent {
							t.Skip("not handed over by this family: nothing is pinned")
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

func abortedBeforeAdmission(f *matrixFleet) (n int) {
	for _, d := range f.decodes {
		n += d.Stats().AbortedEarly
	}
	return n
}

// TestSidecarDecodeIsAdmittedBeforeAbort: so it is beside one engine.
func TestSidecarDecodeIsAdmittedBeforeAbort(t *testing.T) {
	p := startSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", time.Hour })
	d := startSim(t, func(o *sim.Options) {
		o.Role, o.Speed, o.Cost = "decode", 1, sim.Cost{Admit: slowAdmission, Step: time.Millisecond, Handshake: time.Millisecond, Transfer: time.Millisecond}
	})
	r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8", "--prefill-ports", "1024-65535", "--model", "sim", "--set", "pd.abort_delay=10m")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = tryPost(ctx, r.URL+"/v1/chat/completions", fmt.Sprintf(endlessChat, `,"stream":true`), "X-Sluice-Prefill", p.Addr())
	}()
	eventually(t, testTimeout, "decode is asked", func() bool { return len(generateRequests(d)) > 0 })
	time.Sleep(20 * time.Millisecond)
	cancel()
	<-done
	wantIdle(t, r, testTimeout, p, d)
	if s := p.Stats().Sum(); s.LeasesReleased != 1 || d.Stats().AbortedEarly != 0 {
		t.Errorf("%d leases freed, %d decodes were cut before their engine knew them; want 1, 0", s.LeasesReleased, d.Stats().AbortedEarly)
	}
}

// TestSilentStreamIsAbortedAfterDelay: an engine that sends nothing behind a head keeps the
// leg for pd.abort_delay, and no longer.
func TestSilentStreamIsAbortedAfterDelay(t *testing.T) {
	const after = 300 * time.Millisecond
	var headAt atomic.Pointer[time.Time]
	arrived, cut := make(chan time.Time, 1), make(chan time.Time, 1)
	d := startScripted(t, func(w http.ResponseWriter, req *http.Request) {
		io.Copy(io.Discard, req.Body)
		now := time.Now()
		headAt.Store(&now)
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		arrived <- now
		<-req.Context().Done()
		cut <- time.Now()
	})
	p := startSim(t, simRole("prefill"))
	r := startRouter(t, func(c *config.Config) { c.PD.AbortDelay = after }, simWorker(p, worker.Prefill, "p0"), d.worker(worker.Decode, "d0"))
	l := startRequest(t, r, "silent", fmt.Sprintf(endlessChat, `,"stream":true`))
	receiveTime(t, arrived, "decode runs")
	abortedAt := l.disconnect()
	wantClientGone(t, r, "silent")
	told := time.Since(abortedAt)
	at := receiveTime(t, cut, "decode is cut")
	if took := at.Sub(*headAt.Load()); took < after {
		t.Errorf("decode was cut %v behind its head; want %v at least", took, after)
	}
	t.Logf("the request ended %v after its client left, its leg %v", told.Round(time.Millisecond), at.Sub(abortedAt).Round(time.Millisecond))
}
