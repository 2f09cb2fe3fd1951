package sidecar

import (
	"bytes"
	"context"
	"fmt"
	"io"
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
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// deadPort returns an address on which nothing listens.
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
	p0, p1, d, whole := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, nil)
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	dead := deadPort(t)
	for i, c := range []struct{ header, value, by string }{
		{"x-prefiller-host-port", harness.HostPort(p0), harness.HostPort(p0)},
		{"X-PREFILLER-HOST-PORT", harness.HostPort(p1) + "," + harness.HostPort(p0), harness.HostPort(p1)},
		{"x-prefiller-host-port", dead + ", " + harness.HostPort(p0), harness.HostPort(p0)},
		{"x-sluice-prefill", harness.HostPort(p1), harness.HostPort(p1)},
		{"x-sluice-prefill", "none", ""},
		{"x-unrelated", harness.HostPort(p1), ""},
		{"x-prefiller-host-port", dead, ""}, // no other prefill worker: the engine runs the whole request
	} {
		for j, f := range harness.RequestForms(100+i, "") {
			a := harness.Post(t, r.URL+f.Path, f.Body, c.header, c.value, "X-Request-Id", fmt.Sprintf("n-%d-%d", i, j))
			harness.WantSameAnswer(t, c.header+": "+c.value+": "+f.Name, a, harness.Post(t, whole.URL()+f.Path, f.Body))
			if got := a.Header.Get("X-Sluice-Prefill-Worker"); got != c.by {
				t.Errorf("%s: %s: prefill by %q, want %q", c.header, c.value, got, c.by)
			}
			if got := a.Header.Get("X-Request-Id"); got != fmt.Sprintf("n-%d-%d", i, j) {
				t.Errorf("request id %q", got)
			}
		}
	}
	for _, rec := range append(harness.GenerateRequests(d), append(harness.GenerateRequests(p0), harness.GenerateRequests(p1)...)...) {
		if rec.Header("x-prefiller-host-port")+rec.Header("x-sluice-prefill")+rec.Header("x-data-parallel-host-port") != "" {
			t.Errorf("an engine received the prefill header: %v", rec.Headers)
		}
		if rec.Path == "/tokenize" {
			t.Error("an engine was asked to tokenize although nothing is chosen")
		}
	}
	// The router tries the dead worker until its breaker opens.
	for range 8 {
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-prefiller-host-port", dead), 200)
	}
	if r.Fallbacks("prefill_unavailable") == 0 || r.Fallbacks("decode_only") == 0 {
		t.Errorf("a dead prefill worker: %v times resting, %v decoded plainly", r.Fallbacks("prefill_unavailable"), r.Fallbacks("decode_only"))
	}
	if n := r.Metric(`sluice_rank_legs_total{worker="` + harness.HostPort(p0) + `",rank="0",leg="prefill",outcome="ok"}`); n != 8 {
		t.Errorf("%v legs are counted for a named worker; want 8", n)
	}
	harness.WantIdle(t, r, 10*time.Second, p0, p1, d)
}

// TestSidecarDecodeAtCapacity: no prefill runs for a request if the engine is at its limit, although
// the admission queue, in which a sidecar's requests do not wait, is on.
func TestSidecarDecodeAtCapacity(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8", "--set", "limits.rank_requests=1")
	ask := func() *harness.Answer {
		return harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-prefiller-host-port", harness.HostPort(p))
	}
	rank := r.Fleet.View().Workers[0].Ranks[0]
	rank.Requests.Add(1)
	got := ask()
	rank.Requests.Add(-1)
	if got.Status != 429 || got.Header.Get("X-Sluice-Reason") != "pool_overloaded" || !strings.Contains(string(got.Body), "decode") {
		t.Errorf("status %d, reason %q: %s", got.Status, got.Header.Get("X-Sluice-Reason"), got.Body)
	}
	if n := p.Stats().Ranks[0].Requests; n != 0 {
		t.Errorf("prefill served %d requests; want none", n)
	}
	harness.WantStatus(t, ask(), 200)
}

// TestSidecarPrefillOnlyInOrder: the order of the listed workers also decides for prefill-only
// requests.
func TestSidecarPrefillOnlyInOrder(t *testing.T) {
	p0, p1, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	for range 4 {
		for _, list := range [][2]string{{harness.HostPort(p0), harness.HostPort(p1)}, {harness.HostPort(p1), harness.HostPort(p0)}} {
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-prefiller-host-port", list[0]+","+list[1], "X-Sluice-Prefill-Only", "true")
			if w := a.PrefillOnly(t); w.Worker != list[0] {
				t.Errorf("of %v %s warmed the prompt", list, w.Worker)
			}
		}
	}
}

// TestSidecarRefusesHosts: a sidecar refuses a host that is not allowed before it connects to it.
func TestSidecarRefusesHosts(t *testing.T) {
	var hits atomic.Int32
	victim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { hits.Add(1) }))
	defer victim.Close()
	_, port, _ := net.SplitHostPort(victim.Listener.Addr().String())
	d := harness.StartSim(t, harness.SimRole("decode"))
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
		r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", c.networks)
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-prefiller-host-port", c.value)
		harness.WantReason(t, a, 400, "bad_header")
		msg, _, _ := a.ErrorOf(t)
		if !strings.Contains(msg, "X-Prefiller-Host-Port") || !strings.Contains(msg, c.says) {
			t.Errorf("%s with %q: %s", c.value, c.networks, msg)
		}
		if r.Selector.Workers() != 0 {
			t.Errorf("%s: a transient worker of a refused request", c.value)
		}
	}
	if hits.Load() != 0 {
		t.Errorf("%d connections were made to a host that may not be named", hits.Load())
	}
	// An allowed worker cannot redirect the router to a host that is not allowed.
	sends := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, victim.URL+"/v1/chat/completions", http.StatusTemporaryRedirect)
	}))
	defer sends.Close()
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	http.DefaultClient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	defer func() { http.DefaultClient.CheckRedirect = nil }()
	harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-prefiller-host-port", strings.TrimPrefix(sends.URL, "http://"))
	if hits.Load() != 0 {
		t.Error("a redirect was followed")
	}
}

func TestSidecarRanks(t *testing.T) {
	p := harness.StartSim(t, harness.SimRole("prefill"))
	for _, kind := range []string{"behind one URL", "with URLs of their own"} {
		d := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Ranks, o.RankPorts = "decode", 3, true })
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
		r := harness.StartSidecar(t, append(args, "--engine", engine, "--prefill-networks", "127.0.0.0/8")...)
		for i, name := range names {
			for _, prefill := range []string{"", harness.HostPort(p)} {
				d.ForgetRequests()
				headers := []string{"x-data-parallel-host-port", name}
				if prefill != "" {
					headers = append(headers, "x-prefiller-host-port", prefill)
				}
				a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), headers...)
				harness.WantStatus(t, a, 200)
				recs := harness.GenerateRequests(d)
				if len(recs) != 1 || recs[0].Rank != i || a.Header.Get("X-Sluice-Rank") != strconv.Itoa(i) || a.Header.Get("X-Sluice-Prefill-Worker") != prefill {
					t.Errorf("%s: %s with prefill %q went to %+v, %v", kind, name, prefill, recs, a.Header)
				}
			}
		}
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-data-parallel-host-port", "169.254.169.254:80")
		harness.WantReason(t, a, 400, "bad_header")
		if msg, _, _ := a.ErrorOf(t); !strings.Contains(msg, names[2]+" (rank 2)") {
			t.Errorf("%s: %s", kind, msg)
		}
		for i := range 9 { // without the header all ranks are used
			harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d`, i))), 200)
		}
	}
}

// TestSidecarForwardsBytes: numbers beyond 2^53, the order of members and unknown members reach
// both engines unchanged.
func TestSidecarForwardsBytes(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8")
	const body = `{"zz":{"b":1e400,"a":[18446744073709551615]},"seed":9007199254740993,"model":"sim","messages":[{"role":"user","content":"caf\u00e9 ☕"}],"max_tokens":8,"a":-0.0}`
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body), 200)
	streamed := strings.Replace(body, `"seed"`, `"stream":true,"seed"`, 1)
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", streamed), 200)
	for i, want := range []string{body, streamed} {
		if got := string(harness.GenerateRequests(d)[i].Body); got != want {
			t.Errorf("decode was sent\n%s\nwant\n%s", got, want)
		}
	}
	d.ForgetRequests()
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body, "x-prefiller-host-port", harness.HostPort(p)), 200)
	kept := strings.TrimSuffix(body, "}")
	if got := string(harness.GenerateRequests(d)[0].Body); !strings.HasPrefix(got, kept+`,"kv_transfer_params":{`) {
		t.Errorf("decode was sent\n%s", got)
	}
	kept = strings.Replace(kept, `"max_tokens":8`, `"max_tokens":1`, 1)
	if got := string(harness.GenerateRequests(p)[0].Body); !strings.HasPrefix(got, kept+`,"stream":false`) {
		t.Errorf("prefill was sent\n%s", got)
	}
}

func TestSidecarLocalPrefill(t *testing.T) {
	p0, p1, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill", p0.URL(), "--prefill", p1.URL(), "--model", "sim")
	testwait.UntilWithin(t, 5*time.Second, "both prefill workers are known", func() bool { return harness.AllReady(r) })
	first := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	harness.WantStatus(t, first, 200)
	by := first.Header.Get("X-Sluice-Prefill-Worker")
	if by == "" {
		t.Fatal("no prefill worker was chosen")
	}
	for range 3 { // requests with the same prefix go to the same worker
		if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Header.Get("X-Sluice-Prefill-Worker") != by {
			t.Errorf("the same prompt went to %s, then to %s", by, a.Header.Get("X-Sluice-Prefill-Worker"))
		}
	}
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-sluice-prefill", "none"); a.Header.Get("X-Sluice-Prefill-Worker") != "" {
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

// TestSidecarFamilies: in every family, with the prefill worker named by the request, the response
// is right and decode computes no prompt tokens. After a client has left or a prefill has failed,
// no load or blocks remain.
func TestSidecarFamilies(t *testing.T) {
	t.Parallel()
	whole := harness.StartSim(t, nil)
	for i := range harness.MatrixFamilies {
		if harness.MatrixFamilies[i].Variant != "" {
			continue // the same legs in another order
		}
		fam := harness.MatrixFamilies[i].Prepared(t)
		t.Run(fam.Name, func(t *testing.T) {
			p, prefill := harness.SidecarEngine(t, fam, worker.Prefill)
			d, decode := harness.SidecarEngine(t, fam, worker.Decode)
			args := []string{"--pd", fam.Name, "--prefill-networks", "127.0.0.0/8", "--model", "sim", "--set", "pd.abort_delay=100ms"}
			engine, named := d.URL(), harness.HostPort(p)
			for key, values := range decode.Options {
				engine += "," + key + "=" + strings.Join(values, "+")
			}
			if port := prefill.Options["bootstrap_port"]; port != nil {
				named += ";bootstrap_port=" + port[0] // a request may name the port but not a second host
			}
			cfg := config.Default()
			if fam.Config != nil {
				fam.Config(cfg)
				args = append(args, "--nixl-proxy-port", strconv.Itoa(cfg.LMCache.ProxyPort))
			}
			r := harness.StartSidecar(t, append(args, "--engine", engine)...)
			for i, f := range harness.RequestForms(300, "") {
				a := harness.Post(t, r.URL+f.Path, f.Body, "x-sluice-prefill", named, "X-Request-Id", fmt.Sprintf("%s-%d", fam.Name, i))
				harness.WantSameAnswer(t, f.Name, a, harness.Post(t, whole.URL()+f.Path, f.Body))
				if got := a.Header.Get("X-Sluice-Prefill-Worker"); got != harness.HostPort(p) {
					t.Errorf("%s: prefill by %q", f.Name, got)
				}
			}
			most := 0
			if fam.Name == "storage" {
				most = 4 * 16 // the store keeps whole blocks
			}
			if s := d.Stats().Sum(); s.LocalCompute > most || s.GarbageReads+s.RoomsReused+s.RoomsMismatched != 0 {
				t.Errorf("decode computed %d tokens of prompts: %+v", s.LocalCompute, s)
			}
			harness.WantIdle(t, r, 10*time.Second, p, d)

			p.Fault(sim.Fault{Kind: sim.Status, N: 1})
			f := harness.RequestForms(301, "")[0]
			a := harness.Post(t, r.URL+f.Path, f.Body, "x-sluice-prefill", named)
			if fam.Name == "sglang" { // its decode engines cannot prefill
				if a.Status < 500 {
					t.Errorf("status %d without a prefill", a.Status)
				}
			} else {
				harness.WantSameAnswer(t, "the prefill worker fails", a, harness.Post(t, whole.URL()+f.Path, f.Body))
			}
			p.ClearFaults()

			d.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond})
			ctx, cancel := context.WithCancel(context.Background())
			gone := make(chan struct{})
			before := d.Stats().Sum().GeneratedTokens
			go func() {
				defer close(gone)
				harness.TryPost(ctx, r.URL+"/v1/chat/completions", strings.Replace(harness.Chat(`,"stream":true`), `"max_tokens":12`, `"max_tokens":2000,"ignore_eos":true`, 1), "x-sluice-prefill", named)
			}()
			testwait.UntilWithin(t, 10*time.Second, "decode makes tokens", func() bool { return d.Stats().Sum().GeneratedTokens > before })
			cancel()
			<-gone
			harness.WantIdle(t, r, 3*time.Second, p, d) // leases are 30 s and longer, so only a release frees the blocks this early
		})
	}
}

// TestSidecarSGLang: SGLang's two legs meet at the bootstrap server of the worker that the request
// names. A request that names none cannot be decoded by SGLang's decode engine.
func TestSidecarSGLang(t *testing.T) {
	meet := make(chan struct{})
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		meet <- struct{}{}
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	})
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) { <-meet; harness.AnswerOK(w, r) })
	r := harness.StartSidecar(t, "--pd", "sglang", "--engine", d.URL, "--prefill-networks", "127.0.0.0/8", "--prefill-options", "bootstrap_port=8998", "--model", "sim")
	at := strings.TrimPrefix(p.URL, "http://")
	for i, f := range harness.SGLangEndpoints {
		for j, h := range []struct{ name, value, port string }{{"x-prefiller-host-port", at, "8998"}, {"x-sluice-prefill", at + ";bootstrap_port=9001", "9001"}} {
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(f.More), h.name, h.value)
			if a.Status != 200 || a.Text(t) != "ok" {
				t.Fatalf("%s: %d %s", f.Name, a.Status, a.Body)
			}
			n := 2*i + j
			if room := p.Room(t, n); room != d.Room(t, n) {
				t.Errorf("%s: rooms %s and %s", f.Name, room, d.Room(t, n))
			}
			d.Mu.Lock()
			if got := d.Bodies[n]; !strings.Contains(got, `"bootstrap_port":`+h.port) || !strings.Contains(got, `"bootstrap_host":"127.0.0.1"`) {
				t.Errorf("%s: decode was sent %s", f.Name, got)
			}
			d.Mu.Unlock()
		}
	}
	began := time.Now()
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	harness.WantReason(t, a, 503, "no_prefill_worker")
	if took := time.Since(began); took > r.Config.Timeouts.PoolWait/2 {
		t.Errorf("a request that can never run waited %s", took)
	}
}

// TestSidecarPages: a sidecar is ready if its engine is, and serves the engine's pages unchanged.
func TestSidecarPages(t *testing.T) {
	d := harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill", "http://"+deadPort(t), "--prefill-networks", "127.0.0.0/8")
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-sluice-prefill", "none"), 200)
	if got, want := harness.Get(t, r.URL+"/v1/models").Body, harness.Get(t, d.URL()+"/v1/models").Body; !bytes.Equal(dataMember(t, got), dataMember(t, want)) {
		t.Errorf("models: %s, the engine's own: %s", got, want)
	}
	text := string(harness.Get(t, r.URL+"/metrics").Body)
	for _, series := range []string{"vllm:num_requests_running", "sluice_requests_accepted_total", "sluice_rank_legs_total"} {
		if !strings.Contains(text, series) {
			t.Errorf("/metrics lacks %s", series)
		}
	}
	own := harness.StartSidecar(t, "--engine", d.URL(), "--engine-metrics=false")
	if text := string(harness.Get(t, own.URL+"/metrics").Body); strings.Contains(text, "vllm:") || !strings.Contains(text, "sluice_") {
		t.Error("--engine-metrics=false")
	}
	// The sidecar forwards a model that it does not know; the engine decides.
	a := harness.Post(t, r.URL+"/v1/chat/completions", strings.Replace(harness.Chat(""), `"sim"`, `"other"`, 1), "x-sluice-prefill", "none")
	if a.Status != 404 || a.Header.Get("X-Sluice-Reason") != "" {
		t.Errorf("an unknown model: %d %s %s", a.Status, a.Header.Get("X-Sluice-Reason"), a.Body)
	}
	d.Fault(sim.Fault{Kind: sim.Refuse})
	testwait.UntilWithin(t, 5*time.Second, "not ready without the engine", func() bool { return harness.Get(t, r.URL+"/readyz").Status == 503 })
	a = harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-sluice-prefill", "none")
	if a.Status != 503 {
		t.Errorf("without the engine: %d %s", a.Status, a.Body)
	}
	d.ClearFaults()
	testwait.UntilWithin(t, 5*time.Second, "ready again", func() bool { return harness.Get(t, r.URL+"/readyz").Status == 200 })
}

// dataMember returns the data member of a list of models.
func dataMember(t *testing.T, body []byte) []byte { return []byte(harness.Member(t, body, "data")) }

func TestSidecarWrongFlags(t *testing.T) {
	for _, c := range []struct {
		args string
		says string
	}{
		{"", "--engine"},
		{"--engine http://127.0.0.1:1 --engine http://127.0.0.1:2", "one"},
		{"--engine http://127.0.0.1:1 --prefill-networks 10.0.0.0", "--prefill-networks"},
		{"--engine http://127.0.0.1:1 --prefill-ports 0", "--prefill-ports"},
		{"--engine http://127.0.0.1:1 --prefill-options id=a", "--prefill-options"},
		{"--engine http://127.0.0.1:1 --prefill-options x=a", "--prefill-options"},
		{"--engine http://127.0.0.1:1 --max-prefill-workers 0", "--max-prefill-workers"},
		{"--engine http://127.0.0.1:1 --prefill-idle-timeout 1ms", "--prefill-idle-timeout"},
		{"--engine http://127.0.0.1:1,ranks=2 --rank-addresses a:1", "--rank-addresses"},
		{"--engine http://127.0.0.1:1 --rank-addresses a", "--rank-addresses"},
	} {
		_, err := harness.LaunchSidecar(t, strings.Fields(c.args)...)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v", c.args, err)
		}
	}
}

// TestSidecarLeavesNoState: clients that leave in every phase, and many workers named once each,
// leave no load, workers or goroutines.
func TestSidecarLeavesNoState(t *testing.T) {
	n := 600
	if testing.Short() {
		n = 150
	}
	quick := func(r string) func(*sim.Options) {
		return func(o *sim.Options) { o.Role, o.Speed, o.Lease = r, 4, time.Second }
	}
	p0, p1, d := harness.StartSim(t, quick("prefill")), harness.StartSim(t, quick("prefill")), harness.StartSim(t, quick("decode"))
	r := harness.StartSidecar(t, "--engine", d.URL(), "--prefill-networks", "127.0.0.0/8", "--lease", "1s", "--set", "pd.lease_margin=500ms", "--set", "pd.abort_delay=50ms", "--prefill-idle-timeout", "1s")
	for i := range 8 {
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"stream":%v`, i%2 == 0)), "x-prefiller-host-port", harness.HostPort(p0)), 200)
	}
	harness.DropIdle()
	harness.WantIdle(t, r, 10*time.Second, p0, p1, d)
	before := testwait.Settled(t, 50*time.Millisecond, "the number of goroutines", harness.ModuleGoroutines)
	var wg sync.WaitGroup
	var remaining atomic.Int64
	work := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range work {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i*7%40)*time.Millisecond)
				value := []string{harness.HostPort(p0), harness.HostPort(p1) + "," + harness.HostPort(p0), fmt.Sprintf("127.1.%d.%d:9", i/200, 1+i%200), ""}[i%4]
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, i%40, harness.Prompt, 1+i%20, i%3 == 0)
				if _, err := harness.TryPost(ctx, r.URL+"/v1/chat/completions", body, "x-prefiller-host-port", value); err != nil {
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
	harness.WantIdle(t, r, 5*time.Second, p0, p1, d)
	harness.DropIdle()
	testwait.UntilWithin(t, 10*time.Second, "the workers named are forgotten", func() bool { return r.Selector.Workers() == 0 && r.Fleet.TransientWorkers() == 0 })
	testwait.UntilWithin(t, 10*time.Second, "goroutines are back", func() bool { return harness.ModuleGoroutines() <= before })
	var series bytes.Buffer
	r.Metrics.WritePrometheus(&series)
	if strings.Contains(series.String(), `worker="127.`) {
		t.Error("series of forgotten workers are shown")
	}
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "x-prefiller-host-port", harness.HostPort(p0)), 200)
}

// TestSidecarProcess checks a sidecar process: its memory after a thousand requests, and its
// shutdown during a stream.
func TestSidecarProcess(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, func(o *sim.Options) { o.Role, o.Cost.Step, o.Speed = "decode", 2*time.Millisecond, 1 })
	quickD := harness.StartSim(t, harness.SimRole("decode"))
	pr := harness.Launch(t, nil, "sidecar", "--listen", "127.0.0.1:0", "--engine", quickD.URL(), "--prefill-networks", "127.0.0.0/8")
	pr.Ready(t)
	url := "http://" + pr.Addr + "/v1/chat/completions"
	n := 1000
	if testing.Short() {
		n = 200
	}
	for i := range n {
		harness.WantStatus(t, harness.Post(t, url, harness.Chat(fmt.Sprintf(`,"stream":%v`, i%2 == 0)), "x-prefiller-host-port", []string{harness.HostPort(p), ""}[i%2]), 200)
	}
	// Most of what is resident are pages of the binary's file, which grows with its dependencies and which
	// all processes share. What the sidecar itself needs is anonymous.
	rss, anonymous := statusMiB(t, pr.Cmd.Process.Pid, "VmRSS"), statusMiB(t, pr.Cmd.Process.Pid, "RssAnon")
	t.Logf("%.1f MiB resident after %d requests, %.1f of it anonymous", rss, n, anonymous)
	if rss > 48 || anonymous > 12 {
		t.Errorf("%.1f MiB resident after %d requests, %.1f of it anonymous; want 48 and 12 at most", rss, n, anonymous)
	}

	slow := harness.Launch(t, nil, "sidecar", "--listen", "127.0.0.1:0", "--engine", d.URL())
	slow.Ready(t)
	resp, err := http.Post("http://"+slow.Addr+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"sim","messages":[{"role":"user","content":"go on"}],"max_tokens":150,"ignore_eos":true,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	if err := slow.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(rest, []byte("data: [DONE]")) {
		t.Errorf("the stream ended with %v: …%s", err, rest[max(0, len(rest)-100):])
	}
	if code := slow.Wait(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d\n%s", code, slow.Stderr.Tail(2000))
	}
}

func statusMiB(t *testing.T, pid int, field string) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.Atoi(strings.Fields(v)[0])
			if err != nil {
				t.Fatal(err)
			}
			return float64(kib) / 1024
		}
	}
	t.Fatal("no " + field)
	return 0
}
