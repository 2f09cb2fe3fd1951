package main

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/admin"
	"sluice/router/e2e/harness"
)

// TestReloadCommand reloads a router process by command and by signal, and checks its log.
func TestReloadCommand(t *testing.T) {
	e := harness.StartSim(t, nil)
	env, dir := harness.ServeEnv(t)
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	text := fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nregistration: {token: a-secret-of-the-registration}\nworkers: [{url: %q, id: one}]\n", e.URL())
	harness.WriteFile(t, path, text)
	p := harness.Launch(t, env, "serve", "--config", path)
	p.Ready(t)
	reload := func(args ...string) (string, int) {
		t.Helper()
		var out bytes.Buffer
		t.Setenv("XDG_RUNTIME_DIR", dir)
		code := run(t.Context(), append([]string{"reload"}, args...), &out, &out)
		return out.String(), code
	}
	if out, code := reload(); code != 0 || !strings.Contains(out, "nothing differs") {
		t.Errorf("%d %s", code, out)
	}
	harness.WriteFile(t, path, strings.Replace(text, "a-secret-of-the-registration", "another-secret-of-the-same", 1)+"timeouts: {decode: 90s}\ntokens: {mode: text}\nlog: {level: debug}\nlimits: {max_head: 32KiB}\n")
	out, code := reload("--dry-run")
	for _, want := range []string{"timeouts.decode", "10m -> 1m30s", "4 would be applied, 1 not in effect before sluice restart", "registration.token", "(hidden) -> (hidden)",
		"limits.max_head: open connections have buffers of this size"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("--dry-run: %d, no %q in\n%s", code, want, out)
		}
	}
	if strings.Contains(p.Stderr.String(), "effect=applied") {
		t.Error("--dry-run changed something")
	}
	out, code = reload()
	if code != 0 || !strings.Contains(out, "4 applied, 1 not in effect") || strings.Contains(out, "secret-of") {
		t.Errorf("%d\n%s", code, out)
	}
	harness.WantStatus(t, harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat("")), 200)
	if out, code := reload("--json"); code != 0 || !strings.Contains(out, `"effect":"restart","reason":"open`) || !strings.Contains(out, `,"why":"open`) || strings.Contains(out, `"effect":"applied"`) {
		t.Errorf("%d\n%s", code, out)
	}
	harness.WriteFile(t, path, text+"timeouts: {decode: soon}\n")
	if out, code := reload(); code != 1 || !strings.Contains(out, "sluice.yaml:5:20: timeouts.decode") {
		t.Errorf("%d\n%s", code, out)
	}
	harness.WriteFile(t, path, text)
	p.Cmd.Process.Signal(syscall.SIGHUP)
	testwait.UntilWithin(t, 20*time.Second, "the signal is obeyed", func() bool {
		return strings.Contains(p.Stderr.String(), "path=timeouts.decode old=1m30s new=10m effect=applied")
	})
	if strings.Contains(p.Stderr.String(), "secret-of") {
		t.Error("a secret stands in the log")
	}
	none := text[:strings.Index(text, "workers:")] + "workers: []\n"
	for _, args := range [][]string{{"--dry-run"}, nil} {
		harness.WriteFile(t, path, none)
		if out, code := reload(args...); code != 0 || !strings.Contains(out, "warning: the file no longer contains a worker") {
			t.Errorf("the last worker is taken out: %d\n%s", code, out)
		}
	}
	testwait.UntilWithin(t, 20*time.Second, "a warning in the log, of the reload that was not a dry run", func() bool {
		log := p.Stderr.String()
		return strings.Count(log, `warning="the file no longer contains a worker`) == 1 && strings.Contains(log, "level=WARN msg=\"configuration reloaded\"")
	})
	if out, code := reload("--help"); code != 0 || !strings.Contains(out, "sluice reload --dry-run") {
		t.Errorf("%d\n%s", code, out)
	}
}

// TestReloadOfARuntimeFileElsewhere: a router with a runtime file in another place is found by that
// file, or by address and token. Without either, the error lists all ways to name a router.
func TestReloadOfARuntimeFileElsewhere(t *testing.T) {
	e := harness.StartSim(t, nil)
	env, dir := harness.ServeEnv(t)
	elsewhere := filepath.Join(t.TempDir(), "rt.json")
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	harness.WriteFile(t, path, fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0, runtime_file: %q}\n"+
		"workers: [{url: %q, id: one}]\n", elsewhere, e.URL()))
	p := harness.Launch(t, env, "serve", "--config", path)
	p.Ready(t)
	rt, err := admin.ReadRuntimeFile(elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	command := func(token string, args ...string) (string, int) {
		t.Helper()
		var out bytes.Buffer
		t.Setenv("SLUICE_ADMIN_TOKEN", token)
		code := run(t.Context(), args, &out, &out)
		return out.String(), code
	}
	for _, c := range []struct {
		token string
		args  []string
		code  int
		says  []string
	}{
		{rt.Token, []string{"reload", "--admin", rt.Address}, 0, []string{"nothing differs"}},
		{"", []string{"reload", "--runtime-file", elsewhere}, 0, []string{"nothing differs"}},
		{"not-the-router's-token", []string{"reload", "--admin", rt.Address}, 1, []string{"token"}},
		{"", []string{"reload", "--admin", rt.Address}, 1,
			[]string{rt.Address, "--admin", "SLUICE_ADMIN_TOKEN", "--runtime-file", admin.DefaultRuntimeFile(rt.Address), "kill -HUP"}},
		{rt.Token, []string{"reload"}, 1,
			[]string{"--admin", "SLUICE_ADMIN_TOKEN", "--runtime-file", filepath.Join(admin.RuntimeDir(), "*.json"), "kill -HUP"}},
		{"", []string{"reload", "--dry-run", "--admin", rt.Address}, 1, []string{"SLUICE_ADMIN_TOKEN"}},
		{"", []string{"restart", "--admin", rt.Address}, 1, []string{"SLUICE_ADMIN_TOKEN", "--runtime-file", "kill -USR2"}},
		{rt.Token, []string{"restart", "--admin", rt.Address}, 0, []string{"replaced the router at " + rt.Address}},
	} {
		out, code := command(c.token, c.args...)
		if m := regexp.MustCompile(`process (\d+) replaced`).FindStringSubmatch(out); m != nil {
			child, _ := strconv.Atoi(m[1])
			t.Cleanup(func() { _ = syscall.Kill(child, syscall.SIGKILL) })
		}
		if code != c.code {
			t.Errorf("%q: %d, want %d: %s", c.args, code, c.code, out)
		}
		if slices.Contains(c.args, "--dry-run") && strings.Contains(out, "kill") {
			t.Errorf("a dry run names a signal that was not sent: %s", out)
		}
		for _, want := range c.says {
			if !strings.Contains(out, want) {
				t.Errorf("%q does not name %q: %s", c.args, want, out)
			}
		}
	}
}
