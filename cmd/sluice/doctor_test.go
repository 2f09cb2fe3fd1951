package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"sluice/native/tokenizer"
	"sluice/router/e2e/harness"
)

// compiled compiles C source to a shared library called name, in a new folder.
func compiled(t *testing.T, name, source string, flags ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	dir := t.TempDir()
	if strings.Contains(source, "\n") {
		file := filepath.Join(dir, "source.c")
		if err := os.WriteFile(file, []byte(source), 0o644); err != nil {
			t.Fatal(err)
		}
		source = file
	}
	args := append([]string{"-shared", "-fPIC", "-std=gnu11", "-I../../native", "-o", filepath.Join(dir, name), source}, flags...)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return filepath.Join(dir, name)
}

type diagnosis struct {
	OK       bool
	Findings []finding
	code     int
	elapsed  time.Duration
}

func (d *diagnosis) of(name string) finding {
	for _, f := range d.Findings {
		if f.Name == name {
			return f
		}
	}
	return finding{}
}

// diagnose runs `sluice doctor --json` and returns its parsed output.
func diagnose(t *testing.T, args ...string) *diagnosis {
	t.Helper()
	cmd := exec.Command(harness.BuiltBinary(t), append([]string{"doctor", "--json"}, args...)...)
	cmd.Env = append(os.Environ(), "SLUICE_NIXL_LIBRARY=", "SLUICE_UCX_LIBRARY=", "VIRTUAL_ENV=", "CONDA_PREFIX=")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	d := &diagnosis{elapsed: time.Since(began)}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		d.code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(stdout.Bytes(), d); err != nil {
		t.Fatalf("%v: %s%s", err, &stdout, &stderr)
	}
	if len(d.Findings) != len(doctorNames) {
		t.Errorf("%d findings, want %d", len(d.Findings), len(doctorNames))
	}
	if d.OK != (d.code == 0) {
		t.Errorf("exit code %d, ok %v", d.code, d.OK)
	}
	return d
}

// TestDoctorOnBadLibraries: a library that hangs, crashes, prints or is not a library affects only its
// own line of the output.
func TestDoctorOnBadLibraries(t *testing.T) {
	garbage := filepath.Join(t.TempDir(), "libnixl_capi.so")
	if err := os.WriteFile(garbage, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	absent := filepath.Join(t.TempDir(), "libnixl_capi.so")
	constructor := func(body string) string {
		return compiled(t, "libnixl_capi.so", "#include <signal.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { "+body+" }\n")
	}
	for name, c := range map[string]struct {
		library, state, detail string
	}{
		"absent":             {absent, findingOff, "no usable library"},
		"garbage":            {garbage, findingOff, "broken"},
		"hangs in its start": {constructor("for (;;) pause();"), findingHung, ""},
		"stops the process":  {constructor("raise(SIGSTOP);"), findingHung, "killed"},
		"crashes":            {constructor("*(volatile int *)8 = 1;"), findingCrashed, "segmentation fault"},
		"aborts":             {constructor("fputs(\"giving up\\n\", stderr); abort();"), findingCrashed, "aborted; its last output was"},
		"ends the process":   {constructor("puts(\"{\\\"state\\\":\\\"ok\\\"}\"); exit(0);"), findingCrashed, "no answer"},
		"another library":    {compiled(t, "libnixl_capi.so", "int answer = 42;\n"), findingOff, "symbol missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := diagnose(t, "--nixl", c.library, "--require", "nixl", "--timeout", "3s")
			f := d.of("nixl")
			if d.code != 1 || f.State != c.state || !f.Required || f.Advice == "" || !strings.Contains(f.Detail, c.detail) {
				t.Errorf("exit %d, %+v; want 1, %s and %q", d.code, f, c.state, c.detail)
			}
			if zmq := d.of("zmq"); zmq.State != findingOK {
				t.Errorf("ZMQ beside it: %+v", zmq)
			}
			if d.elapsed > 20*time.Second {
				t.Errorf("it took %s", d.elapsed)
			}
		})
	}
}

func TestDoctorOnGoodLibraries(t *testing.T) {
	capi := compiled(t, "libnixl_capi.so", "../../native/testdata/fake_nixl_capi.c")
	ucx := compiled(t, "libucp.so.0", "../../native/testdata/fake_ucp.c")
	d := diagnose(t, "--nixl", filepath.Dir(capi), "--ucx", ucx, "--require", "nixl, ucx,zmq")
	for _, name := range []string{"nixl", "ucx", "zmq"} {
		if f := d.of(name); f.State != findingOK || !f.Required || f.Advice != "" {
			t.Errorf("%+v; want ok", f)
		}
	}
	if d.code != 0 || !strings.Contains(d.of("ucx").Detail, "UCX 1.23.0") || !strings.Contains(d.of("nixl").Detail, capi) {
		t.Errorf("exit %d, %+v", d.code, d.Findings)
	}
	old := compiled(t, "libucp.so.0", "../../native/testdata/fake_ucp.c", "-DFAKE_MINOR=12")
	f := diagnose(t, "--ucx", old).of("ucx")
	if f.State != findingOff || !strings.Contains(strings.Join(f.Attempts, " "), "UCX 1.12.0: want 1.13 or newer") {
		t.Errorf("an old UCX: %+v", f)
	}
}

func TestDoctorRequiresConfiguredLibraries(t *testing.T) {
	dir := t.TempDir()
	write := func(text string) string {
		file := filepath.Join(dir, "sluice.yaml")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	absent := filepath.Join(dir, "nowhere")
	d := diagnose(t, "--config", write("transfers:\n  nixl: \"on\"\n  nixl_library: "+absent+"\nlimits:\n  max_conns: 2000000000\n"))
	f := d.of("nixl")
	if d.code != 1 || !f.Required || f.State != findingOff || !strings.Contains(strings.Join(f.Attempts, " "), absent) {
		t.Errorf("exit %d, %+v; want that nixl is required and off", d.code, f)
	}
	if f := d.of("files"); f.State != findingLimited || !strings.Contains(f.Advice, "4000001024") {
		t.Errorf("%+v; want that the files are too few", f)
	}
	d = diagnose(t, "--config", write("transfers:\n  nixl_library: "+absent+"\n"))
	if f := d.of("nixl"); d.code != 0 || f.Required {
		t.Errorf("exit %d, %+v; want that nothing is required", d.code, f)
	}
}

// TestDoctorTriesConfiguredTokenizers: the folders of the configured models are tried, each with its outcome.
// One that cannot be used fails the check, and is not required.
func TestDoctorTriesConfiguredTokenizers(t *testing.T) {
	library, err := filepath.Abs("../../bin/" + tokenizer.Name)
	if err == nil {
		_, err = os.Stat(library)
	}
	if err != nil {
		t.Skipf("%v; make builds the library where cargo is installed", err)
	}
	t.Setenv(tokenizer.Variable, library)
	good, err := filepath.Abs("../../native/tokenizer/testdata/tiny")
	if err != nil {
		t.Fatal(err)
	}
	file, absent := filepath.Join(t.TempDir(), "sluice.yaml"), filepath.Join(t.TempDir(), "nowhere")
	models := func(text string) string {
		if err := os.WriteFile(file, []byte("models:\n  good: {tokenizer: "+good+"}\n"+text), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	d := diagnose(t, "--config", models(""), "--require", "tokenizer")
	f := d.of("tokenizer")
	if d.code != 0 || f.State != findingOK || len(f.Attempts) != 1 || !strings.HasPrefix(f.Attempts[0], "good, "+good+": ok: a ") {
		t.Errorf("exit %d, %+v; want one good model", d.code, f)
	}
	bad := models("  bad: {tokenizer: " + absent + "}\n")
	d = diagnose(t, "--config", bad)
	f = d.of("tokenizer")
	if d.code != 0 || f.Required || f.State != findingOff || f.Advice == "" || !strings.Contains(f.Detail, "1 of 2 models") ||
		len(f.Attempts) != 2 || !strings.Contains(f.Attempts[0], "bad, "+absent+": off: ") || !strings.Contains(f.Attempts[0], "no such file") {
		t.Errorf("exit %d, %+v; want that the bad model fails the check", d.code, f)
	}
	if d = diagnose(t, "--config", bad, "--require", "tokenizer"); d.code != 1 {
		t.Errorf("exit %d with a required tokenizer, want 1", d.code)
	}
	f = diagnose(t, "--config", models("tokens: {native: \"off\"}\n")).of("tokenizer")
	if f.State != findingOK || len(f.Attempts) != 0 {
		t.Errorf("%+v; want that nothing is tried if serve loads nothing", f)
	}
}

func TestDoctorUsageErrors(t *testing.T) {
	for _, args := range [][]string{{"--require", "gold"}, {"--timeout", "1ms"}, {"extra"}, {"--nonsense"}} {
		var stdout, stderr bytes.Buffer
		if code := runArgs("doctor", args, &stdout, &stderr); code != 2 || stderr.Len() == 0 || stdout.Len() != 0 {
			t.Errorf("%q: exit %d, %q; want 2 and a word", args, code, &stderr)
		}
	}
	var stdout, stderr bytes.Buffer
	if code := runArgs("doctor", []string{"--config", filepath.Join(t.TempDir(), "none.yaml")}, &stdout, &stderr); code != 1 || !strings.Contains(stderr.String(), "none.yaml") {
		t.Errorf("no such file: exit %d, %q", code, &stderr)
	}
	if code := runArgs("doctor", []string{"--help"}, &stdout, &stderr); code != 0 || !strings.Contains(stdout.String(), "Examples:") {
		t.Errorf("help: exit %d", code)
	}
}

func TestDoctorTable(t *testing.T) {
	var stdout, stderr bytes.Buffer
	d := doctor{}
	code := d.report([]finding{
		{Name: "nixl", State: findingOff, Required: true, Detail: "a\x1b[31m\nb", Advice: "install it", Attempts: []string{"/x: absent"}},
		{Name: "zmq", State: findingOK, Detail: "fine"},
	}, false, &stdout, &stderr)
	want := "off      nixl      required; a [31m b\n" + strings.Repeat(" ", 19) + "tried: /x: absent\n" + strings.Repeat(" ", 19) + "do: install it\nok       zmq       fine\n"
	if code != 1 || stdout.String() != want || !strings.Contains(stderr.String(), "nixl") {
		t.Errorf("exit %d:\n%s%s\nwant\n%s", code, &stdout, &stderr, want)
	}
}

// TestDoctorJSON: the output has the former names of renamed members, too.
func TestDoctorJSON(t *testing.T) {
	var stdout, stderr bytes.Buffer
	(&doctor{}).report([]finding{{Name: "nixl", State: findingOff, Required: true, Attempts: []string{"/x: absent"}}}, true, &stdout, &stderr)
	var got struct {
		Findings []map[string]any `json:"findings"`
	}
	if err := json.Unmarshal(stdout.Bytes(), &got); err != nil || len(got.Findings) != 1 {
		t.Fatalf("%v: %s", err, &stdout)
	}
	for _, names := range [][2]string{{"required", "asked"}, {"attempts", "tried"}} {
		if present := got.Findings[0][names[0]]; present == nil || !reflect.DeepEqual(present, got.Findings[0][names[1]]) {
			t.Errorf("%s and %s differ or are missing: %s", names[0], names[1], &stdout)
		}
	}
}

func TestDoctorOnRDMA(t *testing.T) {
	root := t.TempDir()
	d := doctor{root: root}
	if f := d.rdmaFinding(); f.State != findingOff || d.hasRDMA() {
		t.Errorf("without a device: %+v", f)
	}
	put := func(path, text string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
	put("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n")
	if f := d.rdmaFinding(); f.State != findingOff || !strings.Contains(f.Detail, "uverbs") {
		t.Errorf("without /dev/infiniband: %+v", f)
	}
	put("dev/infiniband/uverbs0", "")
	if f := d.rdmaFinding(); f.State != findingOK || !d.hasRDMA() || !strings.Contains(f.Detail, "mlx5_0:1 4: ACTIVE, InfiniBand, unknown") {
		t.Errorf("with both: %+v", f)
	}
	put("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
	if f := d.rdmaFinding(); f.State != findingOff || f.Advice == "" {
		t.Errorf("a port that is down: %+v", f)
	}
}
