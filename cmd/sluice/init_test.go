package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

func TestInitWritesValidConfig(t *testing.T) {
	p := harness.StartSim(t, harness.SimRole("prefill"))
	d := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Ranks, o.BlockSize = "decode", 2, 32 })
	dead := harness.RefusedURL(t)
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	var out, errs harness.SyncBuffer
	args := []string{"--prefill", p.URL(), dead + ",label=x", "-o", path, "--decode", d.URL() + ",id=dec"}
	if code := runArgs("init", args, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"vLLM 0.32.0", `# models: ["sim"]`, "# block_size: 16", "# block_size: 32", "    ranks: 2", "kv_events: auto", "# now tcp://127.0.0.1:",
		"# did not answer: GET /v1/models: cannot connect to it: connection refused", "# - id: aggregated-0", "#   labels: [\"x\"]", "\npd:\n  family: nixl",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the file does not say %q", want)
		}
	}
	c, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	specs := c.Specs()
	if len(specs) != 2 || specs[0].Role != worker.Prefill || specs[1].ID != "dec" || len(specs[1].Ranks) != 2 || c.PD.Family != "nixl" {
		t.Errorf("%+v", specs)
	}
	if t.Failed() {
		t.Logf("%s", text)
	}

	// init overwrites a file only with --force.
	if code := runArgs("init", args, &out, &errs); code != 1 || !strings.Contains(errs.String(), "exists already; --force replaces it") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	if code := runArgs("init", append(args, "--force"), &out, &errs); code != 0 {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".sluice-init-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}

	// check accepts the written file and finds no difference to the engines.
	var checked harness.SyncBuffer
	if code := runArgs("check", []string{"--config", path, "--probe"}, &checked, &errs); code != 0 {
		t.Errorf("check: exit %d: %s%s", code, checked.String(), errs.String())
	}
}

// TestInitFamily: init selects the family of the prefill workers' engine.
func TestInitFamily(t *testing.T) {
	sgl := harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", "prefill" })
	trt := harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "trtllm", "prefill" })
	for _, c := range []struct {
		args     []string
		wants    []string
		mentions string
	}{
		{[]string{sgl.URL()}, []string{"role: prefill", "engine: sglang", "family: sglang"}, ""}, // the engine reports its role
		{[]string{"--prefill", trt.URL()}, []string{"role: prefill", "engine: trtllm", "family: trtllm"}, ""},
		{[]string{"--prefill", trt.URL(), sgl.URL()}, []string{"family: sglang"}, "different engines"},
	} {
		var out, errs harness.SyncBuffer
		if code := runArgs("init", c.args, &out, &errs); code != 0 {
			t.Fatalf("%v: exit %d: %s", c.args, code, errs.String())
		}
		for _, want := range c.wants {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%v: no %q in\n%s", c.args, want, out.String())
			}
		}
		if !strings.Contains(errs.String(), c.mentions) || c.mentions == "" && strings.Contains(errs.String(), "different") {
			t.Errorf("%v: %s", c.args, errs.String())
		}
	}
}

func TestInitRefuses(t *testing.T) {
	garbage := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("\x00]{\"data\":\n- evil: true"))
	}))
	defer garbage.Close()
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{nil, 2, "no engine was named"},
		{[]string{"127.0.0.1:8000"}, 2, "does not begin with a URL"},
		{[]string{"http://u:p@h:1"}, 2, "it contains a user name or password"},
		{[]string{"--prefill", "http://h:1", "http://h:1"}, 2, "is already the URL of workers[0]"},
		{[]string{"http://h:1,rank=1"}, 2, `no such key "rank"`},
		{[]string{"--nonsense"}, 2, "nonsense"},
		{[]string{harness.RefusedURL(t), garbage.URL}, 1, "no engine answered"},
	} {
		var out, errs harness.SyncBuffer
		if code := runArgs("init", c.args, &out, &errs); code != c.code || !strings.Contains(errs.String(), c.want) || out.String() != "" {
			t.Errorf("%q: exit %d: %s%s", c.args, code, out.String(), errs.String())
		}
	}
	var out, errs harness.SyncBuffer
	if code := runArgs("init", []string{"--help"}, &out, &errs); code != 0 || !strings.Contains(out.String(), "Usage: sluice init") {
		t.Errorf("help: exit %d: %s", code, out.String())
	}
}

// TestInitQuotesEngineAnswers: an engine's answers are part of the written file and must not be able to
// add lines to it.
func TestInitQuotesEngineAnswers(t *testing.T) {
	evil := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/models":
			_, _ = w.Write([]byte(`{"data":[{"id":"a\nlisten: 0.0.0.0:1\u2028x: y\u0085"},{"id":"b\", c: d # e","owned_by":"vllm"}]}`))
		case "/version":
			_, _ = w.Write([]byte(`{"version":"1\nlisten: 0.0.0.0:1"}`))
		case "/kv_event_sources":
			_, _ = w.Write([]byte(`{"0":{"endpoint":"tcp://\nlisten: 0.0.0.0:1","publisher":"zmq"}}`))
		default:
			http.NotFound(w, r)
		}
	}))
	defer evil.Close()
	var out, errs harness.SyncBuffer
	if code := runArgs("init", []string{evil.URL}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	c, err := config.Parse("made", []byte(out.String()))
	if err != nil || c.Listen != config.Default().Listen || len(c.Workers) != 1 {
		t.Errorf("%v\n%s", err, out.String())
	}
}
