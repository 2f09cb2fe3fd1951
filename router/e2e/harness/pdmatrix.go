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
	"sluice/router/config"
	"sluice/router/worker"
)

var Rewrite = flag.Bool("rewrite", false, "write what stands in docs instead of comparing it")

// MatrixFamily is one row of the matrix: a family of the router and the simulated
// engines that speak it. A row is added when both are there.
type MatrixFamily struct {
	Name               string
	Variant            string // of the family, where it has several
	Engine             func(*sim.Options)
	HandoverFault      sim.Fault // what keeps the hand-over from ending while the client leaves; see hold
	nothingBetweenLegs bool      // between the legs no engine keeps anything for a request
	Concurrent         bool      // the legs start together
	Config             func(*config.Config)
	Worker             func(*config.Worker, *sim.Engine)
	Prepare            func(*testing.T, *MatrixFamily) // completes a copy of the row for one fleet
}

// Prepared is the row with what one fleet needs of its own.
func (fam *MatrixFamily) Prepared(t *testing.T) *MatrixFamily {
	t.Helper()
	if fam.Prepare == nil {
		return fam
	}
	own := *fam
	fam.Prepare(t, &own)
	return &own
}

var (
	SlowDecodeFault = sim.Fault{Kind: sim.Stall}
	slowKVFault     = sim.Fault{Kind: sim.Stall, Leg: "handover"}
)

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

// noTrial is in a decode that may not decline.
const noTrial = `"cache_hit_threshold":0`

func usingSimPD(name string) func(*sim.Options) { return func(o *sim.Options) { o.PD = name } }

func WithoutEvents(w *config.Worker, _ *sim.Engine) { w.Engine, w.KVEvents = "trtllm", []string{"off"} }

// prepareStore gives a fleet a store of its own, in which nothing is yet.
func prepareStore(_ *testing.T, fam *MatrixFamily) {
	store := fmt.Sprint("matrix ", rand.Uint64())
	fam.Engine = func(o *sim.Options) { o.PD, o.Store = "storage", store }
}

// declineTrials has every decode that goes first decline. In turns, the one that declines would
// always be the same engine.
func declineTrials(c *config.Config) { c.PD.CacheHitThreshold, c.Schedule.Policy = 1, "random" }

// prepareLMCache finds the port of the notifications before the engines start, who
// must know it.
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

// WithBootstrap names a prefill worker's bootstrap server, as an operator does.
func WithBootstrap(w *config.Worker, e *sim.Engine) {
	if host, port := e.Bootstrap(); port > 0 {
		w.Options = map[string][]string{"bootstrap_host": {host}, "bootstrap_port": {fmt.Sprint(port)}}
	}
}

// Shapes are the ways of asking for one text.
var Shapes = []struct{ Name, Extra string }{
	{"stream", `,"stream":true`},
	{"not streamed", ""},
}

// endsIdle is how long a fleet has to let go of everything: it takes a second at most, and
// longer where the machine has other work; leases are 30 s and longer.
const endsIdle = 20 * time.Second

// MatrixFleet is two prefill and two decode engines of a family, a router over
// them, and an engine of no family that says what the text must be.
type MatrixFleet struct {
	t                 *testing.T // the family's, which outlives the column's
	row, Family       *MatrixFamily
	Router            *Router
	Prefills, Decodes []*sim.Engine
	Reference         *sim.Engine
	sent              int
}

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
		c.Schedule.Policy = "round_robin"   // every engine gets its turn
		c.Health.BreakAfter = 1000          // one decode engine fails again and again
		c.Health.Timeout = 20 * time.Second // one that stands still is not out
		c.PD.AbortDelay, c.PD.AbandonedDecode = time.Second, 0
		if fam.Config != nil {
			fam.Config(c)
		}
	}, workers...)
	return f
}

func (f *MatrixFleet) Engines() []*sim.Engine {
	return append(append([]*sim.Engine(nil), f.Prefills...), f.Decodes...)
}

// body is a request nobody has sent before, and its path.
func (f *MatrixFleet) body(kind, extra string) (path, body string) {
	f.sent++
	if kind == "batch" {
		return "/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":["%d a %s","%d b %s"],"max_tokens":8,"ignore_eos":true%s}`, f.sent, Prompt, f.sent, Prompt, extra)
	}
	return "/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":8,"ignore_eos":true%s}`, f.sent, Prompt, extra)
}

// LegCount counts the inference requests engines have seen.
func LegCount(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += len(GenerateRequests(e))
	}
	return n
}

func (f *MatrixFleet) ForgetRequests() {
	for _, e := range f.Engines() {
		e.ForgetRequests()
	}
}

// Computed is how many prompt tokens the decode engines have computed themselves.
func (f *MatrixFleet) Computed() (n int) {
	for _, e := range f.Decodes {
		n += e.Stats().Sum().LocalCompute
	}
	return n
}

// checkRequest sends one request and says whether every choice of the answer is what
// an undisturbed engine says.
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

// choicesOf are the texts of an answer by choice, of a stream too.
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

// answers: an undisturbed request has the right text; the cell says who made it.
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

// AbortPoint is where a client leaves: a fault holds the request, on all of at; seen
// are the engines that must have it by then, as the fault wants it. held: engines must
// hold something of it; decoding: decode must have begun to make tokens.
type AbortPoint struct {
	Faulted, Receivers   []*sim.Engine
	Fault                sim.Fault
	FaultHolds, Decoding bool
	slowDecode           bool // decode takes the request in when its client has left
	Answering            bool // prefill has finished, and answers when its client has left
}

// HandoverPoint is leaving between the legs.
func (f *MatrixFleet) HandoverPoint() AbortPoint {
	return AbortPoint{Faulted: f.Decodes, Receivers: f.Decodes, Fault: f.Family.HandoverFault, FaultHolds: !f.Family.nothingBetweenLegs, slowDecode: f.Family.HandoverFault.Leg == ""}
}

// Inject arms the fault. How long its client needs to leave is nothing to bet on, so a
// decode that is late is so until release.
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

// Reached says whether the engines have the request.
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

// leaves: a client that goes leaves nothing behind, or what it leaves is freed
// with the lease.
func (f *MatrixFleet) Abort(t *testing.T, extra string, d AbortPoint) string {
	f.ForgetRequests()
	release := d.Inject()
	defer release()
	_, body := f.body("chat", extra)
	body = strings.Replace(body, `"max_tokens":8`, `"max_tokens":2000`, 1)
	made := Generated(f.Decodes)
	l := StartRequest(t, f.Router, fmt.Sprint("leaves-", f.sent), body)
	Eventually(t, TestTimeout, "the leg is there", d.Reached)
	if d.FaultHolds {
		Eventually(t, TestTimeout, "an engine holds something of it", f.HasKV)
	}
	if d.Answering {
		Eventually(t, TestTimeout, "prefill answers", func() bool { return answering(f.Prefills) > 0 })
	}
	if d.Decoding {
		Eventually(t, TestTimeout, "tokens are made", func() bool { return Generated(f.Decodes) > made })
	} else {
		time.Sleep(30 * time.Millisecond) // so that it is inside, not at the door
	}
	if strings.Contains(extra, "stream") && d.Decoding {
		l.Event(t)
	}
	abortedAt := l.Disconnect()
	time.Sleep(30 * time.Millisecond) // in which a router that cuts too early does
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

// answering is how many answers engines hold back.
func answering(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += e.Stats().Sum().DelayedAnswers
	}
	return n
}

// Generated is how many tokens engines have made.
func Generated(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += e.Stats().Sum().GeneratedTokens
	}
	return n
}

// restart gives the family a new fleet, when the old one keeps what would spoil
// what comes next.
func (f *MatrixFleet) restart() {
	sent := f.sent
	*f = *StartMatrixFleet(f.t, f.row)
	f.sent = sent
}

// fails: the leg on e fails once. Requests are sent until e was chosen.
func (f *MatrixFleet) FailsOver(t *testing.T, e *sim.Engine, fault sim.Fault, extra string) string {
	fault.N = 1
	if f.row.Variant != "" && slices.Contains(f.Decodes, e) {
		fault.Body = noTrial // not the decode that declines anyhow
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
			return "run again" // how many legs it took is not told: of two that start together one may be cut before it is sent
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

// HasKV says whether an engine runs or keeps anything.
func (f *MatrixFleet) HasKV() bool { return f.EngineLoad() != "" }

// EngineLoad is what engines run or keep.
func (f *MatrixFleet) EngineLoad() (s string) {
	for i, e := range f.Engines() {
		if n := e.Stats().Sum(); e.Alive() && (n.Running+n.Waiting+n.Leases+n.Rooms != 0 || n.BlocksFree != n.BlocksTotal) {
			s += fmt.Sprintf(" engine %d: %d running, %d waiting, %d leases, %d rooms, %d blocks", i, n.Running, n.Waiting, n.Leases, n.Rooms, n.BlocksTotal-n.BlocksFree)
		}
	}
	return s
}

// BecomesIdle says whether within that time nothing is under way or kept anywhere.
func (f *MatrixFleet) BecomesIdle(within time.Duration) bool {
	for end := time.Now().Add(within); ; time.Sleep(5 * time.Millisecond) {
		if f.Router.ReservedLoad() == "" && !f.HasKV() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

func (f *MatrixFleet) ready(t *testing.T) {
	t.Helper()
	Eventually(t, 10*time.Second, "all workers are ready", func() bool { return AllReady(f.Router) })
}
