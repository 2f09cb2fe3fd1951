package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// engineAPIFleet is a family's fleet whose router is an engine too.
func engineAPIFleet(t *testing.T, fam *matrixFamily) *matrixFleet {
	t.Helper()
	own := *fam
	prepare, configure, on := fam.prepare, fam.config, withEngineAPI(socketIn(t))
	own.config = func(c *config.Config) {
		on(c)
		if configure != nil {
			configure(c)
		}
	}
	if prepare != nil {
		own.prepare = func(t *testing.T, f *matrixFamily) {
			prepare(t, f)
			inner := f.config
			f.config = func(c *config.Config) { on(c); inner(c) }
		}
	}
	return startMatrixFleet(t, &own)
}

// breakableProxy is a TCP connection to a unix socket that can be torn, so that a caller is gone
// without a word.
type breakableProxy struct {
	addr string
	mu   sync.Mutex
	ends []net.Conn
}

func startBreakableProxy(t *testing.T, path string) *breakableProxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	c := &breakableProxy{addr: "tcp://" + ln.Addr().String()}
	go func() {
		for {
			downstream, err := ln.Accept()
			if err != nil {
				return
			}
			upstream, err := net.Dial("unix", path)
			if err != nil {
				downstream.Close()
				continue
			}
			c.mu.Lock()
			c.ends = append(c.ends, downstream, upstream)
			c.mu.Unlock()
			for _, copyHalf := range [][2]net.Conn{{downstream, upstream}, {upstream, downstream}} {
				go func() {
					_, _ = io.Copy(copyHalf[0], copyHalf[1])
					downstream.Close()
					upstream.Close()
				}()
			}
		}
	}()
	return c
}

func (c *breakableProxy) sever() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.ends {
		e.Close()
	}
}

// requestEnd is a way for a caller to end a request before its end.
type requestEnd struct {
	name string
	run  func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream))
}

// testTimeout bounds what is waited for; machines may be busy.
const testTimeout = 60 * time.Second

var requestEnds = []requestEnd{
	{"stop", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		s := startEngineAPI(t, dialEngine(t, f.router, "unix"), r)
		ready(s)
		s.Stop()
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		a := readEngineAPI(ctx, s)
		if a.err != nil || a.failure != nil || a.finish[0] != "cancelled" {
			t.Fatalf("a stopped stream ends with %v, %v, %q; want a clean end that says cancelled", a.err, a.failure, a.finish[0])
		}
		n := a.usage
		if n == nil || n.Prompt != len(r.TokenIDs) || n.Completion < len(a.tokens[0]) || n.Total != n.Prompt+n.Completion {
			t.Errorf("usage %+v behind %d tokens", n, len(a.tokens[0]))
		}
	}},
	{"kill", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		s := startEngineAPI(t, dialEngine(t, f.router, "tcp"), r)
		ready(s)
		s.Kill()
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		if a := readEngineAPI(ctx, s); !client.Killed(a.err) || len(a.finish) > 0 {
			t.Errorf("a killed stream ends with %v, %v", a.err, a.finish)
		}
	}},
	{"vanish", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		line := startBreakableProxy(t, f.router.Config.EngineAPI.Unix)
		c, err := client.Dial(context.Background(), line.addr, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s := startEngineAPI(t, c, r)
		ready(s)
		line.sever()
		<-c.Done()
	}},
	{"close, over HTTP", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = tryPost(ctx, f.router.URL+"/v1/routed/generate", engineAPIRequestJSON(r), "X-Request-Id", r.Context.ID)
		}()
		ready(nil)
		cancel()
		<-done
	}},
}

func startEngineAPI(t *testing.T, c *client.Client, r *client.Request) *client.Stream {
	t.Helper()
	s, err := c.Generate(r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestEngineAPIRequestEnds: stop, kill and a caller that is gone reach the legs wherever the
// request is, in every family; blocks are freed by that, not by a lease that runs out.
func TestEngineAPIRequestEnds(t *testing.T) {
	for i := range matrixFamilies {
		fam := &matrixFamilies[i]
		t.Run(fam.name, func(t *testing.T) {
			f := engineAPIFleet(t, fam)
			dialEngine(t, f.router, "unix") // it is open from here on
			for i, phase := range []struct {
				name string
				abortPoint
			}{
				{"prefill", abortPoint{faulted: f.prefills, receivers: f.prefills, fault: sim.Fault{Kind: sim.Stall}}},
				{"between the legs", f.handoverPoint()},
				{"decode", abortPoint{faulted: f.decodes, receivers: f.decodes, fault: sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, faultHolds: true, decoding: true}},
			} {
				for k, end := range requestEnds {
					t.Run(phase.name+"/"+end.name, func(t *testing.T) {
						f.forgetRequests()
						made, expired := generated(f.decodes), expiredLeases(f)
						release := phase.inject()
						defer release()
						for _, e := range phase.faulted {
							defer e.ClearFaults()
						}
						r := engineAPIRequest(tokenIDs(50, 100+10*i+k), 2000)
						r.Context.ID = fmt.Sprintf("ends-%d-%d", i, k)
						end.run(t, f, r, func(s *client.Stream) {
							eventually(t, testTimeout, "the leg is there", phase.reached)
							if phase.faultHolds {
								eventually(t, testTimeout, "an engine holds something of it", f.hasKV)
							}
							if !phase.decoding {
								time.Sleep(30 * time.Millisecond) // so that it is inside, not at the door
								return
							}
							eventually(t, testTimeout, "tokens are made", func() bool { return generated(f.decodes) > made })
							if s != nil {
								firstTokens(t, s)
							}
						})
						time.Sleep(30 * time.Millisecond) // in which a router that cuts too early does
						release()
						if !f.becomesIdle(testTimeout) {
							t.Errorf("something is kept: %s%s", f.router.reservedLoad(), f.engineLoad())
						}
						if n := expiredLeases(f) - expired; n != 0 {
							t.Errorf("%d leases were let run out", n)
						}
						wantClientGone(t, f.router, r.Context.ID)
						eventually(t, testTimeout, "the socket has nothing under way", func() bool {
							st := f.router.Wire.Stats()
							return st.Streams == 0 && st.Requests == 0
						})
					})
				}
			}
			// Nothing of it is left that would spoil what comes next.
			prompt := tokenIDs(50, 999)
			a := generateEngineAPI(t, dialEngine(t, f.router, "unix"), engineAPIRequest(prompt, 12))
			if want := referenceTokens(t, f.reference, prompt, 12); a.failure != nil || !slices.Equal(a.tokens[0], want) {
				t.Errorf("afterwards: %v\ngot  %v\nwant %v", a.failure, a.tokens[0], want)
			}
		})
	}
}

func expiredLeases(f *matrixFleet) (n int) {
	for _, e := range f.engines() {
		n += e.Stats().Sum().LeasesExpired
	}
	return n
}

// firstTokens reads up to the first item with tokens.
func firstTokens(t *testing.T, s *client.Stream) []uint32 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	for {
		it, err := s.Next(ctx)
		if it == nil || it.Failure != nil {
			t.Fatalf("no token: %+v, %v", it, err)
		}
		if it.Data != nil && len(it.Data.TokenIDs) > 0 {
			return slices.Clone(it.Data.TokenIDs)
		}
	}
}

// TestEngineAPIStopIsImmediate: a decode that holds a handle must be admitted before
// it may be cut; who stops does not wait for that.
func TestEngineAPIStopIsImmediate(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	arrived, admit := make(chan struct{}, 10), make(chan struct{})
	target, err := url.Parse(d.URL())
	if err != nil {
		t.Fatal(err)
	}
	open := httputil.NewSingleHostReverseProxy(target)
	open.FlushInterval = -1
	gate := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" && r.URL.Path == "/inference/v1/generate" {
			arrived <- struct{}{}
			<-admit
		}
		open.ServeHTTP(w, r)
	}))
	t.Cleanup(gate.Close)
	release := sync.OnceFunc(func() { close(admit) })
	t.Cleanup(release)
	on := withEngineAPI(socketIn(t))
	r := startRouter(t, on, simWorker(p, worker.Prefill, "p0"), config.Worker{ID: "d0", URL: gate.URL, Role: worker.Decode, KVEvents: []string{"off"}})
	req := engineAPIRequest(tokenIDs(50, 1), 2000)
	req.Context.ID = "stopped-early"
	s := startEngineAPI(t, dialEngine(t, r, "unix"), req)
	select {
	case <-arrived:
	case <-time.After(testTimeout):
		t.Fatal("no decode was sent")
	}
	s.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	a := readEngineAPI(ctx, s) // decode is not admitted before this has ended
	if a.err != nil || a.failure != nil || a.finish[0] != "cancelled" || a.items != 1 || a.usage == nil || a.usage.Prompt != 50 || a.usage.Completion != 0 {
		t.Errorf("%v %v %q %+v in %d items", a.err, a.failure, a.finish[0], a.usage, a.items)
	}
	if n := p.Stats().Sum().Leases; n != 1 {
		t.Errorf("prefill keeps %d leases while decode is not admitted; want 1", n)
	}
	release()
	wantIdle(t, r, testTimeout, p, d)
	if st := p.Stats().Sum(); st.LeasesExpired != 0 || d.Stats().AbortedEarly != 0 {
		t.Errorf("%d leases ran out, %d decodes were cut before their engine knew them", st.LeasesExpired, d.Stats().AbortedEarly)
	}
	wantClientGone(t, r, "stopped-early")
}

// TestEngineAPIStopOfSlowReader: what had come before the stop is not lost on a caller
// that has not taken it yet, and the usage says how much it is.
func TestEngineAPIStopOfSlowReader(t *testing.T) {
	for name, mod := range map[string]func(*sim.Options){"vLLM": nil, "SGLang": func(o *sim.Options) { o.Engine = "sglang" }} {
		t.Run(name, func(t *testing.T) {
			r, engines := startEngineRouter(t, 1, mod, nil)
			plain := startSim(t, nil)
			dialEngine(t, r, "unix").Close()
			for i, window := range []int{1, 300, 3000} {
				engines[0].Fault(sim.Fault{Kind: sim.Slow, Delay: time.Millisecond, N: 1})
				c, err := client.Dial(context.Background(), "unix://"+r.Config.EngineAPI.Unix, client.Options{Window: window})
				if err != nil {
					t.Fatal(err)
				}
				prompt := tokenIDs(40, 70+i)
				before := engines[0].Stats().Sum().GeneratedTokens
				s := startEngineAPI(t, c, engineAPIRequest(prompt, 20_000))
				eventually(t, testTimeout, "more is made than fits", func() bool { return engines[0].Stats().Sum().GeneratedTokens > before+200 })
				s.Stop()
				eventually(t, testTimeout, "the leg is gone", func() bool { return engines[0].Stats().Sum().Running == 0 })
				ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
				a := readEngineAPI(ctx, s)
				cancel()
				n := len(a.tokens[0])
				if a.err != nil || a.failure != nil || a.finish[0] != "cancelled" || a.usage == nil || a.usage.Completion != n || n == 0 {
					t.Errorf("window %d: %v %v %q, usage %+v behind %d tokens", window, a.err, a.failure, a.finish[0], a.usage, n)
				} else if want := referenceTokens(t, plain, prompt, n); !slices.Equal(a.tokens[0], want) {
					t.Errorf("window %d: of %d tokens some are others", window, n)
				}
				c.Close()
			}
		})
	}
}
