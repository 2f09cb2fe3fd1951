package faults

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestDecodeFailsOver: the router runs a decode that fails before its first byte on another
// engine. If the request had been sent to the failed engine, prefill runs again too.
func TestDecodeFailsOver(t *testing.T) {
	for _, f := range failures {
		if f.name == "stall" {
			continue // a decode that hangs ends with its timeout and is not retried
		}
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			p, bad, good := harness.StartSim(t, harness.SimRole("prefill")), harness.StartScripted(t, f.infer), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, harness.SimWorker(p, worker.Prefill, "p0"), bad.Worker(worker.Decode, "bad"), harness.SimWorker(good, worker.Decode, "good"))
			for i := range 4 {
				id := fmt.Sprint("r", i)
				p.ForgetRequests()
				good.ForgetRequests()
				was := bad.Requests()
				a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0)), "X-Request-Id", id)
				if a.Status != 200 || a.Text(t) == "" || a.Header.Get("X-Sluice-Worker") != "good" {
					t.Errorf("status %d, on %q: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
				}
				want := []string{id}
				if bad.Requests() > was {
					want = []string{id, id + "-2"}
				}
				if got := harness.Ids(harness.GenerateRequests(p)); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("prefill saw %q, want %q: a handle that an engine has seen is not used again", got, want)
				}
				if got := harness.Ids(harness.GenerateRequests(good)); len(got) != 1 || got[0] != want[len(want)-1] {
					t.Errorf("decode saw %q, want %q", got, want[len(want)-1])
				}
			}
			if bad.Requests() == 0 {
				t.Error("the failing worker was never chosen: the test shows nothing")
			}
			if s := good.Stats().Sum(); s.GarbageReads != 0 || s.TransfersFailed != 0 {
				t.Errorf("%d garbage reads, %d failed transfers", s.GarbageReads, s.TransfersFailed)
			}
		})
	}
}

// TestStreamInitialError: vLLM reports in a stream's first event that it could not load the KV.
// The client has received nothing, so the router runs both legs again, even for a request whose
// stream could not migrate. Without another engine the client receives the engine's error.
func TestStreamInitialError(t *testing.T) {
	const body = `{"model":"sim","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"call it"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"required"}`
	p, d0, d1 := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, harness.ShortPrefillTimeout, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
	for _, d := range []*sim.Engine{d0, d1} {
		d.Fault(sim.Fault{Kind: sim.Slow, ID: "bad-"}) // without effect: it matches the retries, so that the next fault does not
		d.Fault(sim.Fault{Kind: sim.StreamFail, Leg: "decode", ID: "bad"})
		d.Fault(sim.Fault{Kind: sim.StreamFail, Leg: "decode", ID: "worse"})
	}
	a := harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "bad")
	if s := string(a.Body); a.Status != 200 || strings.Contains(s, `"error"`) || !strings.Contains(s, `"finish_reason":"tool_calls"`) || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("%d %s", a.Status, s)
	}
	if n := len(harness.GenerateRequests(d0)) + len(harness.GenerateRequests(d1)); n != 2 {
		t.Errorf("%d decodes, want 2", n)
	}
	a = harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "worse")
	if s := string(a.Body); a.Status != 200 || strings.Count(s, `"error":{`) != 1 || strings.Count(s, "data: [DONE]") != 1 {
		t.Errorf("all fail: %d %s", a.Status, s)
	}
	harness.WantIdle(t, r, 20*time.Second, p, d0, d1)
}

// TestEveryDecodeFails: if every decode fails, the error names the failure and the worker.
func TestEveryDecodeFails(t *testing.T) {
	for _, k := range []struct {
		failure, reason string
		status          int
	}{
		{"reset", "upstream_failed", 502}, {"garbage", "upstream_invalid_response", 502}, {"503", "", 503}, {"500", "", 500}, {"429", "", 429},
	} {
		t.Run(k.failure, func(t *testing.T) {
			t.Parallel()
			var infer http.HandlerFunc
			for _, f := range failures {
				if f.name == k.failure {
					infer = f.infer
				}
			}
			p, d0, d1 := harness.StartSim(t, harness.SimRole("prefill")), harness.StartScripted(t, infer), harness.StartScripted(t, infer)
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, harness.SimWorker(p, worker.Prefill, "p0"), d0.Worker(worker.Decode, "d0"), d1.Worker(worker.Decode, "d1"))
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "all")
			harness.WantReason(t, a, k.status, k.reason)
			if msg, _, _ := a.ErrorOf(t); k.reason != "" && !strings.Contains(msg, "decode on d") {
				t.Errorf("message %q does not say which worker", msg)
			}
			if d0.Requests() == 0 || d1.Requests() == 0 {
				t.Errorf("d0 was tried %d times, d1 %d", d0.Requests(), d1.Requests())
			}
			rec := r.Outcome(t, "all")
			if rec.Outcome.Status != k.status || len(rec.Notes) < 2 {
				t.Errorf("outcome %+v, notes %+v", rec.Outcome, rec.Notes)
			}
			if b := r.ReservedLoad(); b != "" {
				t.Error(b)
			}
		})
	}
}

// TestDecodeTimesOut: a decode that does not answer ends with a timeout and is not retried.
func TestDecodeTimesOut(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.Decode = 300 * time.Millisecond }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	d.Fault(sim.Fault{Kind: sim.Stall, Leg: "decode"})
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	harness.WantReason(t, a, 504, "upstream_timeout")
	if n := len(harness.GenerateRequests(d)); n != 1 {
		t.Errorf("%d decodes", n)
	}
	if b := r.ReservedLoad(); b != "" {
		t.Error(b)
	}
}

// TestStreamFailsMidway: a stream fails and migration is off. The client receives an error event
// in its API format, nothing is run again, and the reserved load is released.
func TestStreamFailsMidway(t *testing.T) {
	for _, k := range []sim.FaultKind{sim.Reset, sim.Truncate, sim.StreamFail, sim.Crash} {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} {
			t.Run(k.String()+path, func(t *testing.T) {
				t.Parallel()
				p, d0, d1 := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, harness.SimRole("decode"))
				r := harness.StartRouter(t, func(c *config.Config) { c.Migration.MaxAttempts = 0 }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
				for _, d := range []*sim.Engine{d0, d1} {
					d.Fault(sim.Fault{Kind: k, Leg: "decode", After: 4})
				}
				body := `{"model":"sim","prompt":"go on and on","messages":[{"role":"user","content":"go on and on"}],"max_tokens":50,"ignore_eos":true,"stream":true}`
				if path == "/v1/responses" {
					body = `{"model":"sim","input":"go on and on","max_output_tokens":50,"stream":true}`
				}
				a := harness.Post(t, r.URL+path, body, "X-Request-Id", "dies")
				if a.Status != 200 || !strings.Contains(string(a.Body), `"error"`) {
					t.Errorf("status %d, no error event in %s", a.Status, a.Body)
				}
				if strings.HasSuffix(path, "completions") && !strings.HasSuffix(string(a.Body), "data: [DONE]\n\n") {
					t.Errorf("no [DONE] at the end of %q", a.Body)
				}
				if n := len(harness.GenerateRequests(d0)) + len(harness.GenerateRequests(d1)); n != 1 {
					t.Errorf("%d decodes: nothing is run again once a stream has begun", n)
				}
				rec := r.Outcome(t, "dies")
				if rec.Outcome.Reason == "" {
					t.Errorf("outcome %+v", rec.Outcome)
				}
				testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
			})
		}
	}
}

// TestLeaseIsKept: a decode that could not be sent before the lease ends is never sent with the
// old handle, because the engine would read freed memory and answer 200.
func TestLeaseIsKept(t *testing.T) {
	t.Parallel()
	// The dead decode worker costs a connect timeout, which is longer than the lease allows.
	dead, free := blackhole(t)
	p := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease = "prefill", 500*time.Millisecond })
	d := harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.Lease, c.PD.LeaseMargin = time.Second, 600*time.Millisecond // decode must be sent within 400 ms
		c.Timeouts.Connect = 700 * time.Millisecond
		c.Health.Interval, c.Health.UnhealthyThreshold, c.Health.Timeout = time.Minute, 1000, time.Second
		c.Schedule.Policy = "round_robin"
	}, harness.SimWorker(p, worker.Prefill, "p0"), config.Worker{ID: "d-dead", URL: dead, Role: worker.Decode, KVEvents: []string{"off"}}, harness.SimWorker(d, worker.Decode, "d0"))
	free()
	expired := 0.0
	for i := range 4 {
		id := fmt.Sprint("lease-", i)
		p.ForgetRequests()
		d.ForgetRequests()
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d`, i)), "X-Request-Id", id)
		if a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "d0" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
			t.Fatalf("status %d, headers %v: %s", a.Status, a.Header, a.Body)
		}
		want := []string{id}
		if n := r.Fallbacks("lease_expired"); n > expired {
			expired = n
			want = []string{id, id + "-2"}
		}
		if got := harness.Ids(harness.GenerateRequests(p)); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("prefill saw %q, want %q", got, want)
		}
		recs := harness.GenerateRequests(d)
		if len(recs) != 1 || recs[0].Header("X-Request-Id") != want[len(want)-1] || !strings.Contains(string(recs[0].Body), "-"+want[len(want)-1]+"-") {
			t.Errorf("decode saw %q; want the fresh handle of %q, once", harness.Ids(recs), want[len(want)-1])
		}
	}
	if expired == 0 {
		t.Error("no lease ran out: the test shows nothing")
	}
	if s := p.Stats().Sum(); s.LateNotifications != 0 {
		t.Errorf("prefill counted %d notifications after expiry", s.LateNotifications)
	}
	if s := d.Stats().Sum(); s.GarbageReads != 0 {
		t.Errorf("decode read freed memory %d times", s.GarbageReads)
	}
	harness.WantIdle(t, r, 10*time.Second, p, d)
}

// TestLeaseAlwaysTooShort: if every lease ends before decode is sent, decode runs the whole
// request; it never receives an expired handle.
func TestLeaseAlwaysTooShort(t *testing.T) {
	p := harness.StartSim(t, harness.SimRole("prefill"))
	d := harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.Lease, c.PD.LeaseMargin = time.Second, time.Second-time.Nanosecond
		c.PD.MaxAttempts = 2
	}, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	body := harness.Chat("")
	a := harness.Post(t, r.URL+"/v1/chat/completions", body)
	if a.Status != 200 || a.Text(t) == "" {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if recs := harness.GenerateRequests(d); len(recs) != 1 || string(recs[0].Body) != body {
		t.Errorf("decode was sent %d requests; want the client's bytes once", len(recs))
	}
	if n := len(harness.GenerateRequests(p)); n != 2 {
		t.Errorf("%d prefills, want 2", n)
	}
}

// blackhole starts a healthy engine. After shut, connections to it remain unanswered, as those to
// a host that has disappeared.
func blackhole(t *testing.T) (addr string, shut func()) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 8); err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "blackhole")
	ln, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	engine := harness.StartScripted(t, harness.ReplyHandler(200, "{}"))
	srv := &http.Server{Handler: engine.Config.Handler}
	go srv.Serve(ln)
	t.Cleanup(func() {
		srv.Close()
		f.Close()
	})
	return "http://" + ln.Addr().String(), func() {
		// f keeps the socket listening, but nothing accepts; with a full backlog the kernel
		// drops SYNs.
		srv.Close()
		unix.Listen(int(f.Fd()), 0)
		var held []net.Conn
		for range 4 {
			nc, err := net.DialTimeout("tcp", ln.Addr().String(), 100*time.Millisecond)
			if err == nil {
				held = append(held, nc)
			}
		}
		t.Cleanup(func() {
			for _, nc := range held {
				nc.Close()
			}
		})
	}
}

// TestDecodeDiesAfterPrefill: a decode engine dies while it waits for blocks that prefill has
// leased. In families that request blocks by an id, the router sends another decode with the id,
// so that prefill frees them; and it runs the request again.
func TestDecodeDiesAfterPrefill(t *testing.T) {
	for _, name := range []string{"nixl-push", "mooncake"} {
		t.Run(name, func(t *testing.T) {
			fam := harness.MatrixFamilies[slices.IndexFunc(harness.MatrixFamilies, func(f harness.MatrixFamily) bool { return f.Name == name })]
			engine := func(role string) *sim.Engine {
				return harness.StartSim(t, func(o *sim.Options) { o.Role = role; fam.Engine(o) }) // prefill holds blocks for 480 s, as real engines do
			}
			p, d0, d1 := engine("prefill"), engine("decode"), engine("decode")
			w := harness.SimWorker(p, worker.Prefill, "p0")
			if fam.Worker != nil {
				fam.Worker(&w, p)
			}
			r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = name }, w, harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
			harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200) // so that the router knows the bootstrap data of prefill
			harness.WantIdle(t, r, 20*time.Second, p, d0, d1)
			for i, shape := range harness.Shapes {
				d0.ForgetRequests()
				d1.ForgetRequests()
				var failing *sim.Engine
				for _, d := range []*sim.Engine{d0, d1} {
					d.Fault(sim.Fault{Kind: sim.Stall, Leg: "handover", N: 1})
				}
				done := make(chan *harness.Answer, 1)
				go func() {
					a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d%s`, i, shape.Extra)))
					if err != nil {
						t.Error(err)
					}
					done <- a
				}()
				testwait.UntilWithin(t, 20*time.Second, "prefill is done and decode waits", func() bool {
					failing = nil
					for _, d := range []*sim.Engine{d0, d1} {
						if s := d.Stats().Sum(); s.BlocksFree < s.BlocksTotal {
							failing = d
						}
					}
					return failing != nil && p.Stats().Sum().Leases == 1
				})
				for _, d := range []*sim.Engine{d0, d1} {
					d.ClearFaults()
				}
				failing.Crash()
				if a := <-done; a == nil || a.Status != 200 {
					t.Errorf("%s: the request was not run again: %+v", shape.Name, a)
				}
				testwait.UntilWithin(t, 20*time.Second, "prefill holds nothing", func() bool { return p.Stats().Sum().Leases == 0 })
				if n := r.Fallbacks("abandoned_handle"); n != float64(i+1) {
					t.Errorf("%v handles were given back, want %d", n, i+1)
				}
				failing.Restart()
				testwait.UntilWithin(t, 20*time.Second, "all are ready", func() bool { return harness.AllReady(r) })
				// Otherwise the next round could mistake an unfinished decode for the waiting one.
				testwait.UntilWithin(t, 20*time.Second, "decode holds nothing", func() bool {
					a, b := d0.Stats().Sum(), d1.Stats().Sum()
					return a.BlocksFree == a.BlocksTotal && b.BlocksFree == b.BlocksTotal
				})
			}
			if s := p.Stats().Sum(); s.LeasesExpired != 0 {
				t.Errorf("%d leases ran out", s.LeasesExpired)
			}
			harness.WantIdle(t, r, 20*time.Second, p, d0, d1)
		})
	}
}

// TestFailedDecodeIsReleased: a decode fails before it has read prefill's blocks. The router has
// a vLLM prefill engine free them, with a NIXL notification, long before the lease ends.
func TestFailedDecodeIsReleased(t *testing.T) {
	t.Parallel()
	fam := harness.MatrixFamilies[0]
	harness.WithRealNIXL(t, &fam)
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Role = role; fam.Engine(o) })
	}
	p, d := engine("prefill"), engine("decode")
	w := harness.SimWorker(p, worker.Prefill, "p0")
	fam.Worker(&w, p)
	r := harness.StartRouter(t, func(c *config.Config) {
		fam.Config(c)
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000
		c.PD.MaxAttempts = 1
	}, w, harness.SimWorker(d, worker.Decode, "d0"))
	testwait.UntilWithin(t, 60*time.Second, "the NIXL tier is up", func() bool { return r.Transfers.Up(nixl.TierNIXL) })
	for _, k := range []struct {
		name  string
		fault sim.Fault
	}{
		{"dropped before its head", sim.Fault{Kind: sim.Reset, Leg: "decode", N: 1}},
		{"the hand-over fails", sim.Fault{Kind: sim.Reset, Leg: "handover", N: 1}},
	} {
		for i, shape := range harness.Shapes {
			t.Run(k.name+", "+shape.Name, func(t *testing.T) {
				_, was, _ := r.SideChannel.Counts()
				d.Fault(k.fault)
				defer d.ClearFaults()
				harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d%s`, i, shape.Extra)))
				testwait.UntilWithin(t, 20*time.Second, "prefill holds nothing", func() bool { return p.Stats().Sum().Leases == 0 })
				testwait.UntilWithin(t, 20*time.Second, "it was notified", func() bool { _, now, _ := r.SideChannel.Counts(); return now == was+1 })
			})
		}
	}
	if s := p.Stats().Sum(); s.LeasesExpired != 0 {
		t.Errorf("%d leases ran out", s.LeasesExpired)
	}
	harness.WantIdle(t, r, 20*time.Second, p, d)
}

// TestExpiredHandleIsReleased: no decode can be sent before the lease ends, and no attempt is left.
// Decode runs the whole request, and the router has prefill free the blocks of the unused handle
// before decode has answered.
func TestExpiredHandleIsReleased(t *testing.T) {
	t.Parallel()
	fam := harness.MatrixFamilies[0]
	harness.WithRealNIXL(t, &fam)
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Role = role; fam.Engine(o) })
	}
	p, d := engine("prefill"), engine("decode")
	w := harness.SimWorker(p, worker.Prefill, "p0")
	fam.Worker(&w, p)
	r := harness.StartRouter(t, func(c *config.Config) {
		fam.Config(c)
		c.PD.Lease, c.PD.LeaseMargin = time.Minute, time.Minute-time.Nanosecond
		c.PD.MaxAttempts = 1
	}, w, harness.SimWorker(d, worker.Decode, "d0"))
	testwait.UntilWithin(t, 60*time.Second, "the NIXL tier is up", func() bool { return r.Transfers.Up(nixl.TierNIXL) })
	stall := make(chan struct{})
	endStall := sync.OnceFunc(func() { close(stall) })
	defer endStall()
	d.Fault(sim.Fault{Kind: sim.Stall, Leg: "whole", N: 1, Until: stall})
	done := make(chan *harness.Answer, 1)
	go func() { done <- harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")) }()
	testwait.UntilWithin(t, 20*time.Second, "prefill has answered", func() bool { return len(harness.GenerateRequests(d)) == 1 })
	testwait.UntilWithin(t, 10*time.Second, "prefill is notified to free the blocks", func() bool {
		_, released, _ := r.SideChannel.Counts()
		return released == 1 && p.Stats().Sum().Leases == 0
	})
	endStall()
	if a := <-done; a.Status != 200 || a.Text(t) == "" {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if n := r.Fallbacks("lease_expired"); n != 1 {
		t.Errorf("%v leases ended too soon; want 1: the test shows nothing", n)
	}
	harness.WantIdle(t, r, 20*time.Second, p, d)
}
