package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

// withoutJSON are the commands that have no --json, with the reason.
var withoutJSON = map[string]string{
	"serve": "log.format json", "sidecar": "log.format json",
	"register":   "it prints no result; its --json is a file to read",
	"completion": "a script", "config schema": "it is JSON",
}

// TestJSONFlag: every other command has --json.
func TestJSONFlag(t *testing.T) {
	for _, cmd := range leafCommands(newRoot()) {
		path := strings.TrimPrefix(cmd.CommandPath(), "sluice ")
		f := cmd.Flags().Lookup("json")
		has := f != nil && f.Value.Type() == "bool"
		if has == (withoutJSON[path] != "") && !cmd.Hidden {
			t.Errorf("%s: --json %v", path, has)
		}
	}
}

// runJSON runs a command whose output must be one JSON value, and decodes it.
func runJSON(t *testing.T, v any, wantCode int, args ...string) {
	t.Helper()
	var out, errs bytes.Buffer
	if code := run(t.Context(), args, &out, &errs); code != wantCode {
		t.Fatalf("%q: exit %d, want %d: %s%s", args, code, wantCode, &out, &errs)
	}
	wantMessages(t, args, errs.String())
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	if d.More() {
		t.Errorf("%q prints more than one value", args)
	}
}

// wantMessages checks that every line is a message, and returns them.
func wantMessages(t *testing.T, args []string, text string) (all []string) {
	t.Helper()
	for line := range strings.Lines(text) {
		var v map[string]string
		if err := json.Unmarshal([]byte(line), &v); err != nil || len(v) != 1 || v["message"] == "" {
			t.Errorf("%q: a line that is not a message: %q", args, line)
		}
		all = append(all, v["message"])
	}
	return all
}

func TestJSONErrors(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir()) // no router
	none := filepath.Join(t.TempDir(), "none.rec")
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"workers", "--json"}, 1, "no router"},
		{[]string{"workers", "--jsno", "--json"}, 2, `did you mean "--json"?`},
		{[]string{"key", "--json", "extra"}, 2, "unexpected argument"},
		{[]string{"record", "--json=true"}, 1, "no router"},
		{[]string{"replay", "--json", none}, 1, "none.rec"},
		{[]string{"replay", "--json"}, 2, "sluice record"},
		{[]string{"init", "--json"}, 2, "no engine was named"},
		{[]string{"init", "--json", harness.RefusedURL(t)}, 1, "connection refused"},
		{[]string{"demo", "-json", "--rate", "0"}, 2, "want more than 0"},
		{[]string{"sim", "--json", "--listen", "nonsense"}, 1, "nonsense"},
		{[]string{"health", "--json", "--listen", "127.0.0.1:1"}, 1, "connection refused"},
	} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), c.args, &out, &errs); code != c.code || out.Len() > 0 {
			t.Errorf("%q: exit %d, want %d; output %q", c.args, code, c.code, &out)
		}
		if all := wantMessages(t, c.args, errs.String()); !strings.Contains(strings.Join(all, "\n"), c.says) {
			t.Errorf("%q: %q; want %q", c.args, all, c.says)
		}
	}
}

func TestJSONResults(t *testing.T) {
	e := harness.StartSim(t, func(o *sim.Options) { o.Ranks = 2 })
	dir := t.TempDir()

	var key struct{ Key, Name, SHA256 string }
	if runJSON(t, &key, 0, "key", "--json", "--name", "team"); key.Name != "team" || key.SHA256 != apikey.HashOf(key.Key).String() {
		t.Errorf("key: %+v", key)
	}

	type initOutput struct {
		File, Config string
		Engines      []initEngine
	}
	var probed initOutput
	runJSON(t, &probed, 0, "init", "--json", e.URL(), harness.RefusedURL(t))
	if len(probed.Engines) != 2 || probed.Engines[0].Engine != "vllm" || probed.Engines[0].Ranks != 2 || !strings.Contains(probed.Engines[1].Error, "refused") {
		t.Errorf("init: %+v", probed.Engines)
	}
	if cfg, err := config.Parse("printed", []byte(probed.Config)); err != nil || len(cfg.Workers) != 1 || cfg.Workers[0].URL != e.URL() {
		t.Errorf("init: %v in %s", err, probed.Config)
	}
	file := filepath.Join(dir, "sluice.yaml")
	probed = initOutput{}
	runJSON(t, &probed, 0, "init", "--json", "-o", file, e.URL())
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), e.URL()) || probed.Config != "" || probed.File != file {
		t.Errorf("init -o: %v, %+v", err, probed)
	}

	var r checkReport
	runJSON(t, &r, 0, "check", "--json", "--probe", "--config", file)
	if !r.Valid || len(r.Errors) > 0 || !strings.Contains(r.Effect, "workers: 1") || r.Busy <= 0 || len(r.Servers) != 1 || r.Servers[0].URL != e.URL() || r.Servers[0].EventRanks != 2 {
		t.Errorf("check: %+v", r)
	}
	r = checkReport{}
	runJSON(t, &r, 1, "check", "--json", "--probe", "--engine", e.URL()+",model=other")
	if r.Valid || len(r.Servers) != 1 || strings.Join(r.Servers[0].Problems, "") != `it does not serve model "other"` {
		t.Errorf("check of an engine that differs: %+v", r)
	}
	bad := filepath.Join(dir, "bad.yaml")
	harness.WriteFile(t, bad, "listen: 1\nworkers:\n  - url: nonsense\n")
	r = checkReport{}
	runJSON(t, &r, 1, "check", "--json", "--config", bad)
	if r.Valid || len(r.Errors) != 2 || r.Errors[1].File != bad || r.Errors[1].Line != 3 || r.Errors[1].Column != 10 || r.Errors[1].Field != "workers[0].url" {
		t.Errorf("check of a bad file: %+v", r)
	}
	harness.WriteFile(t, bad, "tls: {cert: "+dir+"/none.crt, key: "+dir+"/none.key}\n")
	r = checkReport{}
	if runJSON(t, &r, 1, "check", "--json", "--config", bad); len(r.Errors) != 1 || !strings.HasPrefix(r.Errors[0].Message, bad+":1:13: tls.cert: ") {
		t.Errorf("check of a missing certificate: %+v", r)
	}
}

// TestSimJSON: the first line has the addresses of the engine.
func TestSimJSON(t *testing.T) {
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, "sim", "--json", "--engine", "sglang", "--role", "prefill", "--ranks", "2")
	var got struct {
		Address, Engine, Role, Model, Bootstrap string
		KVEvents                                []string `json:"kv_events"`
	}
	if err := json.Unmarshal([]byte(p.Addr), &got); err != nil {
		t.Fatalf("%v: %q", err, p.Addr)
	}
	if a := harness.Get(t, "http://"+got.Address+"/v1/models"); a.Status != 200 || got.Engine != "sglang" || got.Role != "prefill" || got.Model != "sim" || got.Bootstrap == "" || len(got.KVEvents) != 2 {
		t.Errorf("%d, %+v", a.Status, got)
	}
}

// TestDemoJSON: a line with the addresses, and one with the summary.
func TestDemoJSON(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes some seconds")
	}
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"demo", "--json", "--duration", "3s"}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s%s", code, &out, &errs)
	}
	var intro struct{ API, Console string }
	var end struct {
		Routers []struct {
			Router string
			Hits   float64 `json:"prompt_tokens_from_cache"`
			Load   struct{ OK int }
		}
	}
	d := json.NewDecoder(&out)
	if err := d.Decode(&intro); err != nil || !strings.HasPrefix(intro.API, "http://127.0.0.1:") || !strings.HasPrefix(intro.Console, "http") {
		t.Errorf("%v: %+v", err, intro)
	}
	if err := d.Decode(&end); err != nil || len(end.Routers) != 2 || end.Routers[0].Router != "sluice" || end.Routers[0].Load.OK == 0 || end.Routers[1].Load.OK == 0 {
		t.Errorf("%v: %+v", err, end)
	}
}
