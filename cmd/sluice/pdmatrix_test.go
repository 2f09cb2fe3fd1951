package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

var rewrite = flag.Bool("rewrite", false, "write what stands in docs instead of comparing it")

// matrixFamily is one row of the matrix: a family of the router and the simulated
// engines that speak it. A row is added when both are there.
type matrixFamily struct {
	name               string
	variant            string // of the family, where it has several
	engine             func(*sim.Options)
	handoverFault      sim.Fault // what keeps the hand-over from ending while the client leaves; see hold
	nothingBetweenLegs bool      // between the legs no engine keeps anything for a request
	concurrent         bool      // the legs start together
	config             func(*config.Config)
	worker             func(*config.Worker, *sim.Engine)
	prepare            func(*testing.T, *matrixFamily) // completes a copy of the row for one fleet
}

// prepared is the row with what one fleet needs of its own.
func (fam *matrixFamily) prepared(t *testing.T) *matrixFamily {
	t.Helper()
	if fam.prepare == nil {
		return fam
	}
	own := *fam
	fam.prepare(t, &own)
	return &own
}

var (
	slowDecodeFault = sim.Fault{Kind: sim.Stall}
	slowKVFault     = sim.Fault{Kind: sim.Stall, Leg: "handover"}
)

var matrixFamilies = []matrixFamily{
	{name: "nixl", handoverFault: slowDecodeFault},
	{name: "nixl-push", concurrent: true, engine: usingSimPD("nixl-push"), handoverFault: slowKVFault},
	{name: "sglang", concurrent: true, engine: func(o *sim.Options) { o.Engine = "sglang" }, worker: withBootstrap, handoverFault: slowKVFault},
	{name: "mooncake", concurrent: true, engine: usingSimPD("mooncake"), worker: withBootstrap, handoverFault: slowKVFault},
	{name: "orchestrated", engine: usingSimPD("orchestrated"), handoverFault: slowDecodeFault, nothingBetweenLegs: true},
	{name: "lmcache", prepare: prepareLMCache, handoverFault: slowDecodeFault, nothingBetweenLegs: true},
	{name: "trtllm", engine: func(o *sim.Options) { o.Engine = "trtllm" }, worker: withoutEvents, handoverFault: slowDecodeFault},
	{name: "storage", prepare: prepareStore, handoverFault: slowDecodeFault, nothingBetweenLegs: true},
	{name: "storage", variant: ", decode first", prepare: prepareStore, config: declineTrials, handoverFault: sim.Fault{Kind: sim.Stall, Body: noTrial}, nothingBetweenLegs: true},
}

// noTrial is in a decode that may not decline.
const noTrial = `"cache_hit_threshold":0`

func usingSimPD(name string) func(*sim.Options) { return func(o *sim.Options) { o.PD = name } }

func withoutEvents(w *config.Worker, _ *sim.Engine) { w.Engine, w.KVEvents = "trtllm", []string{"off"} }

// prepareStore gives a fleet a store of its own, in which nothing is yet.
func prepareStore(_ *testing.T, fam *matrixFamily) {
	store := fmt.Sprint("matrix ", rand.Uint64())
	fam.engine = func(o *sim.Options) { o.PD, o.Store = "storage", store }
}

// declineTrials has every decode that goes first decline. In turns, the one that declines would
// always be the same engine.
func declineTrials(c *config.Config) { c.PD.CacheHitThreshold, c.Schedule.Policy = 1, "random" }

// prepareLMCache finds the port of the notifications before the engines start, who
// must know it.
func prepareLMCache(t *testing.T, fam *matrixFamily) {
	port := freePort(t)
	fam.engine = func(o *sim.Options) { o.PD, o.LMCacheProxy = "lmcache", fmt.Sprintf("tcp://127.0.0.1:%d", port) }
	fam.config = func(c *config.Config) { c.LMCache.ProxyHost, c.LMCache.ProxyPort = "127.0.0.1", port }
	fam.worker = func(w *config.Worker, e *sim.Engine) {
		if w.Role == worker.Decode {
			side := []string{fmt.Sprint(e.SidePort())}
			w.Options = map[string][]string{"init_port": side, "alloc_port": side}
		}
	}
}

// withBootstrap names a prefill worker's bootstrap server, as an operator does.
func withBootstrap(w *config.Worker, e *sim.Engine) {
	if host, port := e.Bootstrap(); port > 0 {
		w.Options = map[string][]string{"bootstrap_host": {host}, "bootstrap_port": {fmt.Sprint(port)}}
	}
}

// matrixCase is what is done to every family. The texts of the cells say what was
// seen, so the document is what the code does, not what it should do.
type matrixCase struct {
	name string
	run  func(*matrixFleet, *testing.T) string
}

// shapes are the ways of asking for one text.
var shapes = []struct{ name, extra string }{
	{"stream", `,"stream":true`},
	{"not streamed", ""},
}

var matrixColumns = allMatrixCases()

func allMatrixCases() (cases []matrixCase) {
	add := func(name string, run func(*matrixFleet, *testing.T) string) {
		cases = append(cases, matrixCase{name, run})
	}
	for _, c := range []struct{ name, kind, extra string }{
		{"", "chat", ""},
		{"n = 2, ", "chat", `,"n":2`},
		{"two prompts, ", "batch", ""},
		{"two prompts, n = 2, ", "batch", `,"n":2`},
	} {
		for _, s := range shapes {
			add(c.name+s.name, func(f *matrixFleet, t *testing.T) string { return f.checkAnswers(t, c.kind, c.extra+s.extra) })
		}
	}
	for _, s := range shapes {
		add("client leaves in prefill, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.abort(t, s.extra, abortPoint{faulted: f.prefills, fault: sim.Fault{Kind: sim.Stall}, receivers: f.prefills})
		})
		add("… while prefill answers, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.abort(t, s.extra, abortPoint{faulted: f.prefills, receivers: f.prefills, fault: sim.Fault{Phase: "answer"}, answering: true})
		})
		add("… in the hand-over, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.abort(t, s.extra, f.handoverPoint())
		})
		add("… in decode, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.abort(t, s.extra, abortPoint{faulted: f.decodes, fault: sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, receivers: f.decodes, faultHolds: true, decoding: true})
		})
	}
	for _, s := range shapes {
		add("prefill fails before its head, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.failsOver(t, f.prefills[0], sim.Fault{Kind: sim.Status}, s.extra)
		})
		add("… within its answer, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.failsOver(t, f.prefills[0], sim.Fault{Kind: sim.Cut, Phase: "body"}, s.extra)
		})
		add("decode fails before its head, "+s.name, func(f *matrixFleet, t *testing.T) string {
			return f.failsOver(t, f.decodes[0], sim.Fault{Kind: sim.Status}, s.extra)
		})
	}
	const fixed = `,"seed":7,"stream":true` // a draw begun anew is another, so such a stream cannot go on elsewhere
	for _, c := range []struct {
		name, extra string
		fault       sim.Fault
	}{
		{"decode's stream begins with an error", `,"stream":true`, sim.Fault{Kind: sim.StreamFail}},
		{"… with an error, and cannot move", fixed, sim.Fault{Kind: sim.StreamFail}},
		{"… with its role and an error, and cannot move", fixed, sim.Fault{Kind: sim.StreamFail, Phase: "role"}},
		{"… ends with its head, and cannot move", fixed, sim.Fault{Kind: sim.Cut, Phase: "body"}},
		{"decode's stream begins with an error, n = 2", `,"n":2,"stream":true`, sim.Fault{Kind: sim.StreamFail}},
	} {
		add(c.name, func(f *matrixFleet, t *testing.T) string { return f.failsOver(t, f.decodes[0], c.fault, c.extra) })
	}
	add("decode fails after first tokens, stream", func(f *matrixFleet, t *testing.T) string {
		return f.failsOver(t, f.decodes[0], sim.Fault{Kind: sim.Cut, After: 4}, `,"stream":true`)
	})
	add("… within its answer, not streamed", func(f *matrixFleet, t *testing.T) string {
		return f.failsOver(t, f.decodes[0], sim.Fault{Kind: sim.Cut, Phase: "body"}, "")
	})
	add("decode fails after first tokens, n = 2, stream", func(f *matrixFleet, t *testing.T) string {
		return f.failsOver(t, f.decodes[0], sim.Fault{Kind: sim.Cut, After: 6}, `,"n":2,"stream":true`)
	})
	return cases
}

// endsIdle is how long a fleet has to let go of everything: it takes a second at most, and
// longer where the machine has other work; leases are 30 s and longer.
const endsIdle = 20 * time.Second

// matrixFleet is two prefill and two decode engines of a family, a router over
// them, and an engine of no family that says what the text must be.
type matrixFleet struct {
	t                 *testing.T // the family's, which outlives the column's
	row, family       *matrixFamily
	router            *testRouter
	prefills, decodes []*sim.Engine
	reference         *sim.Engine
	sent              int
}

func startMatrixFleet(t *testing.T, fam *matrixFamily) *matrixFleet {
	t.Helper()
	row := fam
	fam = fam.prepared(t)
	f := &matrixFleet{t: t, row: row, family: fam, reference: startSim(t, nil)}
	var workers []config.Worker
	for i, role := range []worker.Role{worker.Prefill, worker.Prefill, worker.Decode, worker.Decode} {
		e := startSim(t, func(o *sim.Options) {
			o.Role = role.String()
			if fam.engine != nil {
				fam.engine(o)
			}
		})
		w := simWorker(e, role, fmt.Sprint(role, "-", i%2))
		if fam.worker != nil {
			fam.worker(&w, e)
		}
		workers = append(workers, w)
		if role == worker.Prefill {
			f.prefills = append(f.prefills, e)
		} else {
			f.decodes = append(f.decodes, e)
		}
	}
	f.router = startRouter(t, func(c *config.Config) {
		c.PD.Family = fam.name
		c.Schedule.Policy = "round_robin"   // every engine gets its turn
		c.Health.BreakAfter = 1000          // one decode engine fails again and again
		c.Health.Timeout = 20 * time.Second // one that stands still is not out
		c.PD.AbortDelay, c.PD.AbandonedDecode = time.Second, 0
		if fam.config != nil {
			fam.config(c)
		}
	}, workers...)
	return f
}

func (f *matrixFleet) engines() []*sim.Engine {
	return append(append([]*sim.Engine(nil), f.prefills...), f.decodes...)
}

// body is a request nobody has sent before, and its path.
func (f *matrixFleet) body(kind, extra string) (path, body string) {
	f.sent++
	if kind == "batch" {
		return "/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":["%d a %s","%d b %s"],"max_tokens":8,"ignore_eos":true%s}`, f.sent, prompt, f.sent, prompt, extra)
	}
	return "/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":8,"ignore_eos":true%s}`, f.sent, prompt, extra)
}

// legCount counts the inference requests engines have seen.
func legCount(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += len(generateRequests(e))
	}
	return n
}

func (f *matrixFleet) forgetRequests() {
	for _, e := range f.engines() {
		e.ForgetRequests()
	}
}

// computed is how many prompt tokens the decode engines have computed themselves.
func (f *matrixFleet) computed() (n int) {
	for _, e := range f.decodes {
		n += e.Stats().Sum().LocalCompute
	}
	return n
}

// checkRequest sends one request and says whether every choice of the answer is what
// an undisturbed engine says.
func (f *matrixFleet) checkRequest(t *testing.T, kind, extra string) (a *answer, right bool) {
	t.Helper()
	path, body := f.body(kind, extra)
	want := choicesOf(post(t, f.reference.URL()+path, body))
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, err := tryPost(ctx, f.router.URL+path, body)
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
func choicesOf(a *answer) map[int]string {
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
func (f *matrixFleet) checkAnswers(t *testing.T, kind, extra string) string {
	f.forgetRequests()
	before := f.computed()
	a, right := f.checkRequest(t, kind, extra)
	p, d := legCount(f.prefills), legCount(f.decodes)
	if !f.becomesIdle(endsIdle) {
		t.Errorf("something is kept after the answer: %s%s", f.router.reservedLoad(), f.engineLoad())
	}
	switch {
	case a.Status != 200:
		return fmt.Sprintf("refused, %d", a.Status)
	case !right:
		t.Errorf("the answer is not the undisturbed one: %s", a.Body)
		return "wrong"
	case p == 0 && d == 1:
		return "decode alone"
	case p == 1 && d == 2 && f.row.variant != "":
		return "declined, both legs"
	case p != 1 || d != 1:
		return fmt.Sprintf("%d prefills, %d decodes", p, d)
	case f.computed() > before:
		return "both legs, decode computed"
	}
	return "both legs"
}

// abortPoint is where a client leaves: a fault holds the request, on all of at; seen
// are the engines that must have it by then, as the fault wants it. held: engines must
// hold something of it; decoding: decode must have begun to make tokens.
type abortPoint struct {
	faulted, receivers   []*sim.Engine
	fault                sim.Fault
	faultHolds, decoding bool
	slowDecode           bool // decode takes the request in when its client has left
	answering            bool // prefill has finished, and answers when its client has left
}

// handoverPoint is leaving between the legs.
func (f *matrixFleet) handoverPoint() abortPoint {
	return abortPoint{faulted: f.decodes, receivers: f.decodes, fault: f.family.handoverFault, faultHolds: !f.family.nothingBetweenLegs, slowDecode: f.family.handoverFault.Leg == ""}
}

// inject arms the fault. How long its client needs to leave is nothing to bet on, so a
// decode that is late is so until release.
func (d *abortPoint) inject() (release func()) {
	switch {
	case d.slowDecode:
		return suspendEngines(d.fault, d.faulted...)
	case d.answering:
		return delayAnswers(d.fault, d.faulted...)
	}
	for _, e := range d.faulted {
		e.Fault(d.fault)
	}
	return func() {}
}

// reached says whether the engines have the request.
func (d *abortPoint) reached() bool {
	for _, e := range d.receivers {
		for _, rec := range generateRequests(e) {
			if bytes.Contains(rec.Body, []byte(d.fault.Body)) {
				return true
			}
		}
	}
	return false
}

// leaves: a client that goes leaves nothing behind, or what it leaves is freed
// with the lease.
func (f *matrixFleet) abort(t *testing.T, extra string, d abortPoint) string {
	f.forgetRequests()
	release := d.inject()
	defer release()
	_, body := f.body("chat", extra)
	body = strings.Replace(body, `"max_tokens":8`, `"max_tokens":2000`, 1)
	made := generated(f.decodes)
	l := startRequest(t, f.router, fmt.Sprint("leaves-", f.sent), body)
	eventually(t, testTimeout, "the leg is there", d.reached)
	if d.faultHolds {
		eventually(t, testTimeout, "an engine holds something of it", f.hasKV)
	}
	if d.answering {
		eventually(t, testTimeout, "prefill answers", func() bool { return answering(f.prefills) > 0 })
	}
	if d.decoding {
		eventually(t, testTimeout, "tokens are made", func() bool { return generated(f.decodes) > made })
	} else {
		time.Sleep(30 * time.Millisecond) // so that it is inside, not at the door
	}
	if strings.Contains(extra, "stream") && d.decoding {
		l.event(t)
	}
	abortedAt := l.disconnect()
	time.Sleep(30 * time.Millisecond) // in which a router that cuts too early does
	release()
	released := f.becomesIdle(endsIdle)
	for _, e := range d.faulted {
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

// generated is how many tokens engines have made.
func generated(engines []*sim.Engine) (n int) {
	for _, e := range engines {
		n += e.Stats().Sum().GeneratedTokens
	}
	return n
}

// restart gives the family a new fleet, when the old one keeps what would spoil
// what comes next.
func (f *matrixFleet) restart() {
	sent := f.sent
	*f = *startMatrixFleet(f.t, f.row)
	f.sent = sent
}

// fails: the leg on e fails once. Requests are sent until e was chosen.
func (f *matrixFleet) failsOver(t *testing.T, e *sim.Engine, fault sim.Fault, extra string) string {
	fault.N = 1
	if f.row.variant != "" && slices.Contains(f.decodes, e) {
		fault.Body = noTrial // not the decode that declines anyhow
	}
	e.Fault(fault)
	cell := f.untilHit(t, e, fault, extra)
	e.ClearFaults()
	if !f.becomesIdle(endsIdle) {
		cell += ", blocks kept until the lease ends"
		f.restart()
	}
	f.ready(t)
	return cell
}

func (f *matrixFleet) untilHit(t *testing.T, e *sim.Engine, fault sim.Fault, extra string) string {
	for range 50 {
		f.forgetRequests()
		before, migrated := e.Stats().Faults, f.router.metric(`sluice_migrations_total{outcome="done"}`)
		a, right := f.checkRequest(t, "chat", extra)
		if e.Stats().Faults == before {
			continue
		}
		streamed := bytes.HasPrefix(a.Body, []byte("data:"))
		switch {
		case a.Status == 200 && right && f.router.metric(`sluice_migrations_total{outcome="done"}`) > migrated:
			return "goes on elsewhere"
		case a.Status == 200 && right && f.row.concurrent && fault.Phase == "body" && slices.Contains(f.prefills, e):
			return "unseen"
		case a.Status == 200 && right && legCount(f.engines()) <= 1+min(1, legCount(f.prefills)):
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

// hasKV says whether an engine runs or keeps anything.
func (f *matrixFleet) hasKV() bool { return f.engineLoad() != "" }

// engineLoad is what engines run or keep.
func (f *matrixFleet) engineLoad() (s string) {
	for i, e := range f.engines() {
		if n := e.Stats().Sum(); e.Alive() && (n.Running+n.Waiting+n.Leases+n.Rooms != 0 || n.BlocksFree != n.BlocksTotal) {
			s += fmt.Sprintf(" engine %d: %d running, %d waiting, %d leases, %d rooms, %d blocks", i, n.Running, n.Waiting, n.Leases, n.Rooms, n.BlocksTotal-n.BlocksFree)
		}
	}
	return s
}

// becomesIdle says whether within that time nothing is under way or kept anywhere.
func (f *matrixFleet) becomesIdle(within time.Duration) bool {
	for end := time.Now().Add(within); ; time.Sleep(5 * time.Millisecond) {
		if f.router.reservedLoad() == "" && !f.hasKV() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

func (f *matrixFleet) ready(t *testing.T) {
	t.Helper()
	eventually(t, 10*time.Second, "all workers are ready", func() bool { return allReady(f.router) })
}

const matrixDoc = "../../docs/pd-matrix.md"

// TestPDMatrix runs every family through every way of going and failing, on the
// simulated engines, and holds docs/pd-matrix.md to what was seen.
func TestPDMatrix(t *testing.T) {
	rows := make([][]string, len(matrixFamilies))
	t.Run("families", func(t *testing.T) { // at the same time, for some wait long
		for i := range matrixFamilies {
			fam := &matrixFamilies[i]
			rows[i] = make([]string, len(matrixColumns))
			t.Run(fam.name+fam.variant, func(t *testing.T) {
				t.Parallel()
				f := startMatrixFleet(t, fam)
				for k, c := range matrixColumns {
					t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) { rows[i][k] = c.run(f, t) })
				}
			})
		}
	})
	for _, row := range rows {
		if t.Failed() || slices.Contains(row, "") { // -run chose some of them
			return
		}
	}
	got := matrixPage(rows)
	if *rewrite {
		if err := os.WriteFile(matrixDoc, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(matrixDoc)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("docs/pd-matrix.md is not what was seen (go test ./cmd/sluice -run TestPDMatrix -rewrite writes it anew):\n%s", got)
	}
}

// matrixPage is the document: a column a family, for there are more ways than
// families.
func matrixPage(rows [][]string) string {
	var b strings.Builder
	b.WriteString(inBackticks(`# P/D behaviour by family

This page shows, family by family, what happens to a request when it succeeds, when its client leaves, and when an engine fails.
A test writes it (~go test ./cmd/sluice -run TestPDMatrix -rewrite~) with two prefill engines, two decode engines, all simulated, and a router in front of them, one request at a time.
Every answer called right equals that of an undisturbed engine.

|`))
	for i := range matrixFamilies {
		b.WriteString(" | " + matrixFamilies[i].name + matrixFamilies[i].variant)
	}
	b.WriteString(" |\n|---" + strings.Repeat("|---", len(matrixFamilies)) + "|\n")
	for k, c := range matrixColumns {
		b.WriteString("| " + c.name)
		for i := range rows {
			b.WriteString(" | " + rows[i][k])
		}
		b.WriteString(" |\n")
	}
	b.WriteString(inBackticks(`
| word | meaning |
|---|---|
| both legs | prefill on one engine, its KV to another, which computed nothing of the prompt |
| declined, both legs | the same, after decode, which was asked first, held too little |
| decode alone | the family cannot hand this request over |
| freed at once | every block, room, lease and reservation was released, by nobody's time-out; the leases of these engines are 30 s and longer |
| run again | the client saw a whole right answer, from a second pair or decode engine |
| unseen | the same, or decode had the KV already and went on |
| goes on elsewhere | a whole right answer whose first tokens are the first engine's ([migration.md](migration.md)) |
| error event | the stream ends with an error in the API's form |

**While prefill answers**: the engine has finished and keeps the blocks, and its answer, the only thing that names them, is on its way.
The router waits for it, for a second and, where the prefill is expected to take up to two seconds more, for that time as well.
Then it closes its sending side.

**A decode that is not streamed** shows no sign of life before its end.
The router cancels it when ~pd.abort_delay~ has passed since it was sent (1 s here) and its engine has answered two probes, one after the other, that were sent after it.
A decode that is delayed for longer, in an engine that answers, leaves its blocks to the lease, or to the side channel where that releases.
From vLLM 0.21 on such a decode may run on for ~pd.abandoned_decode_timeout~ before that (0 here): if it is cancelled, its engine notifies prefill a second time of blocks that it has read, and prefill logs an error.

**A stream** is cancelled after its first event, or ~pd.abort_delay~ after its head: vLLM sends the head before its engine has the request.
`))
	return b.String()
}

// inBackticks turns each tilde of text into a backtick, which a raw string cannot hold.
func inBackticks(text string) string { return strings.ReplaceAll(text, "~", "`") }
