package main

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/e2e/harness"
)

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	e := harness.StartSim(t, func(o *sim.Options) { o.Ranks = 2 })
	sgl := harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", "decode" })
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	none := harness.StartScripted(t, harness.ReplyHandler(200, `{"id":"x","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}],"kv_transfer_params":null}`))
	good := write("good.yaml", "workers: [{url: '"+e.URL()+"', models: [sim], ranks: 2, engine: vllm, block_size: 16}]\n")
	bad := write("bad.yaml", "listen: 1\nworkers:\n  - url: nonsense\n")
	noCert := write("nocert.yaml", "tls: {cert: "+dir+"/none.crt, key: "+dir+"/none.key}\n")
	noRegister := write("noregister.yaml", "registration: {listen: '127.0.0.1:0', token: 0123456789abcdef, tls_cert: "+dir+"/none.crt, tls_key: "+dir+"/none.key}\n")
	marked := write("marked.yaml", "\ufeffworkers: [{url: '"+e.URL()+"'}]\n")
	t.Setenv("SLUICE_LISTN", ":1")
	for _, c := range []struct {
		name     string
		args     []string
		code     int
		out, err string
	}{
		{"sound", []string{"--config", good}, 0, "aggregated aggregated-0 at " + e.URL(), ""},
		{"as it says", []string{"--config", good, "--probe"}, 0, "  ok    aggregated-0", ""},
		{"unsound", []string{"--config", bad}, 1, "", bad + ":3:10: workers[0].url: \"nonsense\""},
		{"both faults", []string{"--config", bad}, 1, "", bad + ":1:9: listen: \"1\""},
		{"no file", []string{"--config", filepath.Join(dir, "none")}, 1, "", "no such file"},
		{"flag over file", []string{"--config", good, "--pool-wait", "7s"}, 0, "wait for a worker 7s", ""},
		{"bad flag value", []string{"--pd", "x"}, 1, "", `--pd: pd.family: "x" is not known`},
		{"no such flag", []string{"--pdd"}, 2, "", "pdd"},
		{"positional", []string{good}, 2, "", "unexpected argument"},
		{"the time in which a dead worker is noticed", []string{"--config", good}, 0, "is removed from the choice within 1.5s; one without, within 1.5s", ""},
		{"no health path", []string{"--config", good, "--probe", "--set", "health.path=/none"}, 1, "FAULT aggregated-0 at " + e.URL() + "\n        not healthy: GET /none returned 404", ""},
		{"health path of the worker", []string{"--probe", "--engine", e.URL() + ",health_path=/version", "--set", "health.path=/none"}, 0, "  ok    aggregated-0", ""},
		{"bad health path", []string{"--engine", e.URL() + ",health_path=ping"}, 1, "", `workers[0].health_path: "ping"; want a path of at most 256 visible`},
		{"bad health path for all", []string{"--engine", e.URL(), "--set", "health.path=/a b"}, 1, "", `health.path: "/a b"; want a path`},
		{"dead engine", []string{"--engine", harness.RefusedURL(t), "--probe"}, 1, "connection refused", "1 of the engines' servers"},
		{"not as it says", []string{"--probe", "--engine", e.URL() + ",model=other,ranks=3,block_size=64,engine=sglang"}, 1,
			`it does not serve model "other"` + "\n        it is vllm, not sglang\n        its blocks are of 16 tokens, not 64\n        the engine has ranks 0 to 1, but rank 2 is configured", ""},
		{"role", []string{"--probe", "--prefill", sgl.URL()}, 1, "its role is decode, not prefill", ""},
		{"prefill hands over", []string{"--probe", "--prefill", p.URL(), "--decode", d.URL()}, 0, "  ok    prefill-0", ""},
		{"no KV connector", []string{"--probe", "--prefill", none.URL, "--decode", d.URL()}, 1,
			"  FAULT prefill-0 at " + none.URL + "\n        it gives no handle for a hand-over: ", "1 of the engines' servers"},
		{"a family without a handle", []string{"--probe", "--pd", "storage", "--prefill", none.URL, "--decode", d.URL()}, 0, "", ""},
		{"help", []string{"--help"}, 0, "bootstrap_port=", ""},
		{"no certificate", []string{"--config", noCert}, 1, "", "sluice check: " + noCert + ":1:13: tls.cert: certs: cannot stat \""},
		{"no certificate for engines", []string{"--config", good, "--set", "engine_tls.ca=" + good}, 1, "", "--set: engine_tls.ca: certs: cannot use"},
		{"none to register by", []string{"--config", noRegister}, 1, "", "noregister.yaml:1:74: registration.tls_cert: certs: cannot stat"},
		{"and another fault", []string{"--config", noCert, "--set", "engine_tls.ca=" + good}, 1, "", "engine_tls.ca: certs: cannot use"},
		{"too deep", []string{"--config", good, "--set", "limits.max_depth=1025"}, 1, "", "1024"},
		{"a variable that sets nothing", []string{"--config", good}, 0, `the variable SLUICE_LISTN sets nothing (did you mean "SLUICE_LISTEN"?)`, ""},
		{"a byte order mark", []string{"--config", marked}, 0, "aggregated aggregated-0 at " + e.URL(), ""},
	} {
		var out, errs harness.SyncBuffer
		code := runArgs("check", c.args, &out, &errs)
		if code != c.code || !strings.Contains(out.String(), c.out) || !strings.Contains(errs.String(), c.err) {
			t.Errorf("%s: exit %d, want %d\nout: %s\nerr: %s", c.name, code, c.code, out.String(), errs.String())
		}
		if c.out == "" && code == 1 && out.String() != "" && !strings.Contains(c.name, "probe") {
			t.Errorf("%s: prints a page beside the errors:\n%s", c.name, out.String())
		}
	}
}

// TestEnginesAreAskedAsServeDoes: check --probe and init send engine_key and use engine_tls, so that
// they get the same result as serve for an engine with --api-key or TLS.
func TestEnginesAreAskedAsServeDoes(t *testing.T) {
	e := harness.StartSim(t, nil)
	p := harness.StartSim(t, harness.SimRole("prefill"))
	const key = "the-engines-own-key"
	guarded := func(to *sim.Engine) (string, string) {
		target, err := url.Parse(to.URL())
		if err != nil {
			t.Fatal(err)
		}
		proxy := httputil.NewSingleHostReverseProxy(target)
		srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/health" && r.Header.Get("Authorization") != "Bearer "+key {
				http.Error(w, `{"error":"Unauthorized"}`, http.StatusUnauthorized)
				return
			}
			proxy.ServeHTTP(w, r)
		}))
		t.Cleanup(srv.Close)
		ca := filepath.Join(t.TempDir(), "engine.pem")
		block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
		if err := os.WriteFile(ca, block, 0o600); err != nil {
			t.Fatal(err)
		}
		return srv.URL, ca
	}
	at, ca := guarded(e)
	before, _ := guarded(p) // all httptest servers share one certificate
	file := filepath.Join(t.TempDir(), "made.yaml")
	var out, errs harness.SyncBuffer
	run := func(what string, want int, f func() int) {
		t.Helper()
		out, errs = harness.SyncBuffer{}, harness.SyncBuffer{}
		if code := f(); code != want {
			t.Errorf("%s: exit %d, want %d\nout: %s\nerr: %s", what, code, want, out.String(), errs.String())
		}
	}
	check := func(args ...string) func() int {
		return func() int { return runArgs("check", append([]string{"--probe"}, args...), &out, &errs) }
	}
	run("no CA", 1, check("--engine", at, "--set", "engine_key="+key))
	run("no key", 1, check("--engine", at, "--set", "engine_tls.ca="+ca))
	run("another key", 1, check("--engine", at, "--set", "engine_tls.ca="+ca, "--set", "engine_key=other"))
	run("both", 0, check("--engine", at, "--set", "engine_tls.ca="+ca, "--set", "engine_key="+key))
	run("prefill too", 0, check("--prefill", before, "--decode", at, "--set", "engine_tls.ca="+ca, "--set", "engine_key="+key))
	run("init without", 1, func() int { return runArgs("init", []string{at}, &out, &errs) })
	run("init of another field", 2, func() int { return runArgs("init", []string{at, "--set", "listen=:1"}, &out, &errs) })
	t.Setenv("SLUICE_ENGINE_KEY", key)
	run("init", 0, func() int {
		return runArgs("init", []string{at, "-o", file, "--set", "engine_tls.ca=" + ca}, &out, &errs)
	})
	text, err := os.ReadFile(file)
	if err != nil || strings.Contains(string(text)+out.String()+errs.String(), key) {
		t.Errorf("the file made: %v\n%s\nerr: %s\nwant no key in them", err, text, errs.String())
	}
	run("what init has written", 0, check("--config", file))
}
