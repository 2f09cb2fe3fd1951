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
	"sluice/router/routed/client"
	"sluice/router/worker"
)

// routedFleet is a family's fleet whose router is an engine too.
func routedFleet(t *testing.T, fam *matrixFamily) *matrixFleet {
	t.Helper()
	own := *fam
	prepare, configure, on := fam.prepare, fam.config, asEngine(socketIn(t))
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

// cable is a TCP connection to a unix socket that can be torn, so that a caller is gone
// without a word.
type cable struct {
	addr string
	mu   sync.Mutex
	ends []net.Conn
}

func layCable(t *testing.T, path string) *cable {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	c := &cable{addr: "tcp://" + ln.Addr().String()}
	go func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", path)
			if err != nil {
				near.Close()
				continue
			}
			c.mu.Lock()
			c.ends = append(c.ends, near, far)
			c.mu.Unlock()
			for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
				go func() {
					_, _ = io.Copy(way[0], way[1])
					near.Close()
					far.Close()
				}()
			}
		}
	}()
	return c
}

func (c *cable) tear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.ends {
		e.Close()
	}
}

// routedEnd is a way for a caller to end a request before its end.
type routedEnd struct {
	name string
	run  func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream))
}

// patience bounds what is waited for; machines may be busy.
const patience = 60 * time.Second

var routedEnds = []routedEnd{
	{"stop", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		s := generateRouted(t, dialEngine(t, f.router, "unix"), r)
		ready(s)
		s.Stop()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		a := readRouted(ctx, s)
		if a.err != nil || a.failure != nil || a.finish[0] != "cancelled" {
			t.Fatalf("a stopped stream ends with %v, %v, %q; want a clean end that says cancelled", a.err, a.failure, a.finish[0])
		}
		n := a.usage
		if n == nil || n.Prompt != len(r.TokenIDs) || n.Completion < len(a.tokens[0]) || n.Total != n.Prompt+n.Completion {
			t.Errorf("usage %+v behind %d tokens", n, len(a.tokens[0]))
		}
	}},
	{"kill", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		s := generateRouted(t, dialEngine(t, f.router, "tcp"), r)
		ready(s)
		s.Kill()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if a := readRouted(ctx, s); !client.Killed(a.err) || len(a.finish) > 0 {
			t.Errorf("a killed stream ends with %v, %v", a.err, a.finish)
		}
	}},
	{"vanish", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		line := layCable(t, f.router.cfg.Routed.Unix)
		c, err := client.Dial(context.Background(), line.addr, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s := generateRouted(t, c, r)
		ready(s)
		line.tear()
		<-c.Done()
	}},
	{"close, over HTTP", func(t *testing.T, f *matrixFleet, r *client.Request, ready func(*client.Stream)) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = tryPost(ctx, f.router.URL+"/v1/routed/generate", routedJSON(r), "X-Request-Id", r.Context.ID)
		}()
		ready(nil)
		cancel()
		<-done
	}},
}

func generateRouted(t *testing.T, c *client.Client, r *client.Request) *client.Stream {
	t.Helper()
	s, err := c.Generate(r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestRoutedEnds: stop, kill and a caller that is gone reach the legs wherever the
// request is, in every family; blocks are freed by that, not by a lease that runs out.
func TestRoutedEnds(t *testing.T) {
	for i := range matrixFamilies {
		fam := &matrixFamilies[i]
		t.Run(fam.name, func(t *testing.T) {
			f := routedFleet(t, fam)
			dialEngine(t, f.router, "unix") // it is open from here on
			for i, phase := range []struct {
				name string
				departure
			}{
				{"prefill", departure{at: f.prefills, seen: f.prefills, fault: sim.Fault{Kind: sim.Stall}}},
				{"between the legs", f.handOver()},
				{"decode", departure{at: f.decodes, seen: f.decodes, fault: sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, held: true, decoding: true}},
			} {
				for k, end := range routedEnds {
					t.Run(phase.name+"/"+end.name, func(t *testing.T) {
						f.forget()
						made, expired := generated(f.decodes), expiredLeases(f)
						release := phase.hold()
						defer release()
						for _, e := range phase.at {
							defer e.ClearFaults()
						}
						r := routedRequest(tokenIDs(50, 100+10*i+k), 2000)
						r.Context.ID = fmt.Sprintf("ends-%d-%d", i, k)
						end.run(t, f, r, func(s *client.Stream) {
							eventually(t, patience, "the leg is there", phase.there)
							if phase.held {
								eventually(t, patience, "an engine holds something of it", f.holding)
							}
							if !phase.decoding {
								time.Sleep(30 * time.Millisecond) // so that it is inside, not at the door
								return
							}
							eventually(t, patience, "tokens are made", func() bool { return generated(f.decodes) > made })
							if s != nil {
								firstTokens(t, s)
							}
						})
						time.Sleep(30 * time.Millisecond) // in which a router that cuts too early does
						release()
						if !f.rests(patience) {
							t.Errorf("something is kept: %s%s", f.router.booked(), f.kept())
						}
						if n := expiredLeases(f) - expired; n != 0 {
							t.Errorf("%d leases were let run out", n)
						}
						wantGone(t, f.router, r.Context.ID)
						eventually(t, patience, "the socket has nothing under way", func() bool {
							st := f.router.wire.Stats()
							return st.Streams == 0 && st.Requests == 0
						})
					})
				}
			}
			// Nothing of it is left that would spoil what comes next.
			prompt := tokenIDs(50, 999)
			a := askRouted(t, dialEngine(t, f.router, "unix"), routedRequest(prompt, 12))
			if want := undisturbed(t, f.plain, prompt, 12); a.failure != nil || !slices.Equal(a.tokens[0], want) {
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
	ctx, cancel := context.WithTimeout(context.Background(), patience)
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

// TestRoutedStopIsAnsweredAtOnce: a decode that holds a handle must be admitted before
// it may be cut; who stops does not wait for that.
func TestRoutedStopIsAnsweredAtOnce(t *testing.T) {
	p, d := startSim(t, role("prefill")), startSim(t, role("decode"))
	came, admit := make(chan struct{}, 10), make(chan struct{})
	target, err := url.Parse(d.URL())
	if err != nil {
		t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(target)
	pass.FlushInterval = -1
	door := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" && r.URL.Path == "/inference/v1/generate" {
			came <- struct{}{}
			<-admit
		}
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(door.Close)
	let := sync.OnceFunc(func() { close(admit) })
	t.Cleanup(let)
	on := asEngine(socketIn(t))
	r := startRouter(t, on, at(p, worker.Prefill, "p0"), config.Worker{ID: "d0", URL: door.URL, Role: worker.Decode, KVEvents: []string{"off"}})
	req := routedRequest(tokenIDs(50, 1), 2000)
	req.Context.ID = "stopped-early"
	s := generateRouted(t, dialEngine(t, r, "unix"), req)
	select {
	case <-came:
	case <-time.After(patience):
		t.Fatal("no decode was sent")
	}
	s.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	a := readRouted(ctx, s) // decode is not admitted before this has ended
	if a.err != nil || a.failure != nil || a.finish[0] != "cancelled" || a.items != 1 || a.usage == nil || a.usage.Prompt != 50 || a.usage.Completion != 0 {
		t.Errorf("%v %v %q %+v in %d items", a.err, a.failure, a.finish[0], a.usage, a.items)
	}
	if n := p.Stats().Sum().Leases; n != 1 {
		t.Errorf("prefill keeps %d leases while decode is not admitted; want 1", n)
	}
	let()
	quiet(t, r, patience, p, d)
	if st := p.Stats().Sum(); st.LeasesExpired != 0 || d.Stats().GoneEarly != 0 {
		t.Errorf("%d leases ran out, %d decodes were cut before their engine knew them", st.LeasesExpired, d.Stats().GoneEarly)
	}
	wantGone(t, r, "stopped-early")
}

// TestRoutedStopOfASlowReader: what had come before the stop is not lost on a caller
// that has not taken it yet, and the usage says how much it is.
func TestRoutedStopOfASlowReader(t *testing.T) {
	for name, mod := range map[string]func(*sim.Options){"vLLM": nil, "SGLang": func(o *sim.Options) { o.Engine = "sglang" }} {
		t.Run(name, func(t *testing.T) {
			r, engines := startEngineRouter(t, 1, mod, nil)
			plain := startSim(t, nil)
			dialEngine(t, r, "unix").Close()
			for i, window := range []int{1, 300, 3000} {
				engines[0].Fault(sim.Fault{Kind: sim.Slow, Delay: time.Millisecond, N: 1})
				c, err := client.Dial(context.Background(), "unix://"+r.cfg.Routed.Unix, client.Options{Window: window})
				if err != nil {
					t.Fatal(err)
				}
				prompt := tokenIDs(40, 70+i)
				before := engines[0].Stats().Sum().GeneratedTokens
				s := generateRouted(t, c, routedRequest(prompt, 20_000))
				eventually(t, patience, "more is made than fits", func() bool { return engines[0].Stats().Sum().GeneratedTokens > before+200 })
				s.Stop()
				eventually(t, patience, "the leg is gone", func() bool { return engines[0].Stats().Sum().Running == 0 })
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				a := readRouted(ctx, s)
				cancel()
				n := len(a.tokens[0])
				if a.err != nil || a.failure != nil || a.finish[0] != "cancelled" || a.usage == nil || a.usage.Completion != n || n == 0 {
					t.Errorf("window %d: %v %v %q, usage %+v behind %d tokens", window, a.err, a.failure, a.finish[0], a.usage, n)
				} else if want := undisturbed(t, plain, prompt, n); !slices.Equal(a.tokens[0], want) {
					t.Errorf("window %d: of %d tokens some are others", window, n)
				}
				c.Close()
			}
		})
	}
}
