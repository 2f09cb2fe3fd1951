package abort

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// concurrentAbortCase is one order of events of a request with concurrent legs: the fault of each
// engine, and the condition for the client to leave.
type concurrentAbortCase struct {
	name            string
	prefill, decode *sim.Fault // a late decode is a suspended engine
	ready           func(p, d sim.RankStats, asked int) bool
}

var (
	stallFault = sim.Fault{Kind: sim.Stall, N: 1}
	lateFault  = sim.Fault{Kind: sim.Stall, N: 1}
	busyFault  = sim.Fault{Kind: sim.Stall, N: 1, Phase: "body"} // and the engine holds the blocks
	noKV       = sim.Fault{Kind: sim.Stall, N: 1, Leg: "handover"}
)

var concurrentAbortCases = []concurrentAbortCase{
	{"prefill done, decode not admitted", nil, &lateFault, func(p, _ sim.RankStats, asked int) bool { return p.Leases == 1 && asked == 1 }},
	{"prefill done, decode admitted", nil, &noKV, func(p, d sim.RankStats, _ int) bool { return p.Leases == 1 && d.BlocksFree < d.BlocksTotal }},
	{"prefill runs, decode not admitted", &busyFault, &lateFault, func(p, _ sim.RankStats, asked int) bool { return p.Running == 1 && asked == 1 }},
	{"prefill runs, decode admitted", &busyFault, nil, func(p, d sim.RankStats, _ int) bool { return p.Running == 1 && d.BlocksFree < d.BlocksTotal }},
	{"prefill not admitted, decode admitted", &stallFault, nil, func(_, d sim.RankStats, _ int) bool { return d.BlocksFree < d.BlocksTotal }},
	{"neither admitted", &stallFault, &lateFault, func(_, _ sim.RankStats, asked int) bool { return asked == 1 }},
}

// concurrentLegsFleet starts one prefill and one decode engine of a family with concurrent legs,
// and a router that has run one request on them. url returns the URL at which the router reaches
// prefill; nil: the engine's own.
func concurrentLegsFleet(t *testing.T, fam *harness.MatrixFamily, url func(*sim.Engine) string) (r *harness.Router, p, d *sim.Engine) {
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { // prefill holds blocks for 480 s, as real engines do
			o.Role = role
			fam.Engine(o)
			if role == "decode" { // slow, so that the text is not complete when the leg is cancelled
				o.Speed, o.Cost = 1, sim.Cost{Step: time.Millisecond, Handshake: time.Millisecond, Transfer: time.Millisecond}
			}
		})
	}
	p, d = engine("prefill"), engine("decode")
	w := harness.SimWorker(p, worker.Prefill, "p0")
	if fam.Worker != nil {
		fam.Worker(&w, p)
	}
	if url != nil {
		w.URL, w.KVEvents = url(p), []string{"off"}
	}
	r = harness.StartRouter(t, func(c *config.Config) {
		c.Health.Timeout = 20 * time.Second // keep a suspended engine in the pool
		c.PD.Family, c.PD.AbortDelay = fam.Name, 500*time.Millisecond
	}, w, harness.SimWorker(d, worker.Decode, "d0"))
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200) // so that the router knows the bootstrap data of prefill
	harness.WantIdle(t, r, 5*time.Second, p, d)
	return r, p, d
}

// wantReleased checks the state after a client has left: within a second the engines hold no
// blocks of the request, and none were freed by a timeout.
func wantReleased(t *testing.T, r *harness.Router, id string, abortedAt time.Time, p, d *sim.Engine) {
	t.Helper()
	harness.WantClientGone(t, r, id)
	testwait.UntilWithin(t, 3*time.Second+harness.AbortSlack, "both engines hold nothing", func() bool {
		for _, e := range []*sim.Engine{p, d} {
			if s := e.Stats().Sum(); s.Running+s.Waiting+s.Leases != 0 || s.BlocksFree != s.BlocksTotal {
				return false
			}
		}
		return r.ReservedLoad() == ""
	})
	elapsed := time.Since(abortedAt)
	t.Logf("all was let go %v after the client left", elapsed.Round(time.Millisecond))
	if elapsed > time.Second+harness.AbortSlack {
		t.Errorf("blocks were kept for %v after the client left; want less than 1 s", elapsed)
	}
	if n := d.Stats().AbortedEarly; n != 0 {
		t.Errorf("%d decodes were cut before their engine knew them", n)
	}
	if n := p.Stats().Sum().LeasesExpired; n != 0 {
		t.Errorf("%d times prefill's blocks were let run out", n)
	}
}

// TestClientAbortsConcurrentLegs: whatever the state of two concurrent legs when the client
// leaves, prefill's blocks are freed before the engine's own timeout.
func TestClientAbortsConcurrentLegs(t *testing.T) {
	t.Parallel()
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		if !fam.Concurrent || fam.Name == "sglang" { // SGLang's prefill holds nothing without a decode
			continue
		}
		r, p, d := concurrentLegsFleet(t, fam, nil)
		for i, o := range concurrentAbortCases {
			for _, shape := range harness.Shapes {
				t.Run(fam.Name+"/"+o.name+", "+shape.Name, func(t *testing.T) {
					d.ForgetRequests()
					release := func() {}
					if o.decode == &lateFault {
						release = harness.SuspendEngines(lateFault, d)
						defer release()
					} else if o.decode != nil {
						d.Fault(*o.decode)
						defer d.ClearFaults()
					}
					if o.prefill != nil {
						p.Fault(*o.prefill)
						defer p.ClearFaults()
					}
					id := fmt.Sprintf("together-%d-%v", i, shape.Extra == "")
					l := harness.StartRequest(t, r, id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d%s`, i, shape.Extra)))
					testwait.UntilWithin(t, 5*time.Second, "both legs are as they should be", func() bool {
						return o.ready(p.Stats().Sum(), d.Stats().Sum(), len(harness.GenerateRequests(d)))
					})
					abortedAt := l.Disconnect()
					harness.SettleEngines(t, p, d)
					release()
					wantReleased(t, r, id, abortedAt, p, d)
				})
			}
		}
	}
}

// TestClientAbortsAndPrefillAnswerIsLost: prefill finishes, but its server closes the connection
// before the response. The blocks are leased although no response says so, and must be freed.
func TestClientAbortsAndPrefillAnswerIsLost(t *testing.T) {
	t.Parallel()
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		if !fam.Concurrent || fam.Name == "sglang" {
			continue
		}
		for _, shape := range harness.Shapes {
			t.Run(fam.Name+"/"+shape.Name, func(t *testing.T) {
				made := make(chan struct{}, 10)
				var dropAnswer atomic.Bool
				r, p, d := concurrentLegsFleet(t, fam, func(p *sim.Engine) string {
					front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
						body, _ := io.ReadAll(req.Body)
						out, _ := http.NewRequest(req.Method, p.URL()+req.URL.Path, bytes.NewReader(body))
						out.Header = req.Header.Clone()
						resp, err := http.DefaultClient.Do(out)
						if err != nil {
							panic(http.ErrAbortHandler)
						}
						defer resp.Body.Close()
						answer, _ := io.ReadAll(resp.Body)
						if dropAnswer.Load() && bytes.Contains(body, []byte("kv_transfer_params")) {
							made <- struct{}{}
							<-req.Context().Done()
							panic(http.ErrAbortHandler)
						}
						w.Header().Set("Content-Type", "application/json")
						w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
						w.WriteHeader(resp.StatusCode)
						w.Write(answer)
					}))
					t.Cleanup(func() { front.CloseClientConnections(); front.Close() })
					return front.URL
				})
				dropAnswer.Store(true)
				release := harness.SuspendEngines(lateFault, d)
				defer release()
				l := harness.StartRequest(t, r, "lost", fmt.Sprintf(endlessChat, shape.Extra))
				select {
				case <-made:
				case <-time.After(5 * time.Second):
					t.Fatal("prefill made no answer")
				}
				abortedAt := l.Disconnect()
				harness.SettleEngines(t, p, d)
				release()
				wantReleased(t, r, "lost", abortedAt, p, d)
			})
		}
	}
}
