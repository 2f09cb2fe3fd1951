package config

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/router/worker"
)

const whole = `
listen: :9000
admin: {listen: "[::1]:0", token: t0ken-0123456789, runtime_file: /tmp/x}
log: {level: warn, format: json}
defaults: &d
workers:
  - {id: p, url: "http://h:1/", role: prefill, ranks: 2, labels: fast, kv_events: "tcp://*:5557", kv_replay: ["tcp://*:5657"]}
  - &dec {url: "https://h/engine/", role: decode, ranks: [1, 3], models: [m, n], engine: vllm, block_size: 16, kv_events: off, options: {init_port: [7300, 7301], peer_host: x}}
  - models: o
    <<: *dec
    url: http://h:2
  - {rank_urls: ["http://h:3/", "http://h:4"]}
pd: {lease: 20s, prefill_labels: [fast]}
models:
  llama-3.1/8b: {pd: {family: off, lease: 10s}}
  plain: {}
limits: {max_body: 1.5MiB, max_head: 8192}
health: {metrics_interval: off, probe_inference: true}
schedule: {temperature: 0.5, overlap_weight: 1e0}
timeouts:
strip_forbidden: yes
`

func mustParseText(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("t.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestParseWhole(t *testing.T) {
	c := mustParseText(t, strings.Replace(whole, "defaults: &d\n", "", 1))
	if c.Listen != ":9000" || c.Admin.Token != "t0ken-0123456789" || c.Log.Level != "warn" || !c.StripForbidden {
		t.Errorf("%v", c)
	}
	if c.PD.Family != "nixl" || c.PD.Lease != 20*time.Second || c.PD.LeaseMargin != 3*time.Second {
		t.Errorf("pd: %+v", c.PD)
	}
	own := c.Models["llama-3.1/8b"].PD
	if own.Family != "off" || own.Lease != 10*time.Second || own.MaxAttempts != 3 || !own.DecodeOnlyFallback || len(own.PrefillLabels) != 1 {
		t.Errorf("a model's pd: %+v", own)
	}
	if c.Models["plain"].PD != nil {
		t.Error("a model without pd has one")
	}
	if c.Limits.MaxBody != 3<<19 || c.Limits.MaxHead != 8192 || c.Health.MetricsInterval != -1 || c.Schedule.Temperature != 0.5 {
		t.Errorf("%+v %+v", c.Limits, c.Health)
	}
	if c.Timeouts != Default().Timeouts {
		t.Error("an empty group changed its defaults")
	}
	want := []worker.Spec{
		{ID: "p", URL: "http://h:1", Role: worker.Prefill, Ranks: []uint16{0, 1}, Labels: []string{"fast"}, KVEvents: []string{"tcp://*:5557"}, KVReplay: []string{"tcp://*:5657"}, Source: "config"},
		{ID: "decode-0", URL: "https://h/engine", Role: worker.Decode, Ranks: []uint16{1, 3}, Models: []string{"m", "n"}, Engine: "vllm", BlockSize: 16, KVEvents: []string{"off"}, Options: map[string][]string{"init_port": {"7300", "7301"}, "peer_host": {"x"}}, Source: "config"},
		{ID: "decode-1", URL: "http://h:2", Role: worker.Decode, Ranks: []uint16{1, 3}, Models: []string{"o"}, Engine: "vllm", BlockSize: 16, KVEvents: []string{"off"}, Options: map[string][]string{"init_port": {"7300", "7301"}, "peer_host": {"x"}}, Source: "config"},
		{ID: "aggregated-0", URL: "http://h:3", Ranks: []uint16{0, 1}, RankURLs: []string{"http://h:3", "http://h:4"}, KVEvents: []string{"auto"}, Source: "config"},
	}
	if got := c.Specs(); !reflect.DeepEqual(got, want) {
		for i := range want {
			t.Errorf("\n got %+v\nwant %+v", got[i], want[i])
		}
	}
}

func TestDefaultIsValidAndEmptyFileIsDefault(t *testing.T) {
	if err := Default().Validate(); err != nil {
		t.Error(err)
	}
	for _, text := range []string{"", "\n", "# nothing\n", "---\n", "null\n"} {
		if c := mustParseText(t, text); c.String() != Default().String() {
			t.Errorf("%q: %v", text, c)
		}
	}
	c := Config{Listen: "x"}
	if err := c.Validate(); err == nil {
		t.Error("an unsound one made in code passed")
	}
}

// The sample must be valid, and the same defaults, once its comments are taken away.
func TestSampleIsTheDefaults(t *testing.T) {
	text := Sample(map[string]string{"pd.family": "nixl"})
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimPrefix(line, "# ")
		if inner, ok := strings.CutPrefix(line, "  # "); ok {
			line = "  " + inner
		}
		b.WriteString(line)
	}
	c := mustParseText(t, b.String())
	c.PD.Family = "off"
	if c.String() != Default().String() {
		t.Errorf("\n%v\n%v", c, Default())
	}
	mustParseText(t, text)
}

func TestLoad(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "none.yaml")); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "none.yaml") {
		t.Errorf("%v", err)
	}
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("listn: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Load(path)
	var one *Error
	if !errors.As(err, &one) || one.File != path || one.Line != 1 || one.Col != 1 || one.Field != "listn" {
		t.Errorf("%#v", err)
	}
}

func resolve(t *testing.T, file string, environ, args []string) (*Config, error) {
	t.Helper()
	t.Setenv("SLUICE_CONFIG", "")
	fs := flag.NewFlagSet("t", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	f := RegisterFlags(fs)
	if file != "" {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config", path}, args...)
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f.Resolve(environ)
}

// A field that another field of the file requires may come from the environment or a flag;
// where it comes from nowhere the fault has its place in the file, beside the others.
func TestConfigIsCheckedOnce(t *testing.T) {
	const file = "registration:\n  listen: 127.0.0.1:8081\n  networks: [127.0.0.0/8]\ntransfers: {ucx: on}\n"
	c, err := resolve(t, file, []string{"SLUICE_REGISTRATION_TOKEN=0123456789abcdef"}, nil)
	if err != nil || c.Registration.Token != "0123456789abcdef" {
		t.Errorf("a token of the environment: %v", err)
	}
	if _, err = resolve(t, file, nil, []string{"--set", "registration.token=0123456789abcdef"}); err != nil {
		t.Errorf("a token by a flag: %v", err)
	}
	if _, err = resolve(t, "", []string{"SLUICE_TRANSFERS_UCX=on", "SLUICE_REGISTRATION_TOKEN=0123456789abcdef"}, []string{"--register", "127.0.0.1:8081"}); err != nil {
		t.Errorf("a listener by a flag: %v", err)
	}
	_, err = resolve(t, file+"listn: x\n", []string{"SLUICE_LISTEN=nowhere"}, nil)
	var all Errors
	if !errors.As(err, &all) || len(all) != 3 {
		t.Fatalf("%v", err)
	}
	for _, want := range []string{"c.yaml:2:", "registration.token: is missing", "c.yaml:5:1: listn", "SLUICE_LISTEN"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

func TestPrecedence(t *testing.T) {
	file := "listen: 127.0.0.1:1\nlog: {level: warn}\ntimeouts: {prefill: 1s, decode: 1s, drain: 1s}\nworkers:\n  - {id: a, url: 'http://h:1', labels: [file]}\n  - {id: b, url: 'http://h:2'}\n"
	env := []string{"SLUICE_LISTEN=127.0.0.1:2", "SLUICE_TIMEOUTS_PREFILL=2s", "SLUICE_TIMEOUTS_DECODE=2s", "SLUICE_ADMIN_TOKEN=tok-0123456789ab", "SLUICE_PD_DECODE_LABELS=x+y",
		"SLUICE_DECODE=http://h:3,id=b http://h:4", "SLUICE_LOG_FORMAT=", "HOME=/x",
		"SLUICE_ADMIN_SERVICE_HOST=10.0.0.1", "SLUICE_ADMIN_PORT_80_TCP=x", "SLUICE_PORT=tcp://x", "SLUICE_BUILD=1"}
	c, err := resolve(t, file, env, []string{"--listen", "127.0.0.1:3", "--decode-timeout=3s", "--set", "health.unhealthy_threshold=7", "--set", "steering.pinning=10.0.0.0/8, ::1/128", "--prefill", "http://h:5,id=a,ranks=2", "--engine=http://h:6"})
	if err != nil {
		t.Fatal(err)
	}
	if c.Listen != "127.0.0.1:3" || c.Timeouts.Prefill != 2*time.Second || c.Timeouts.Decode != 3*time.Second || c.Timeouts.Drain != time.Second ||
		c.Log.Level != "warn" || c.Log.Format != "text" || c.Admin.Token != "tok-0123456789ab" || c.Health.UnhealthyThreshold != 7 || !slices.Equal(c.Steering.Pinning, []string{"10.0.0.0/8", "::1/128"}) || len(c.PD.DecodeLabels) != 2 {
		t.Errorf("%v", c)
	}
	var got []string
	for _, s := range c.Specs() {
		got = append(got, fmt.Sprint(s.ID, " ", s.URL, " ", s.Role, " ", s.Source, " ", s.Labels))
	}
	want := "a http://h:5 prefill flag []|b http://h:3 decode env []|decode-0 http://h:4 decode env []|aggregated-0 http://h:6 aggregated flag []"
	if strings.Join(got, "|") != want {
		t.Errorf("got %s", strings.Join(got, "|"))
	}
	if c.PD.Family != "nixl" {
		t.Error("a prefill worker of a flag did not turn pd on")
	}
}

func TestOverrideErrors(t *testing.T) {
	for _, c := range []struct {
		name      string
		env, args []string
		want      string
	}{
		{"env value", []string{"SLUICE_TIMEOUTS_PREFILL=soon"}, nil, `SLUICE_TIMEOUTS_PREFILL: timeouts.prefill: "soon" is not a duration; want a number with a unit, such as 500ms, 5s or 2m, 1ms or more`},
		{"env name", []string{"SLUICE_TIMEOUTS_PREFIL=1s"}, nil, `SLUICE_TIMEOUTS_PREFIL: no such variable (did you mean "SLUICE_TIMEOUTS_PREFILL"?)`},
		{"env name of nothing", []string{"SLUICE_TIMEOUTS_QQQQQQQQQQQQQQQQQQQQQQQ=1s"}, nil, `no such variable; known: SLUICE_TIMEOUTS_BODY, `},
		{"env worker", []string{"SLUICE_ENGINE=h:1"}, nil, `SLUICE_ENGINE: "h:1" does not begin with a URL; want http://HOST:PORT[,key=value…]`},
		{"flag value", nil, []string{"--log-level", "loud"}, `--log-level: log.level: "loud" is not known; want debug, info, warn, error`},
		{"admin", nil, []string{"--admin", "10.0.0.1:1"}, `--admin: admin.listen: "10.0.0.1:1" is not a loopback address`},
		{"off with prefill", nil, []string{"--pd", "off", "--prefill", "http://h:1"}, `--pd: pd.family: "off", but workers[0], "http://h:1", is a prefill worker`},
		{"set path", nil, []string{"--set", "limits.max_bdy=1"}, `--set: limits.max_bdy: no such field; did you mean limits.max_body?`},
		{"set path of the last part", nil, []string{"--set", "prefill=1s"}, `--set: prefill: no such field; did you mean kube.prefill or timeouts.prefill?`},
		{"set path of nothing", nil, []string{"--set", "zzzzzzzz=1"}, "--set: zzzzzzzz: no such field; `sluice config print-defaults` and docs/config.md list the fields"},
		{"list in YAML's form", nil, []string{"--set", `registration.networks=["10.0.0.0/16", fd00::/8]`}, `--set: registration.networks: "[\"10.0.0.0/16\", fd00::/8]"; want comma-separated words without quotes, such as "10.0.0.0/16, fd00::/8"`},
		{"duplicate URL", nil, []string{"--prefill", "http://h:1", "--decode", "http://h:1/"}, `--decode: workers[1].url: "http://h:1" is already the URL of workers[0]`},
		{"duplicate id", nil, []string{"--engine", "http://h:1,id=a", "--engine", "http://h:2,id=a"}, `--engine: workers[1].id: "a" is already the id of workers[0]; want a unique id`},
		{"key", nil, []string{"--engine", "http://h:1,rank=2"}, "--engine: no such key \"rank\" (did you mean \"ranks\"?); keys:\n  model="},
		{"key without value", nil, []string{"--engine", "http://h:1,id"}, `--engine: key id has no value; want id=NAME`},
		{"key twice", nil, []string{"--engine", "http://h:1,id=a,id=b"}, `--engine: key id is given twice`},
		{"ranks", nil, []string{"--engine", "http://h:1,ranks=0+x"}, `--engine: key ranks: "x" is not a rank from 0 to 65535; want ranks=COUNT or R+R…`},
		{"no ranks", nil, []string{"--engine", "http://h:1,ranks=0"}, `"0" is not a count of ranks from 1 to 4096`},
		{"block size", nil, []string{"--engine", "http://h:1,block_size=x"}, `--engine: key block_size: "x" is not a number of tokens`},
		{"port", nil, []string{"--decode", "http://h:1,init_port=1+99999"}, `--decode: workers[0].options.init_port: "99999" is not a port; want 1 to 65535`},
		{"start rank", nil, []string{"--engine", "http://h:1,start_rank=99999"}, `--engine: workers[0].start_rank: 99999; want from 0 to 65535`},
		{"flag over env", []string{"SLUICE_LISTEN=127.0.0.1:1"}, []string{"--listen=x"}, `--listen: listen: "x": not an address with a port`},
	} {
		_, err := resolve(t, "", c.env, c.args)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s:\n got %v\nwant %s", c.name, err, c.want)
		}
	}
}

func TestParseWorker(t *testing.T) {
	got, err := ParseWorker(worker.Decode, "http://h:1/x,model=a+b,model=c,ranks=0+2,id=d,label=x,label=y,engine=vllm,block_size=32,kv_events=tcp://h:1+tcp://h:2,kv_replay=tcp://h:3,load_events=tcp://h:4,rank_urls=http://a:1+http://b:1,init_port=7300+7301,bootstrap_port=8998,peer_host=h")
	want := Worker{
		ID: "d", URL: "http://h:1/x", Role: worker.Decode, Models: []string{"a", "b", "c"}, Ranks: []uint16{0, 2}, RankURLs: []string{"http://a:1", "http://b:1"},
		Labels: []string{"x", "y"}, Engine: "vllm", BlockSize: 32, KVEvents: []string{"tcp://h:1", "tcp://h:2"}, KVReplay: []string{"tcp://h:3"}, LoadEvents: []string{"tcp://h:4"},
		Options: map[string][]string{"init_port": {"7300", "7301"}, "bootstrap_port": {"8998"}, "peer_host": {"h"}},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v\n got %+v\nwant %+v", err, got, want)
	}
	for text, want := range map[string][]uint16{"3": {0, 1, 2}, "2+": {2}, "5+1": {5, 1}} {
		if w, err := ParseWorker(0, "http://h:1,ranks="+text); err != nil || !reflect.DeepEqual(w.Ranks, want) {
			t.Errorf("ranks=%s: %v %v", text, w.Ranks, err)
		}
	}
	// The table names every key there is, and every option key is one.
	for _, key := range append(keyNames(), optionKeys...) {
		if !strings.Contains(KeyTable(), "\n  "+key+"=") && !strings.HasPrefix(KeyTable(), "  "+key+"=") {
			t.Errorf("key %s is not in the table", key)
		}
	}
}

func TestSecretsAreHidden(t *testing.T) {
	c := Default()
	c.Admin.Token = "planted-secret"
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "config", c, "value", *c, "admin", c.Admin)
	shown := []string{log.String(), c.String(), fmt.Sprint(*c), fmt.Sprintf("%+v %v %#v %s", c, *c, *c, c.Admin), fmt.Sprintf("%#v", c.Admin), c.Describe()}
	for _, s := range shown {
		if strings.Contains(s, "planted-secret") {
			t.Errorf("printed: %s", s)
		}
	}
	if out, err := json.Marshal(c); err != nil || strings.Contains(string(out), "planted-secret") {
		t.Errorf("JSON: %v %s", err, out)
	}
}

func TestDescribe(t *testing.T) {
	c := mustParseText(t, strings.Replace(whole, "defaults: &d\n", "", 1))
	got := c.Describe()
	if *rewrite {
		if err := os.WriteFile("testdata/describe.golden", []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/describe.golden")
	if err != nil || got != string(want) {
		t.Errorf("%v\n%s", err, got)
	}
}

func TestDescribeEngineAPI(t *testing.T) {
	for text, want := range map[string]string{
		"{unix_socket: /run/s.sock}":                             "serves the engine API on /run/s.sock (framed socket), with no token\n",
		"{listen: '127.0.0.1:7', token: planted-secret-planted}": "serves the engine API on 127.0.0.1:7 (framed socket, plain TCP), with the configured token\n",
		"{http: true}": "serves POST /v1/engine/generate",
	} {
		if got := mustParseText(t, "workers: [{url: 'http://h:1'}]\nengine_api: "+text).Describe(); !strings.Contains(got, want) || strings.Contains(got, "planted-secret") {
			t.Errorf("%s: %s", text, got)
		}
	}
	if got := mustParseText(t, "workers: [{url: 'http://h:1'}]").Describe(); strings.Contains(got, "as an engine") {
		t.Error(got)
	}
}

func TestWarnings(t *testing.T) {
	for text, want := range map[string]string{
		"":                   "there is no worker",
		"pd: {family: nixl}": "there is no worker",
		"workers: [{url: 'http://h:1', role: prefill}]":                          "no decode or aggregated worker",
		"pd: {family: nixl}\nworkers: [{url: 'http://h:1'}]":                     "no prefill worker",
		"pd: {decode_labels: [x]}\nworkers: [{url: 'http://h:1', role: decode}]": "no decode worker has one of these labels",
		"listen: 0.0.0.0:1\nworkers: [{url: 'http://h:1'}]":                      "every network of this machine",
		"listen: '[::]:1'\nworkers: [{url: 'http://h:1'}]":                       "every network of this machine",
		"transfers: {side_channel: release}\nworkers: [{url: 'http://h:1'}]":     "side_channel: release has no effect",
	} {
		if got := strings.Join(mustParseText(t, text).Warnings(), "\n"); !strings.Contains(got, want) {
			t.Errorf("%s: %s", text, got)
		}
	}
	for _, text := range []string{
		// Other sources may add workers of any role and label.
		"kube: {selector: app=vllm}",
		"discovery: {file: workers.yaml}",
		"discovery: {dns: [{name: engines.example, port: 8000}]}",
		"pd: {family: nixl, decode_labels: [x]}\nkube: {selector: app=vllm}",
		"workers: [{url: 'http://h:1', role: prefill}]\nkube: {selector: app=vllm}",
		// Clients must show a key.
		"listen: 0.0.0.0:1\napi_keys: [{name: a, sha256: " + strings.Repeat("ab", 32) + "}]\nworkers: [{url: 'http://h:1'}]",
	} {
		if got := mustParseText(t, text).Warnings(); len(got) > 0 {
			t.Errorf("%s: %q", text, got)
		}
	}
}

func TestHugeFiles(t *testing.T) {
	for name, text := range map[string]string{
		"brackets":  "workers: " + strings.Repeat("[", maxBrackets+1),
		"dashes":    strings.Repeat("- ", maxLine),
		"bytes":     strings.Repeat("# x\n", maxFile),
		"unfolding": "pd: &a {prefill_labels: &l [" + strings.Repeat("x, ", 3000) + "x]}\nmodels:\n" + manyModels(100),
	} {
		if _, err := Parse("t", []byte(text)); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func manyModels(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "  m%d: {pd: {prefill_labels: *l, decode_labels: *l}}\n", i)
	}
	return b.String()
}

// Every file is either read or refused with a place, and what is read
// describes itself and stays valid.
func FuzzConfig(f *testing.F) {
	files, _ := filepath.Glob("testdata/bad/*.yaml")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(whole))
	f.Add([]byte(Sample(nil)))
	f.Add([]byte("a: &a {<<: *a}\n"))
	f.Add([]byte("a: &a [*a]\nworkers: *a\nlisten: *b"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := Parse("f", text)
		if err != nil {
			var all Errors
			if !errors.As(err, &all) {
				t.Fatalf("a %T: %v", err, err)
			}
			for _, e := range all {
				if e.Line < 1 || e.Col < 1 {
					t.Fatalf("no place: %v", e)
				}
			}
			return
		}
		_ = c.Describe()
		_ = c.Specs()
		if err := c.Validate(); err != nil {
			t.Fatalf("valid, then not: %v", err)
		}
	})
}

// A variable that sets nothing is warned of where one that does is near; not what belongs
// to others, and not what is a fault.
func TestUnknownVariables(t *testing.T) {
	for name, want := range map[string]string{
		"SLUICE_LISTN": "SLUICE_LISTEN", "SLUICE_TIMEOUT_PREFILL": "SLUICE_TIMEOUTS_PREFILL", "SLUICE_CONFG": "SLUICE_CONFIG", "SLUICE_ENGINES": "SLUICE_ENGINE",
		"SLUICE_CONFIG": "", "SLUICE_PORT": "", "SLUICE_SERVICE_HOST": "", "SLUICE_LISTEN": "", "SLUICE_TOKEN": "", "SLUICE_VERSION": "", "SLUICE_PYTHON": "", "SLUICE_BUILD": "",
		"SLUICE_SOAK": "", "SLUICE_REQUIRE_NIXL": "", "SLUICE_CACHE": "", "SLUICE_UCX_LIBRARY": "", "SLUICE_ROUTER": "", "OTHER_LISTN": "",
	} {
		text := name + "=:1"
		c, err := (&Flags{}).applyOver(Default(), []string{text}, &errorList{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := strings.Join(c.InputWarnings(), "; ")
		if want == "" && got != "" || want != "" && got != `the variable `+name+` sets nothing (did you mean "`+want+`"?)` {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// TestPreemptionUnused: preemption that cannot suspend a stream is warned of.
func TestPreemptionUnused(t *testing.T) {
	for text, want := range map[string]string{
		"{preemption: true, classes: [{name: a}, {name: b}]}":             "",
		"{classes: [{name: a}]}":                                          "",
		"{preemption: true, mode: fifo, classes: [{name: a}, {name: b}]}": "admission.mode fifo",
		"{preemption: true, mode: \"off\"}":                               "admission.mode off",
		"{preemption: true, classes: [{name: a}]}":                        "there is one class",
		"{preemption: true}":                                              "there is one class",
	} {
		c := parsed(t, "workers: [{url: \"http://10.0.0.1:8000\"}]\nadmission: "+text)
		warned := strings.Join(c.Warnings(), "\n")
		if has := strings.Contains(warned, "admission.preemption has no effect"); has != (want != "") || !strings.Contains(warned, want) {
			t.Errorf("%s: the warnings are %q; want %q", text, warned, want)
		}
	}
}
