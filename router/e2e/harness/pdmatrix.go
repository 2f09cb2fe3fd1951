package harness

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/worker"
)

// Rewrite is the flag -rewrite: tests that compare a table in docs/ with their results write the
// table instead.
var Rewrite = flag.Bool("rewrite", false, "write what stands in docs instead of comparing it")

// MatrixFamily is one row of the matrix: a P/D family of the router and the simulated engines
// that implement it.
type MatrixFamily struct {
	Name               string
	Variant            string // of the family, if it has several
	Engine             func(*sim.Options)
	HandoverFault      sim.Fault // delays the end of the hand-over until the client has left; see HandoverPoint
	nothingBetweenLegs bool      // no engine holds state for a request between the legs
	Concurrent         bool      // the legs run concurrently
	Config             func(*config.Config)
	Worker             func(*config.Worker, *sim.Engine)
	Prepare            func(*testing.T, *MatrixFamily) // completes a copy of the row for one fleet
}

// Prepared returns the row as completed by Prepare for one fleet.
func (fam *MatrixFamily) Prepared(t *testing.T) *MatrixFamily {
	t.Helper()
	if fam.Prepare == nil {
		return fam
	}
	own := *fam
	fam.Prepare(t, &own)
	return &own
}

// SlowDecodeFault stalls the requests of decode engines, and slowKVFault the transfer of the KV
// cache, for families that decode before the transfer is complete.
var (
	SlowDecodeFault = sim.Fault{Kind: sim.Stall}
	slowKVFault     = sim.Fault{Kind: sim.Stall, Leg: "handover"}
)

// MatrixFamilies are all rows, in the order of the table. Tests must not change them: rows with
// Prepare are completed as copies (see Prepared).
var MatrixFamilies = []MatrixFamily{
	{Name: "nixl", HandoverFault: SlowDecodeFault},
	{Name: "nixl-push", Concurrent: true, Engine: usingSimPD("nixl-push"), HandoverFault: slowKVFault},
	{Name: "sglang", Concurrent: true, Engine: func(o *sim.Options) { o.Engine = "sglang" }, Worker: WithBootstrap, HandoverFault: slowKVFault},
	{Name: "mooncake", Concurrent: true, Engine: usingSimPD("mooncake"), Worker: WithBootstrap, HandoverFault: slowKVFault},
	{Name: "orchestrated", Engine: usingSimPD("orchestrated"), HandoverFault: SlowDecodeFault, nothingBetweenLegs: true},
	{Name: "lmcache", Prepare: prepareLMCache, HandoverFault: SlowDecodeFault, nothingBetweenLegs: true},
	{Name: "trtllm", Engine: func(o *sim.Options) { o.Engine = "trtllm" }, Worker: WithoutEvents, HandoverFault: SlowDecodeFault},
	{Name: "storage", Prepare: prepareStore, HandoverFault: SlowDecodeFault, nothingBetweenLegs: true},
	{Name: "storage", Variant: ", decode first", Prepare: prepareStore, Config: declineTrials, HandoverFault: sim.Fault{Kind: sim.Stall, Body: noTrial}, nothingBetweenLegs: true},
}

// noTrial is part of the body of a decode that may not decline.
const noTrial = `"cache_hit_threshold":0`

func usingSimPD(name string) func(*sim.Options) { return func(o *sim.Options) { o.PD = name } }

// WithoutEvents configures a TensorRT-LLM worker whose KV events are not read. It is a Worker of
// MatrixFamily; the engine may be nil.
func WithoutEvents(w *config.Worker, _ *sim.Engine) { w.Engine, w.KVEvents = "trtllm", []string{"off"} }

// prepareStore gives a fleet an empty store of its own.
func prepareStore(_ *testing.T, fam *MatrixFamily) {
	store := fmt.Sprint("matrix ", rand.Uint64())
	fam.Engine = func(o *sim.Options) { o.PD, o.Store = "storage", store }
}

// declineTrials makes every decode that is tried before prefill decline. The policy is random,
// because with round robin the same engine would decline every time.
func declineTrials(c *config.Config) { c.PD.CacheHitThreshold, c.Schedule.Policy = 1, "random" }

// prepareLMCache chooses the port of the notifications before the engines start, because their
// options contain it.
func prepareLMCache(t *testing.T, fam *MatrixFamily) {
	port := FreePort(t)
	fam.Engine = func(o *sim.Options) { o.PD, o.LMCacheProxy = "lmcache", fmt.Sprintf("tcp://127.0.0.1:%d", port) }
	fam.Config = func(c *config.Config) { c.LMCache.ProxyHost, c.LMCache.ProxyPort = "127.0.0.1", port }
	fam.Worker = func(w *config.Worker, e *sim.Engine) {
		if w.Role == worker.Decode {
			side := []string{fmt.Sprint(e.SidePort())}
			w.Options = map[string][]string{"init_port": side, "alloc_port": side}
		}
	}
}

// WithBootstrap sets a prefill worker's bootstrap options, as an operator does.
func WithBootstrap(w *config.Worker, e *sim.Engine) {
	if host, port := e.Bootstrap(); port > 0 {
		w.Options = map[string][]string{"bootstrap_host": {host}, "bootstrap_port": {fmt.Sprint(port)}}
	}
}

// Shapes are the variants of one request: streamed and not streamed.
var Shapes = []struct{ Name, Extra string }{
	{"stream", `,"stream":true`},
	{"not streamed", ""},
}

// endsIdle bounds the wait until a fleet has released everything. That takes at most a second,
// or longer on a busy machine. The bound is below the shortest lease, 30 s.
const endsIdle = 20 * time.Second

// MatrixFleet is a router over two prefill and two decode engines of a family, and an aggregated
// reference engine that generates the expected text.
type MatrixFleet struct {
	t                 *testing.T // of the row, which outlives the tests of its columns
	row, Family       *MatrixFamily
	Router            *Router
	Prefills, Decodes []*sim.Engine
	Reference         *sim.Engine
	sent              int
}

// StartMatrixFleet starts the engines and the router of a row, completed by its Prepare, and waits
// until all workers are ready. The router chooses engines in turn, unless the row
// changes the policy, and keeps failing engines in the pools. pd.abort_delay is 1 s.
func StartMatrixFleet(t *testing.T, fam *MatrixFamily) *MatrixFleet {
	t.Helper()
	row := fam
	fam = fam.Prepared(t)
	f := &MatrixFleet{t: t, row: row, Family: fam, Reference: StartSim(t, nil)}
	var workers []config.Worker
	for i, role := range []worker.Role{worker.Prefill, worker.Prefill, worker.Decode, worker.Decode} {
		e := StartSim(t, func(o *sim.Options) {
			o.Role = role.String()
			if fam.Engine != nil {
				fam.Engine(o)
			}
		})
		w := SimWorker(e, role, fmt.Sprint(role, "-", i%2))
		if fam.Worker != nil {
			fam.Worker(&w, e)
		}
		workers = append(workers, w)
		if role == worker.Prefill {
			f.Prefills = append(f.Prefills, e)
		} else {
			f.Decodes = append(f.Decodes, e)
		}
	}
	f.Router = StartRouter(t, func(c *config.Config) {
		c.PD.Family = fam.Name
		c.Schedule.Policy = "round_robin"   // so that every engine is chosen
		c.Health.BreakerFailures = 1000     // keep a decode engine that fails repeatedly in the pool
		c.Health.Timeout = 20 * time.Second // keep a suspended engine in the pool
		c.PD.AbortDelay, c.PD.AbandonedDecodeTimeout = time.Second, 0
		if fam.Config != nil {
			fam.Config(c)
		}
	}, workers...)
	return f
}

// Engines returns the prefill engines and then the decode engines in a new slice. The reference
// engine is not included.
func (f *MatrixFleet) Engines() []*sim.Engine {
	return append(append([]*sim.Engine(nil), f.Prefills...), f.Decodes...)
}

// body returns a request with a prompt that was not used before, and its path.
func (f *MatrixFleet) body(kind, extra string) (path, body string) {
	f.sent++
	if kind == "batch" {
		return "/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":["%d a %s","%d b %s"],"max_tokens":8,"ignore_eos":true%s}`, f.sent, Prompt, f.sent, Prompt, extra)
	}
	return "/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":8,"ignore_eos":true%s}`, f.sent, Prompt, extra)
}

// LegCount returns the number of inference requests that the engines received.
func LegCount(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += len(GenerateRequests(e))
	}
	return n
}

// ForgetRequests deletes the engines' records of requests, so that LegCount begins at 0.
func (f *MatrixFleet) ForgetRequests() {
	for _, e := range f.Engines() {
		e.ForgetRequests()
	}
}

// Computed returns the number of prompt tokens that the decode engines computed themselves.
func (f *MatrixFleet) Computed() (n int) {
	for _, e := range f.Decodes {
		n += e.Stats().Sum().LocalCompute
	}
	return n
}

// checkRequest sends one request and reports whether every choice of the response equals that
// of the reference engine.
func (f *MatrixFleet) checkRequest(t *testing.T, kind, extra string) (a *Answer, right bool) {
	t.Helper()
	path, body := f.body(kind, extra)
	want := choicesOf(Post(t, f.Reference.URL()+path, body))
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, err := TryPost(ctx, f.Router.URL+path, body)
	if a == nil {
		t.Fatalf("%s: %v", body, err)
	}
	got := choicesOf(a)
	right = err == nil && len(got) == len(want)
	for i, text := range want {
		right = right && got[i] == text
	}
	return a, right
}

// choicesOf returns the text of each choice of a response, streamed or not.
func choicesOf(a *Answer) map[int]string {
	texts := make(map[int]string)
	add := func(js []byte) {
		var v struct {
			Choices []struct {
				Index   int                      `json:"index"`
				Text    string                   `json:"text"`
				Message struct{ Content string } `json:"message"`
				Delta   struct{ Content string } `json:"delta"`
			} `json:"choices"`
		}
		if json.Unmarshal(js, &v) != nil {
			return
		}
		for _, c := range v.Choices {
			texts[c.Index] += c.Text + c.Message.Content + c.Delta.Content
		}
	}
	if !bytes.HasPrefix(a.Body, []byte("data:")) {
		add(a.Body)
		return texts
	}
	sc := bufio.NewScanner(bytes.NewReader(a.Body))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		if data, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
			add([]byte(data))
		}
	}
	return texts
}

// CheckAnswers checks that a request without faults has the right text. It returns the text of
// a table cell that says which legs ran.
func (f *MatrixFleet) CheckAnswers(t *testing.T, kind, extra string) string {
	f.ForgetRequests()
	before := f.Computed()
	a, right := f.checkRequest(t, kind, extra)
	p, d := LegCount(f.Prefills), LegCount(f.Decodes)
	if !f.BecomesIdle(endsIdle) {
		t.Errorf("something is kept after the answer: %s%s", f.Router.ReservedLoad(), f.EngineLoad())
	}
	switch {
	case a.Status != 200:
		return fmt.Sprintf("refused, %d", a.Status)
	case !right:
		t.Errorf("the answer is not the undisturbed one: %s", a.Body)
		return "wrong"
	case p == 0 && d == 1:
		return "decode alone"
	case p == 1 && d == 2 && f.row.Variant != "":
		return "declined, both legs"
	case p != 1 || d != 1:
		return fmt.Sprintf("%d prefills, %d decodes", p, d)
	case f.Computed() > before:
		return "both legs, decode computed"
	}
	return "both legs"
}

// AbortPoint is the point in a request's life at which its client disconnects. Fault stalls the
// request on all Faulted engines. Before the client disconnects, one of Receivers must have
// received a request that the fault matches; with FaultHolds an engine must hold state for it;
// with Decoding, decode must have generated tokens.
type AbortPoint struct {
	Faulted, Receivers   []*sim.Engine
	Fault                sim.Fault
	FaultHolds, Decoding bool
	slowDecode           bool // decode admits the request only after the client has left
	Answering            bool // prefill has finished, but answers only after the client has left
}

// HandoverPoint is the AbortPoint between the two legs.
func (f *MatrixFleet) HandoverPoint() AbortPoint {
	return AbortPoint{Faulted: f.Decodes, Receivers: f.Decodes, Fault: f.Family.HandoverFault, FaultHolds: !f.Family.nothingBetweenLegs, slowDecode: f.Family.HandoverFault.Leg == ""}
}

// Inject arms the fault. A delayed engine stays delayed until release rather than for a fixed
// time, because the time that the client needs to disconnect is not bounded.
func (d *AbortPoint) Inject() (release func()) {
	switch {
	case d.slowDecode:
		return SuspendEngines(d.Fault, d.Faulted...)
	case d.Answering:
		return DelayAnswers(d.Fault, d.Faulted...)
	}
	for _, e := range d.Faulted {
		e.Fault(d.Fault)
	}
	return func() {}
}

// Reached reports whether one of Receivers has received the request.
func (d *AbortPoint) Reached() bool {
	for _, e := range d.Receivers {
		for _, rec := range GenerateRequests(e) {
			if bytes.Contains(rec.Body, []byte(d.Fault.Body)) {
				return true
			}
		}
	}
	return false
}

// Abort disconnects the client of a request at d. It returns the text of a table cell: whether
// the engines freed everything at once or with the lease.
func (f *MatrixFleet) Abort(t *testing.T, extra string, d AbortPoint) string {
	f.ForgetRequests()
	release := d.Inject()
	defer release()
	_, body := f.body("chat", extra)
	body = strings.Replace(body, `"max_tokens":8`, `"max_tokens":2000`, 1)
	made := Generated(f.Decodes)
	l := StartRequest(t, f.Router, fmt.Sprint("leaves-", f.sent), body)
	testwait.UntilWithin(t, TestTimeout, "the leg is there", d.Reached)
	if d.FaultHolds {
		testwait.UntilWithin(t, TestTimeout, "an engine holds something of it", f.HasKV)
	}
	if d.Answering {
		testwait.UntilWithin(t, TestTimeout, "prefill answers", func() bool { return answering(f.Prefills) > 0 })
	}
	if d.Decoding {
		testwait.UntilWithin(t, TestTimeout, "tokens are made", func() bool { return Generated(f.Decodes) > made })
	} else {
		time.Sleep(30 * time.Millisecond) // until the engine has admitted the request
	}
	if strings.Contains(extra, "stream") && d.Decoding {
		l.Event(t)
	}
	abortedAt := l.Disconnect()
	SettleEngines(t, f.Engines()...)
	release()
	released := f.BecomesIdle(endsIdle)
	for _, e := range d.Faulted {
		e.ClearFaults()
	}
	if released {
		t.Logf("all was free %v after the client left", time.Since(abortedAt).Round(time.Millisecond))
		return "freed at once"
	}
	f.restart()
	return "freed with the lease"
}

// SettleEngines waits, after a client has disconnected, until what the engines hold has not changed for
// 30 ms. A router that cancels too early has then done so, although a fault still delays the engines.
func SettleEngines(t *testing.T, engines ...*sim.Engine) {
	t.Helper()
	testwait.Settled(t, 30*time.Millisecond, "what the engines hold", func() (held [4]int) {
		for _, e := range engines {
			s := e.Stats().Sum()
			held[0], held[1], held[2], held[3] = held[0]+s.Running, held[1]+s.Waiting, held[2]+s.Leases, held[3]+s.DelayedAnswers
		}
		return held
	})
}

// answering returns the number of responses that the engines withhold.
func answering(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += e.Stats().Sum().DelayedAnswers
	}
	return n
}

// Generated returns the number of tokens that the engines generated.
func Generated(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += e.Stats().Sum().GeneratedTokens
	}
	return n
}

// restart replaces the fleet by a new one, because the old one still holds blocks that would
// disturb the next test.
func (f *MatrixFleet) restart() {
	sent := f.sent
	*f = *StartMatrixFleet(f.t, f.row)
	f.sent = sent
}

// FailsOver makes one leg on e fail: it sends requests until the router chooses e. It returns
// the text of a table cell for the result.
func (f *MatrixFleet) FailsOver(t *testing.T, e *sim.Engine, fault sim.Fault, extra string) string {
	fault.N = 1
	if f.row.Variant != "" && slices.Contains(f.Decodes, e) {
		fault.Body = noTrial // not the decode that declines in any case
	}
	e.Fault(fault)
	cell := f.untilHit(t, e, fault, extra)
	e.ClearFaults()
	if !f.BecomesIdle(endsIdle) {
		cell += ", blocks kept until the lease ends"
		f.restart()
	}
	f.ready(t)
	return cell
}

func (f *MatrixFleet) untilHit(t *testing.T, e *sim.Engine, fault sim.Fault, extra string) string {
	for range 50 {
		f.ForgetRequests()
		before, migrated := e.Stats().Faults, f.Router.Metric(`sluice_migrations_total{outcome="done"}`)
		a, right := f.checkRequest(t, "chat", extra)
		if e.Stats().Faults == before {
			continue
		}
		streamed := bytes.HasPrefix(a.Body, []byte("data:"))
		switch {
		case a.Status == 200 && right && f.Router.Metric(`sluice_migrations_total{outcome="done"}`) > migrated:
			return "goes on elsewhere"
		case a.Status == 200 && right && f.row.Concurrent && fault.Phase == "body" && slices.Contains(f.Prefills, e):
			return "unseen"
		case a.Status == 200 && right && LegCount(f.Engines()) <= 1+min(1, LegCount(f.Prefills)):
			return "hidden"
		case a.Status == 200 && right:
			return "run again" // without the number of legs: of two concurrent legs one may be cancelled before it is sent
		case a.Status == 200 && streamed && (bytes.Contains(a.Body, []byte(`data: {"error"`)) || bytes.Contains(a.Body, []byte(`data: {"object":"error"`))):
			return "error event"
		case a.Status == 200:
			t.Errorf("a broken answer was passed on as a whole one: %s", a.Body)
			return "wrong"
		}
		return fmt.Sprint(a.Status)
	}
	t.Errorf("the engine was never chosen")
	return "?"
}

// HasKV reports whether an engine runs a request or holds blocks.
func (f *MatrixFleet) HasKV() bool { return f.EngineLoad() != "" }

// EngineLoad describes the requests and blocks of the engines; "" if there are none.
func (f *MatrixFleet) EngineLoad() (s string) {
	for i, e := range f.Engines() {
		if n := e.Stats().Sum(); e.Alive() && (n.Running+n.Waiting+n.Leases+n.Rooms != 0 || n.BlocksFree != n.BlocksTotal) {
			s += fmt.Sprintf(" engine %d: %d running, %d waiting, %d leases, %d rooms, %d blocks", i, n.Running, n.Waiting, n.Leases, n.Rooms, n.BlocksTotal-n.BlocksFree)
		}
	}
	return s
}

// BecomesIdle reports whether the router and the engines release everything within a time.
func (f *MatrixFleet) BecomesIdle(within time.Duration) bool {
	return testwait.Poll(within, func() bool { return f.Router.ReservedLoad() == "" && !f.HasKV() })
}

func (f *MatrixFleet) ready(t *testing.T) {
	t.Helper()
	testwait.UntilWithin(t, 10*time.Second, "all workers are ready", func() bool { return AllReady(f.Router) })
}
