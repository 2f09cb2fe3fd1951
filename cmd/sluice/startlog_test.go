package main

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/router/e2e/harness"
)

// wantJSONLines reports each line that is not a JSON object with the members of a log line.
func wantJSONLines(t *testing.T, what, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		var v struct{ Time, Level, Msg string }
		if err := json.Unmarshal([]byte(line), &v); err != nil || v.Time == "" || v.Level == "" || v.Msg == "" {
			t.Errorf("%s: a line that is not a JSON log line: %q", what, line)
		}
	}
}

// TestServeOutlivesItsOutputs: a router whose standard output and error nobody reads any more serves on.
func TestServeOutlivesItsOutputs(t *testing.T) {
	t.Parallel()
	env, _ := harness.ServeEnv(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), harness.BuiltBinary(t), "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--set", "access_log.output=stdout")
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var addr string
	for s := bufio.NewScanner(r); addr == "" && s.Scan(); {
		if strings.HasPrefix(s.Text(), "127.0.0.1:") {
			addr = s.Text()
		}
	}
	r.Close()
	for range 3 { // each has a line of both logs
		if a, err := http.Get("http://" + addr + "/nothing"); err != nil {
			t.Fatal(err)
		} else if a.Body.Close(); a.StatusCode != http.StatusNotFound {
			t.Fatal(a.Status)
		}
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestServeWarns: serve logs the warnings that check prints.
func TestServeWarns(t *testing.T) {
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, "serve", "--log-format", "json", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	p.Cmd.Process.Signal(syscall.SIGTERM)
	if code := p.Wait(t, 30*time.Second); code != 0 {
		t.Errorf("exit %d", code)
	}
	if log := p.Stderr.String(); !strings.Contains(log, `"warning":"there is no worker: `) {
		t.Errorf("no warning of a router without workers: %s", log)
	}
}

// TestEveryLineIsJSON: with log.format json every line is JSON, from the address to the end, and so are
// errors before the start.
func TestEveryLineIsJSON(t *testing.T) {
	e := harness.StartSim(t, nil)
	env, _ := harness.ServeEnv(t)
	for _, args := range [][]string{
		{"serve", "-log-format", "json", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", e.URL()},
		{"sidecar", "--log-format", "json", "--listen", "127.0.0.1:0", "--engine", e.URL()},
	} {
		p := harness.Launch(t, env, args...)
		var first struct{ Address string }
		if err := json.Unmarshal([]byte(p.Addr), &first); err != nil || !strings.HasPrefix(first.Address, "127.0.0.1:") {
			t.Errorf("%s: the first line is %q", args[0], p.Addr)
		}
		p.Addr = first.Address
		p.Ready(t)
		p.Cmd.Process.Signal(syscall.SIGTERM)
		if code := p.Wait(t, 30*time.Second); code != 0 {
			t.Errorf("%s: exit %d", args[0], code)
		}
		wantJSONLines(t, args[0], p.Stdout.String())
		wantJSONLines(t, args[0], p.Stderr.String())
		if args[0] == "serve" && !strings.Contains(p.Stderr.String(), "write --log-format instead of -log-format") {
			t.Errorf("no warning of the flag with one dash: %s", p.Stderr)
		}
	}
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	harness.WriteFile(t, bad, "log: {format: json}\nlisten: nonsense\nlimits: {max_head: 1}\n")
	noCert := filepath.Join(dir, "nocert.yaml")
	harness.WriteFile(t, noCert, "log: {format: json}\ntls: {cert: "+dir+"/none.crt, key: "+dir+"/none.key}\n")
	broken := filepath.Join(dir, "broken.yaml")
	harness.WriteFile(t, broken, "log: {format: json}\nlisten: [\n")
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"serve", "--config", bad}, "bad.yaml:2:9"},
		{[]string{"serve", "--log-format", "json", "--config", broken}, "broken.yaml"},
		{[]string{"serve", "--log-format", "json", "--config", filepath.Join(dir, "none.yaml")}, "no such file"},
		{[]string{"serve", "--log-format", "json", "--admin", "off", "--listen", strings.TrimPrefix(e.URL(), "http://"), "--engine", "http://127.0.0.1:1"}, "in use"},
		{[]string{"sidecar", "--log-format", "json"}, "0 engines"},
		{[]string{"serve", "--log-format=json", "--lisetn", "x"}, "unknown flag --lisetn"},
		{[]string{"serve", "--log-format", "json", "extra"}, "unexpected argument"},
		{[]string{"serve", "--config", bad, "--dra"}, "unknown flag"},
		{[]string{"serve", "--set", "log.format=json", "--config", bad, "--policy"}, "needs an argument"},
		{[]string{"sidecar", "--nope", "--log-format", "json"}, "unknown flag"},
		{[]string{"serve", "--config", noCert}, "nocert.yaml:2:13: tls.cert: certs: cannot stat"},
	} {
		out, err := exec.CommandContext(t.Context(), harness.BuiltBinary(t), c.args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.says) {
			t.Errorf("%q: %v: %s; want %q", c.args, err, out, c.says)
		}
		wantJSONLines(t, strings.Join(c.args, " "), string(out))
	}
}
