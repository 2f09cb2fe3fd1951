package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/worker"
)

// startSidecar runs a sidecar as its command line says and waits until it is ready.
func startSidecar(t *testing.T, args ...string) *testRouter {
	t.Helper()
	r, err := launchSidecar(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the sidecar is ready", func() bool {
		status, _ := r.Pages.Ready(true)
		return status == 200
	})
	return r
}

func launchSidecar(t *testing.T, args ...string) (*testRouter, error) {
	t.Helper()
	fs := flag.NewFlagSet("sidecar", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	flags := config.RegisterSidecarFlags(fs)
	if err := fs.Parse(append([]string{"--listen", "127.0.0.1:0", "--set", "health.interval=50ms", "--pool-wait", "200ms"}, args...)); err != nil {
		t.Fatal(err)
	}
	cfg, err := flags.Resolve(nil)
	if err != nil {
		return nil, err
	}
	logs := new(syncBuffer)
	r, err := app.New(app.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(logs, nil)), Sidecar: flags})
	if err != nil {
		return nil, err
	}
	return runTest(t, "sidecar", r, logs), nil
}

func hostPort(e interface{ URL() string }) string { return strings.TrimPrefix(e.URL(), "http://") }

// deadPort is an address where nothing listens.
func deadPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestSidecarPrefillFromHeader(t *testing.T) {
	p0, p1, d, whole := startSim(t, simRole("prefill")), startSim(t, simRole("prefill")), startSim(t, simRole("decode")), startSim(t, nil)
	r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	dead := deadPort(t)
	for i, c := range []struct{ header, value, by string }{
		{"x-prefiller-host-port", hostPort(p0), hostPort(p0)},
		{"X-PREFILLER-HOST-PORT", hostPort(p1) + "," + hostPort(p0), hostPort(p1)},
		{"x-prefiller-host-port", dead + ", " + hostPort(p0), hostPort(p0)},
		{"x-sluice-prefill", hostPort(p1), hostPort(p1)},
		{"x-sluice-prefill", "none", ""},
		{"x-unrelated", hostPort(p1), ""},
		{"x-prefiller-host-port", dead, ""}, // nobody else: the engine does it
	} {
		for j, f := range requestForms(100+i, "") {
			a := post(t, r.URL+f.path, f.body, c.header, c.value, "X-Request-Id", fmt.Sprintf("n-%d-%d", i, j))
			wantSameAnswer(t, c.header+": "+c.value+": "+f.name, a, post(t, whole.URL()+f.path, f.body))
			if got := a.Header.Get("X-Sluice-Prefill-Worker"); got != c.by {
				t.Errorf("%s: %s: prefill by %q, want %q", c.header, c.value, got, c.by)
			}
			if got := a.Header.Get("X-Request-Id"); got != fmt.Sprintf("n-%d-%d", i, j) {
				t.Errorf("request id %q", got)
			}
		}
	}
	for _, rec := range append(generateRequests(d), append(generateRequests(p0), generateRequests(p1)...)...) {
		if rec.Header("x-prefiller-host-port")+rec.Header("x-sluice-prefill")+rec.Header("x-data-parallel-host-port") != "" {
			t.Errorf("an engine was told who prefills: %v", rec.Headers)
		}
		if rec.Path == "/tokenize" {
			t.Error("an engine was asked to tokenize although nothing is chosen")
		}
	}
	// dead is tried until its breaker opens, then it rests.
	for range 8 {
		wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(""), "x-prefiller-host-port", dead), 200)
	}
	if r.fallbacks("prefill_resting") == 0 || r.fallbacks("plain_decode") == 0 {
		t.Errorf("a dead prefill worker: %v times resting, %v decoded plainly", r.fallbacks("prefill_resting"), r.fallbacks("plain_decode"))
	}
	if n := r.metric(`sluice_rank_legs_total{worker="` + hostPort(p0) + `",rank="0",leg="prefill",outcome="ok"}`); n != 8 {
		t.Errorf("%v legs are counted for a named worker; want 8", n)
	}
	wantIdle(t, r, 10*time.Second, p0, p1, d)
}

// The order of a list is the choice for a prompt that is only to be warmed, too.
func TestSidecarPrefillOnlyInOrder(t *testing.T) {
	p0, p1, d := startSim(t, simRole("prefill")), startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	for range 4 {
		for _, list := range [][2]string{{hostPort(p0), hostPort(p1)}, {hostPort(p1), hostPort(p0)}} {
			a := post(t, r.URL+"/v1/chat/completions", chat(""), "x-prefiller-host-port", list[0]+","+list[1], "X-Sluice-Prefill-Only", "true")
			if w := a.prefillOnly(t); w.Worker != list[0] {
				t.Errorf("of %v %s warmed the prompt", list, w.Worker)
			}
		}
	}
}

// What is not allowed is refused before anything is connected to.
func TestSidecarRefusesHosts(t *testing.T) {
	var hits atomic.Int32
	victim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { hits.Add(1) }))
	defer victim.Close()
	_, port, _ := net.SplitHostPort(victim.Listener.Addr().String())
	d := startSim(t, simRole("decode"))
	for _, c := range []struct{ networks, value, says string }{
		{"10.0.0.0/8", "127.0.0.1:" + port, "10.0.0.0/8"},
		{"10.0.0.0/8", "[::ffff:127.0.0.1]:" + port, "10.0.0.0/8"},
		{"0.0.0.0/0", "127.0.0.1:" + port, "0.0.0.0/0"},
		{"127.0.0.0/8", "2130706433:" + port, "number"},
		{"127.0.0.0/8", "u@127.0.0.1:" + port, "host"},
		{"127.0.0.0/8", "http://127.0.0.1:" + port, "host"},
		{"127.0.0.0/8", "127.0.0.1:80", "--prefill-ports"},
		{"10.0.0.0/8", "localhost:" + port, "127.0.0.1"},
		{"", "127.0.0.1:" + port, "--prefill-networks"},
	} {
		r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", c.networks)
		a := post(t, r.URL+"/v1/chat/completions", chat(""), "x-prefiller-host-port", c.value)
		wantReason(t, a, 400, "bad_header")
		msg, _, _ := a.errorOf(t)
		if !strings.Contains(msg, "X-Prefiller-Host-Port") || !strings.Contains(msg, c.says) {
			t.Errorf("%s with %q: %s", c.value, c.networks, msg)
		}
		if r.Selector.Workers() != 0 {
			t.Errorf("%s: a guest of a refused request", c.value)
		}
	}
	if hits.Load() != 0 {
		t.Errorf("%d connections were made to a host that may not be named", hits.Load())
	}
	// A worker that may be named cannot send us on to one that may not.
	sends := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, victim.URL+"/v1/chat/completions", http.StatusTemporaryRedirect)
	}))
	defer sends.Close()
	r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	http.DefaultClient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	defer func() { http.DefaultClient.CheckRedirect = nil }()
	post(t, r.URL+"/v1/chat/completions", chat(""), "x-prefiller-host-port", strings.TrimPrefix(sends.URL, "http://"))
	if hits.Load() != 0 {
		t.Error("a redirect was followed")
	}
}

func TestSidecarRanks(t *testing.T) {
	p := startSim(t, simRole("prefill"))
	for _, kind := range []string{"behind one URL", "with URLs of their own"} {
		d := startSim(t, func(o *sim.Options) { o.Role, o.Ranks, o.RankPorts = "decode", 3, true })
		engine := d.URL() + ",ranks=3"
		names := []string{"10.1.2.3:8000", "10.1.2.3:8001", "10.1.2.3:8002"}
		args := []string{"--rank-addresses", strings.Join(names, ",")}
		if kind != "behind one URL" {
			engine = d.URL() + ",rank_urls=" + d.RankURLs()[0] + "+" + d.RankURLs()[1] + "+" + d.RankURLs()[2]
			args, names = nil, nil
			for i := range 3 {
				names = append(names, strings.TrimPrefix(d.RankURLs()[i], "http://"))
			}
		}
		r := startSidecar(t, append(args, "--engine", engine, "--prefill-networks", "127.0.0.0/8")...)
		for i, name := range names {
			for _, prefill := range []string{"", hostPort(p)} {
				d.ForgetRequests()
				headers := []string{"x-data-parallel-host-port", name}
				if prefill != "" {
					headers = append(headers, "x-prefiller-host-port", prefill)
				}
				a := post(t, r.URL+"/v1/chat/completions", chat(""), headers...)
				wantStatus(t, a, 200)
				recs := generateRequests(d)
				if len(recs) != 1 || recs[0].Rank != i || a.Header.Get("X-Sluice-Rank") != strconv.Itoa(i) || a.Header.Get("X-Sluice-Prefill-Worker") != prefill {
					t.Errorf("%s: %s with prefill %q went to %+v, %v", kind, name, prefill, recs, a.Header)
				}
			}
		}
		a := post(t, r.URL+"/v1/chat/completions", chat(""), "x-data-parallel-host-port", "169.254.169.254:80")
		wantReason(t, a, 400, "bad_header")
		if msg, _, _ := a.errorOf(t); !strings.Contains(msg, names[2]+" (rank 2)") {
			t.Errorf("%s: %s", kind, msg)
		}
		for i := range 9 { // without the header all ranks are used
			wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(fmt.Sprintf(`,"seed":%d`, i))), 200)
		}
	}
}

// Numbers beyond 2^53, the order of members and unknown ones reach both engines
// as they are.
func TestSidecarForwardsBytes(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	const body = `{"zz":{"b":1e400,"a":[18446744073709551615]},"seed":9007199254740993,"model":"sim","messages":[{"role":"user","content":"caf\u00e9 ☕"}],"max_tokens":8,"a":-0.0}`
	wantStatus(t, post(t, r.URL+"/v1/chat/completions", body), 200)
	streamed := strings.Replace(body, `"seed"`, `"stream":true,"seed"`, 1)
	wantStatus(t, post(t, r.URL+"/v1/chat/completions", streamed), 200)
	for i, want := range []string{body, streamed} {
		if got := string(generateRequests(d)[i].Body); got != want {
			t.Errorf("plain decode was sent\n%s\nwant\n%s", got, want)
		}
	}
	d.ForgetRequests()
	wantStatus(t, post(t, r.URL+"/v1/chat/completions", body, "x-prefiller-host-port", hostPort(p)), 200)
	kept := strings.TrimSuffix(body, "}")
	if got := string(generateRequests(d)[0].Body); !strings.HasPrefix(got, kept+`,"kv_transfer_params":{`) {
		t.Errorf("decode was sent\n%s", got)
	}
	kept = strings.Replace(kept, `"max_tokens":8`, `"max_tokens":1`, 1)
	if got := string(generateRequests(p)[0].Body); !strings.HasPrefix(got, kept+`,"stream":false`) {
		t.Errorf("prefill was sent\n%s", got)
	}
}

func TestSidecarLocalPrefill(t *testing.T) {
	p0, p1, d := startSim(t, simRole("prefill")), startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startSidecar(t, "--engine", d.URL(), "--prefill", p0.URL(), "--prefill", p1.URL(), "--model", "sim")
	eventually(t, 5*time.Second, "both prefill workers are known", func() bool { return allReady(r) })
	first := post(t, r.URL+"/v1/chat/completions", chat(""))
	wantStatus(t, first, 200)
	by := first.Header.Get("X-Sluice-Prefill-Worker")
	if by == "" {
		t.Fatal("no prefill worker was chosen")
	}
	for range 3 { // the same prefix stays where it is
		if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Header.Get("X-Sluice-Prefill-Worker") != by {
			t.Errorf("the same prompt went to %s, then to %s", by, a.Header.Get("X-Sluice-Prefill-Worker"))
		}
	}
	if a := post(t, r.URL+"/v1/chat/completions", chat(""), "x-sluice-prefill", "none"); a.Header.Get("X-Sluice-Prefill-Worker") != "" {
		t.Error("prefill although the request wants none")
	}
	for _, e := range []*sim.Engine{p0, p1, d} {
		for _, rec := range e.Requests() {
			if rec.Path == "/tokenize" {
				t.Error("an engine was asked to tokenize")
			}
		}
	}
}

// TestSidecarFamilies: every family, its prefill worker named by the request: the
// right answer, nothing of the prompt computed beside decode, and nothing left of a
// client that goes or of a prefill that fails.
func TestSidecarFamilies(t *testing.T) {
	whole := startSim(t, nil)
	for i := range matrixFamilies {
		if matrixFamilies[i].variant != "" {
			continue // the same legs in another order
		}
		fam := matrixFamilies[i].prepared(t)
		t.Run(fam.name, func(t *testing.T) {
			p, prefill := sidecarEngine(t, fam, worker.Prefill)
			d, decode := sidecarEngine(t, fam, worker.Decode)
			args := []string{"--pd", fam.name, "--prefill-networks", "127.0.0.0/8", "--model", "sim", "--set", "pd.abort_delay=100ms"}
			engine, named := d.URL(), hostPort(p)
			for key, values := range decode.Options {
				engine += "," + key + "=" + strings.Join(values, "+")
			}
			if port := prefill.Options["bootstrap_port"]; port != nil {
				named += ";bootstrap_port=" + port[0] // a host is nothing that a request may name beside
			}
			cfg := config.Default()
			if fam.config != nil {
				fam.config(cfg)
				args = append(args, "--nixl-proxy-port", strconv.Itoa(cfg.LMCache.ProxyPort))
			}
			r := startSidecar(t, append(args, "--engine", engine)...)
			for i, f := range requestForms(300, "") {
				a := post(t, r.URL+f.path, f.body, "x-sluice-prefill", named, "X-Request-Id", fmt.Sprintf("%s-%d", fam.name, i))
				wantSameAnswer(t, f.name, a, post(t, whole.URL()+f.path, f.body))
				if got := a.Header.Get("X-Sluice-Prefill-Worker"); got != hostPort(p) {
					t.Errorf("%s: prefill by %q", f.name, got)
				}
			}
			most := 0
			if fam.name == "storage" {
				most = 4 * 16 // the store keeps whole blocks
			}
			if s := d.Stats().Sum(); s.LocalCompute > most || s.GarbageReads+s.RoomsReused+s.RoomsMismatched != 0 {
				t.Errorf("decode computed %d tokens of prompts: %+v", s.LocalCompute, s)
			}
			wantIdle(t, r, 10*time.Second, p, d)

			p.Fault(sim.Fault{Kind: sim.Status, N: 1})
			f := requestForms(301, "")[0]
			a := post(t, r.URL+f.path, f.body, "x-sluice-prefill", named)
			if fam.name == "sglang" { // its decode engines cannot prefill
				if a.Status < 500 {
					t.Errorf("status %d without a prefill", a.Status)
				}
			} else {
				wantSameAnswer(t, "the prefill worker fails", a, post(t, whole.URL()+f.path, f.body))
			}
			p.ClearFaults()

			d.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond})
			ctx, cancel := context.WithCancel(context.Background())
			gone := make(chan struct{})
			before := d.Stats().Sum().GeneratedTokens
			go func() {
				defer close(gone)
				tryPost(ctx, r.URL+"/v1/chat/completions", strings.Replace(chat(`,"stream":true`), `"max_tokens":12`, `"max_tokens":2000,"ignore_eos":true`, 1), "x-sluice-prefill", named)
			}()
			eventually(t, 10*time.Second, "decode makes tokens", func() bool { return d.Stats().Sum().GeneratedTokens > before })
			cancel()
			<-gone
			wantIdle(t, r, 3*time.Second, p, d) // the lease is 30 s and longer
		})
	}
}

// sidecarEngine is one engine of a family, and its worker as an operator writes it.
func sidecarEngine(t *testing.T, fam *matrixFamily, leg worker.Role) (*sim.Engine, config.Worker) {
	t.Helper()
	e := startSim(t, func(o *sim.Options) {
		o.Role = leg.String()
		if fam.engine != nil {
			fam.engine(o)
		}
	})
	w := simWorker(e, leg, leg.String())
	if fam.worker != nil {
		fam.worker(&w, e)
	}
	return e, w
}

// SGLang's two legs meet at the bootstrap server of the worker named; a request
// that names none cannot be decoded there.
func TestSidecarSGLang(t *testing.T) {
	meet := make(chan struct{})
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) { meet <- struct{}{}; replyJSON(w, 200, wholeAnswer) })
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) { <-meet; answerOK(w, r) })
	r := startSidecar(t, "--pd", "sglang", "--engine", d.URL, "--prefill-networks", "127.0.0.0/8", "--prefill-keys", "bootstrap_port=8998", "--model", "sim")
	at := strings.TrimPrefix(p.URL, "http://")
	for i, f := range sglangEndpoints {
		for j, h := range []struct{ name, value, port string }{{"x-prefiller-host-port", at, "8998"}, {"x-sluice-prefill", at + ";bootstrap_port=9001", "9001"}} {
			a := post(t, r.URL+"/v1/chat/completions", chat(f.more), h.name, h.value)
			if a.Status != 200 || a.text(t) != "ok" {
				t.Fatalf("%s: %d %s", f.name, a.Status, a.Body)
			}
			n := 2*i + j
			if room := p.room(t, n); room != d.room(t, n) {
				t.Errorf("%s: rooms %s and %s", f.name, room, d.room(t, n))
			}
			d.mu.Lock()
			if got := d.bodies[n]; !strings.Contains(got, `"bootstrap_port":`+h.port) || !strings.Contains(got, `"bootstrap_host":"127.0.0.1"`) {
				t.Errorf("%s: decode was sent %s", f.name, got)
			}
			d.mu.Unlock()
		}
	}
	began := time.Now()
	a := post(t, r.URL+"/v1/chat/completions", chat(""))
	wantReason(t, a, 503, "no_prefill_worker")
	if took := time.Since(began); took > r.Config.Timeouts.PoolWait/2 {
		t.Errorf("a request that can never run waited %s", took)
	}
}

// The engine is what readiness is about; its pages are shown as they are.
func TestSidecarPages(t *testing.T) {
	d := startSim(t, simRole("decode"))
	r := startSidecar(t, "--engine", d.URL(), "--prefill", "http://"+deadPort(t), "--prefill-networks", "127.0.0.0/8")
	wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(""), "x-sluice-prefill", "none"), 200)
	if got, want := get(t, r.URL+"/v1/models").Body, get(t, d.URL()+"/v1/models").Body; !bytes.Equal(dataMember(t, got), dataMember(t, want)) {
		t.Errorf("models: %s, the engine's own: %s", got, want)
	}
	text := string(get(t, r.URL+"/metrics").Body)
	for _, series := range []string{"vllm:num_requests_running", "sluice_requests_accepted_total", "sluice_rank_legs_total"} {
		if !strings.Contains(text, series) {
			t.Errorf("/metrics lacks %s", series)
		}
	}
	own := startSidecar(t, "--engine", d.URL(), "--engine-metrics=false")
	if text := string(get(t, own.URL+"/metrics").Body); strings.Contains(text, "vllm:") || !strings.Contains(text, "sluice_") {
		t.Error("--engine-metrics=false")
	}
	// A model that it was not told of is the engine's to know.
	a := post(t, r.URL+"/v1/chat/completions", strings.Replace(chat(""), `"sim"`, `"other"`, 1), "x-sluice-prefill", "none")
	if a.Status != 404 || a.Header.Get("X-Sluice-Reason") != "" {
		t.Errorf("an unknown model: %d %s %s", a.Status, a.Header.Get("X-Sluice-Reason"), a.Body)
	}
	d.Fault(sim.Fault{Kind: sim.Refuse})
	eventually(t, 5*time.Second, "not ready without the engine", func() bool { return get(t, r.URL+"/readyz").Status == 503 })
	a = post(t, r.URL+"/v1/chat/completions", chat(""), "x-sluice-prefill", "none")
	if a.Status != 503 {
		t.Errorf("without the engine: %d %s", a.Status, a.Body)
	}
	d.ClearFaults()
	eventually(t, 5*time.Second, "ready again", func() bool { return get(t, r.URL+"/readyz").Status == 200 })
}

// dataMember is the list itself of a list of models.
func dataMember(t *testing.T, body []byte) []byte { return []byte(member(t, body, "data")) }

func TestSidecarWrongFlags(t *testing.T) {
	for _, c := range []struct {
		args string
		says string
	}{
		{"", "--engine"},
		{"--engine http://127.0.0.1:1 --engine http://127.0.0.1:2", "one"},
		{"--engine http://127.0.0.1:1 --prefill-networks 10.0.0.0", "--prefill-networks"},
		{"--engine http://127.0.0.1:1 --prefill-ports 0", "--prefill-ports"},
		{"--engine http://127.0.0.1:1 --prefill-keys id=a", "--prefill-keys"},
		{"--engine http://127.0.0.1:1 --prefill-keys x=a", "--prefill-keys"},
		{"--engine http://127.0.0.1:1 --prefill-most 0", "--prefill-most"},
		{"--engine http://127.0.0.1:1 --prefill-idle 1ms", "--prefill-idle"},
		{"--engine http://127.0.0.1:1,ranks=2 --rank-addresses a:1", "--rank-addresses"},
		{"--engine http://127.0.0.1:1 --rank-addresses a", "--rank-addresses"},
	} {
		_, err := launchSidecar(t, strings.Fields(c.args)...)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v", c.args, err)
		}
	}
}

// Clients that leave in every phase, and many workers named once, leave nothing.
func TestSidecarLeavesNoState(t *testing.T) {
	n := 600
	if testing.Short() {
		n = 150
	}
	quick := func(r string) func(*sim.Options) {
		return func(o *sim.Options) { o.Role, o.Speed, o.Lease = r, 4, time.Second }
	}
	p0, p1, d := startSim(t, quick("prefill")), startSim(t, quick("prefill")), startSim(t, quick("decode"))
	r := startSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8", "--lease", "1s", "--set", "pd.lease_margin=500ms", "--set", "pd.abort_delay=50ms", "--prefill-idle", "1s")
	for i := range 8 {
		wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(fmt.Sprintf(`,"stream":%v`, i%2 == 0)), "x-prefiller-host-port", hostPort(p0)), 200)
	}
	dropIdle()
	wantIdle(t, r, 10*time.Second, p0, p1, d)
	time.Sleep(50 * time.Millisecond)
	before := moduleGoroutines()
	var wg sync.WaitGroup
	var remaining atomic.Int64
	work := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range work {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i*7%40)*time.Millisecond)
				value := []string{hostPort(p0), hostPort(p1) + "," + hostPort(p0), fmt.Sprintf("127.1.%d.%d:9", i/200, 1+i%200), ""}[i%4]
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, i%40, prompt, 1+i%20, i%3 == 0)
				if _, err := tryPost(ctx, r.URL+"/v1/chat/completions", body, "x-prefiller-host-port", value); err != nil {
					remaining.Add(1)
				}
				cancel()
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	if remaining.Load() < int64(n)/10 {
		t.Errorf("%d of %d left: the test shows little", remaining.Load(), n)
	}
	wantIdle(t, r, 5*time.Second, p0, p1, d)
	dropIdle()
	eventually(t, 10*time.Second, "the workers named are forgotten", func() bool { return r.Selector.Workers() == 0 && r.Fleet.TransientWorkers() == 0 })
	eventually(t, 10*time.Second, "goroutines are back", func() bool { return moduleGoroutines() <= before })
	var series bytes.Buffer
	r.Metrics.WritePrometheus(&series)
	if strings.Contains(series.String(), `worker="127.`) {
		t.Error("series of forgotten workers are shown")
	}
	wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(""), "x-prefiller-host-port", hostPort(p0)), 200)
}

// The process itself: its memory after a thousand requests, and its end with a
// stream under way.
func TestSidecarProcess(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, func(o *sim.Options) { o.Role, o.Cost.Step, o.Speed = "decode", 2*time.Millisecond, 1 })
	quickD := startSim(t, simRole("decode"))
	pr := launch(t, nil, "sidecar", "--listen", "127.0.0.1:0", "--engine", quickD.URL(), "--prefill-networks", "127.0.0.0/8")
	pr.ready(t)
	url := "http://" + pr.first + "/v1/chat/completions"
	n := 1000
	if testing.Short() {
		n = 200
	}
	for i := range n {
		wantStatus(t, post(t, url, chat(fmt.Sprintf(`,"stream":%v`, i%2 == 0)), "x-prefiller-host-port", []string{hostPort(p), ""}[i%2]), 200)
	}
	if rss := rssMiB(t, pr.cmd.Process.Pid); rss > 40 {
		t.Errorf("%.1f MiB resident after %d requests; want 40 at most", rss, n)
	} else {
		t.Logf("%.1f MiB resident after %d requests", rss, n)
	}

	slow := launch(t, nil, "sidecar", "--listen", "127.0.0.1:0", "--engine", d.URL())
	slow.ready(t)
	resp, err := http.Post("http://"+slow.first+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"sim","messages":[{"role":"user","content":"go on"}],"max_tokens":150,"ignore_eos":true,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	if err := slow.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(rest, []byte("data: [DONE]")) {
		t.Errorf("the stream ended with %v: …%s", err, rest[max(0, len(rest)-100):])
	}
	if code := slow.wait(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d\n%s", code, slow.stderr.tail(2000))
	}
}

func rssMiB(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.Atoi(strings.Fields(v)[0])
			if err != nil {
				t.Fatal(err)
			}
			return float64(kib) / 1024
		}
	}
	t.Fatal("no VmRSS")
	return 0
}
