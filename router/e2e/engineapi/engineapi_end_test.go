package engineapi

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// engineAPIFleet starts a family's fleet whose router serves the engine API.
func engineAPIFleet(t *testing.T, fam *harness.MatrixFamily) *harness.MatrixFleet {
	t.Helper()
	own := *fam
	prepare, configure, on := fam.Prepare, fam.Config, harness.WithEngineAPI(harness.SocketIn(t))
	own.Config = func(c *config.Config) {
		on(c)
		if configure != nil {
			configure(c)
		}
	}
	if prepare != nil {
		own.Prepare = func(t *testing.T, f *harness.MatrixFamily) {
			prepare(t, f)
			inner := f.Config
			f.Config = func(c *config.Config) { on(c); inner(c) }
		}
	}
	return harness.StartMatrixFleet(t, &own)
}

// TestEngineAPIRequestEnds: in every family and every phase of a request, stop, kill and a lost
// caller end the legs. Blocks are freed by that, not by a lease that expires.
func TestEngineAPIRequestEnds(t *testing.T) {
	t.Parallel()
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		t.Run(fam.Name, func(t *testing.T) {
			t.Parallel()
			f := engineAPIFleet(t, fam)
			harness.DialEngine(t, f.Router, "unix") // waits until the socket is open
			for i, phase := range []struct {
				name string
				harness.AbortPoint
			}{
				{"prefill", harness.AbortPoint{Faulted: f.Prefills, Receivers: f.Prefills, Fault: sim.Fault{Kind: sim.Stall}}},
				{"between the legs", f.HandoverPoint()},
				{"decode", harness.AbortPoint{Faulted: f.Decodes, Receivers: f.Decodes, Fault: sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, FaultHolds: true, Decoding: true}},
			} {
				for k, end := range harness.RequestEnds {
					t.Run(phase.name+"/"+end.Name, func(t *testing.T) {
						f.ForgetRequests()
						made, expired := harness.Generated(f.Decodes), expiredLeases(f)
						release := phase.Inject()
						defer release()
						for _, e := range phase.Faulted {
							defer e.ClearFaults()
						}
						r := harness.EngineAPIRequest(harness.TokenIDs(50, 100+10*i+k), 2000)
						r.Context.ID = fmt.Sprintf("ends-%d-%d", i, k)
						end.Run(t, f, r, func(s *client.Stream) {
							testwait.UntilWithin(t, harness.TestTimeout, "the leg is there", phase.Reached)
							if phase.FaultHolds {
								testwait.UntilWithin(t, harness.TestTimeout, "an engine holds something of it", f.HasKV)
							}
							if !phase.Decoding {
								time.Sleep(30 * time.Millisecond) // until the engine has admitted the request
								return
							}
							testwait.UntilWithin(t, harness.TestTimeout, "tokens are made", func() bool { return harness.Generated(f.Decodes) > made })
							if s != nil {
								firstTokens(t, s)
							}
						})
						harness.SettleEngines(t, f.Engines()...)
						release()
						if !f.BecomesIdle(harness.TestTimeout) {
							t.Errorf("something is kept: %s%s", f.Router.ReservedLoad(), f.EngineLoad())
						}
						if n := expiredLeases(f) - expired; n != 0 {
							t.Errorf("%d leases were let run out", n)
						}
						harness.WantClientGone(t, f.Router, r.Context.ID)
						testwait.UntilWithin(t, harness.TestTimeout, "the socket has nothing in flight", func() bool {
							st := f.Router.Wire.Stats()
							return st.Streams == 0 && st.Requests == 0
						})
					})
				}
			}
			// Afterwards a new request succeeds.
			prompt := harness.TokenIDs(50, 999)
			a := harness.GenerateEngineAPI(t, harness.DialEngine(t, f.Router, "unix"), harness.EngineAPIRequest(prompt, 12))
			if want := referenceTokens(t, f.Reference, prompt, 12); a.Failure != nil || !slices.Equal(a.Tokens[0], want) {
				t.Errorf("afterwards: %v\ngot  %v\nwant %v", a.Failure, a.Tokens[0], want)
			}
		})
	}
}

func expiredLeases(f *harness.MatrixFleet) (n int) {
	for _, e := range f.Engines() {
		n += e.Stats().Sum().LeasesExpired
	}
	return n
}

// firstTokens reads a stream up to the first item with tokens, and returns them.
func firstTokens(t *testing.T, s *client.Stream) []uint32 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
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

// TestEngineAPIStopIsImmediate: the router cancels a decode with a handle only after the engine has
// admitted it, but a caller that stops its request does not wait for that.
func TestEngineAPIStopIsImmediate(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
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
	on := harness.WithEngineAPI(harness.SocketIn(t))
	r := harness.StartRouter(t, on, harness.SimWorker(p, worker.Prefill, "p0"), config.Worker{ID: "d0", URL: gate.URL, Role: worker.Decode, KVEvents: []string{"off"}})
	req := harness.EngineAPIRequest(harness.TokenIDs(50, 1), 2000)
	req.Context.ID = "stopped-early"
	s := harness.StartEngineAPI(t, harness.DialEngine(t, r, "unix"), req)
	select {
	case <-arrived:
	case <-time.After(harness.TestTimeout):
		t.Fatal("no decode was sent")
	}
	s.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	a := harness.ReadEngineAPI(ctx, s) // decode is admitted only after this has ended
	if a.Err != nil || a.Failure != nil || a.Finish[0] != "cancelled" || a.Items != 1 || a.Usage == nil || a.Usage.Prompt != 50 || a.Usage.Completion != 0 {
		t.Errorf("%v %v %q %+v in %d items", a.Err, a.Failure, a.Finish[0], a.Usage, a.Items)
	}
	if n := p.Stats().Sum().Leases; n != 1 {
		t.Errorf("prefill keeps %d leases while decode is not admitted; want 1", n)
	}
	release()
	harness.WantIdle(t, r, harness.TestTimeout, p, d)
	if st := p.Stats().Sum(); st.LeasesExpired != 0 || d.Stats().AbortedEarly != 0 {
		t.Errorf("%d leases ran out, %d decodes were cut before their engine knew them", st.LeasesExpired, d.Stats().AbortedEarly)
	}
	harness.WantClientGone(t, r, "stopped-early")
}

// TestEngineAPIStopOfSlowReader: a slow caller that stops still receives the output from before the
// stop, and the usage counts exactly this output.
func TestEngineAPIStopOfSlowReader(t *testing.T) {
	t.Parallel()
	for name, mod := range map[string]func(*sim.Options){"vLLM": nil, "SGLang": func(o *sim.Options) { o.Engine = "sglang" }} {
		t.Run(name, func(t *testing.T) {
			r, engines := harness.StartEngineRouter(t, 1, mod, nil)
			plain := harness.StartSim(t, nil)
			harness.DialEngine(t, r, "unix").Close()
			for i, window := range []int{1, 300, 3000} {
				engines[0].Fault(sim.Fault{Kind: sim.Slow, Delay: time.Millisecond, N: 1})
				c, err := client.Dial(context.Background(), "unix://"+r.Config.EngineAPI.UnixSocket, client.Options{Window: window})
				if err != nil {
					t.Fatal(err)
				}
				prompt := harness.TokenIDs(40, 70+i)
				before := engines[0].Stats().Sum().GeneratedTokens
				s := harness.StartEngineAPI(t, c, harness.EngineAPIRequest(prompt, 20_000))
				testwait.UntilWithin(t, harness.TestTimeout, "more is made than fits", func() bool { return engines[0].Stats().Sum().GeneratedTokens > before+200 })
				s.Stop()
				testwait.UntilWithin(t, harness.TestTimeout, "the leg is gone", func() bool { return engines[0].Stats().Sum().Running == 0 })
				ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
				a := harness.ReadEngineAPI(ctx, s)
				cancel()
				n := len(a.Tokens[0])
				if a.Err != nil || a.Failure != nil || a.Finish[0] != "cancelled" || a.Usage == nil || a.Usage.Completion != n || n == 0 {
					t.Errorf("window %d: %v %v %q, usage %+v behind %d tokens", window, a.Err, a.Failure, a.Finish[0], a.Usage, n)
				} else if want := referenceTokens(t, plain, prompt, n); !slices.Equal(a.Tokens[0], want) {
					t.Errorf("window %d: of %d tokens some are others", window, n)
				}
				c.Close()
			}
		})
	}
}
