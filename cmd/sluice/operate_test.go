package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
	"sluice/router/admin"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// openTerminal returns a pseudo terminal: the side of the user, and the side of the command.
func openTerminal(t *testing.T) (user, command *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo terminals: ", err)
	}
	t.Cleanup(func() { user.Close() })
	if err := unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	command, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { command.Close() })
	return user, command
}

// startDiscoverable starts a router that the commands find, with a worker "w0" and a worker "w1".
func startDiscoverable(t *testing.T) *harness.Router {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	t.Setenv("SLUICE_ADMIN_TOKEN", "")
	return harness.StartRouter(t, func(c *config.Config) { c.Admin.RuntimeFile = "" },
		harness.SimWorker(harness.StartSim(t, nil), worker.Aggregated, "w0"), harness.SimWorker(harness.StartSim(t, nil), worker.Aggregated, "w1"))
}

func adminAddr(r *harness.Router) string { return r.Components.Admin.Addr() }

func TestWorkersAndRequests(t *testing.T) {
	r := startDiscoverable(t)
	command := func(args ...string) (string, string) {
		t.Helper()
		var out, errs bytes.Buffer
		if code := run(t.Context(), args, &out, &errs); code != 0 {
			t.Errorf("%q: exit %d: %s", args, code, &errs)
		}
		return out.String(), errs.String()
	}
	if out, _ := command("requests"); out != "no requests\n" {
		t.Errorf("before any request: %q", out)
	}
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200)
	out, _ := command("workers")
	for _, want := range []string{"WORKER", "w0 ", "w1 ", "aggregated", "ready", "vLLM 0.32.0", "sim"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _ = command("requests")
	if !strings.Contains(out, "  200 ") || !strings.Contains(out, "w0/0") && !strings.Contains(out, "w1/0") || strings.Count(out, "\n") != 2 {
		t.Errorf("requests:\n%s", out)
	}
	if out, _ := command("requests", "--in-flight"); out != "no requests\n" {
		t.Errorf("none is in flight: %q", out)
	}
	var parsed struct {
		Workers  []admin.Worker
		Requests []admin.Request
		Stats    *admin.Stats
		Router   *admin.Identity
	}
	for _, args := range [][]string{{"workers", "--json"}, {"requests", "--json"}, {"top", "--json"}} {
		out, _ := command(args...)
		if err := json.Unmarshal([]byte(out), &parsed); err != nil {
			t.Errorf("%q: %v\n%s", args, err, out)
		}
	}
	if len(parsed.Workers) != 2 || len(parsed.Requests) != 1 || !parsed.Requests[0].Done || parsed.Stats == nil || parsed.Router == nil || parsed.Router.PID != os.Getpid() {
		t.Errorf("%+v", parsed)
	}
	rank := r.AllRanks()[0]
	rank.Requests.Add(3)
	out, _ = command("top", "--once")
	rank.Requests.Add(-3)
	for _, want := range []string{"in flight: 0 prefill  0 decode  3 aggregated", "sluice top  " + adminAddr(r), "pid ", "policy kv", "requests/s", "first token p50", "w1 ", "  200 "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.Contains(out, "\x1b") {
		t.Errorf("escape sequences without a terminal: %q", out)
	}
	for _, args := range [][]string{{"requests", "--limit", "0"}, {"top", "--interval", "1ms"}, {"drain"}, {"drain", "a", "b"}} {
		var errs bytes.Buffer
		if code := run(t.Context(), args, io.Discard, &errs); code != 2 || errs.Len() == 0 {
			t.Errorf("%q: exit %d: %s", args, code, &errs)
		}
	}
}

// TestUnreportedKVUsage: an engine that reports no usage has none in the table; a dead one had -100 %.
func TestUnreportedKVUsage(t *testing.T) {
	var out strings.Builder
	writeWorkers(&out, []admin.Worker{{ID: "dead", State: "unhealthy", Ranks: []admin.Rank{{ID: "dead/0", KVUsage: -1}}}, {ID: "half", State: "ready", Ranks: []admin.Rank{{ID: "half/0", KVUsage: 0.5}}}})
	if text := out.String(); strings.Contains(text, "-100") || !strings.Contains(text, "50 %") {
		t.Errorf("the table is\n%s", text)
	}
}

// TestRequestsInFlight: requests in flight are first, and --in-flight prints them alone.
func TestRequestsInFlight(t *testing.T) {
	list := inFlightFirst([]admin.Request{{ID: "a", Done: true}, {ID: "b"}, {ID: "c", Done: true}, {ID: "d"}})
	order := ""
	for _, r := range list {
		order += r.ID
	}
	if order != "bdac" {
		t.Errorf("order %s; want bdac", order)
	}
	var out bytes.Buffer
	writeRequests(&out, []admin.Request{{ID: "x\x1b[31m", At: 1000, Whole: "w/0", Predicted: 16, Attempts: 1, Reported: -1}}, time.UnixMilli(3500), 0)
	if s := out.String(); !strings.Contains(s, "2.5s") || !strings.Contains(s, "running") || !strings.Contains(s, "~16") || strings.Contains(s, "\x1b") {
		t.Errorf("%q", s)
	}
}

func TestDrain(t *testing.T) {
	r := startDiscoverable(t)
	state := func(id string) string {
		for _, w := range r.Components.Fleet.View().Workers {
			if s, _ := w.State(); w.Spec.ID == id {
				return s.String()
			}
		}
		return "none"
	}
	var out, errs bytes.Buffer
	if code := runArgs("drain", []string{"w0"}, &out, &errs); code != 0 || state("w0") != "draining" || !strings.Contains(out.String(), "worker w0 is draining, with 0 requests in flight") {
		t.Errorf("exit %d, %s: %s%s", code, state("w0"), &out, &errs)
	}
	if strings.Contains(errs.String(), "Warning") {
		t.Errorf("a warning, although w1 is ready: %s", &errs)
	}
	if want := "Draining worker w0 of the router at " + adminAddr(r) + " (clients at "; !strings.Contains(errs.String(), want) || !strings.Contains(errs.String(), fmt.Sprintf("pid %d", os.Getpid())) {
		t.Errorf("no %q in %s", want, &errs)
	}
	var list bytes.Buffer
	runArgs("workers", nil, &list, &errs)
	rows := strings.Split(list.String(), "\n") // the columns of all rows are aligned, and the reason is in the last one
	if len(rows) < 3 || strings.Index(rows[0], "ENGINE") != strings.Index(rows[1], "vLLM") || strings.Index(rows[0], "ENGINE") != strings.Index(rows[2], "vLLM") || !strings.HasSuffix(rows[0], "REASON") || strings.HasSuffix(rows[1], "sim") {
		t.Errorf("workers:\n%s", &list)
	}
	for _, args := range [][]string{{"w1"}, {"--json", "w1"}} {
		var out, errs bytes.Buffer
		if code := runArgs("drain", args, &out, &errs); code != 0 || !strings.Contains(errs.String(), "Warning: no other ready worker is aggregated for sim; requests that need one will wait for it or be refused") {
			t.Errorf("%q: exit %d: %s", args, code, &errs)
		}
		runArgs("undrain", []string{"w1"}, &out, &errs)
	}
	complete := func(command string) string {
		var out, errs bytes.Buffer
		run(t.Context(), []string{"__complete", command, ""}, &out, &errs)
		return out.String()
	}
	if got := complete("undrain"); !strings.Contains(got, "w0\taggregated, draining\n") || strings.Contains(got, "w1") {
		t.Errorf("completion of undrain: %q", got)
	}
	if got := complete("drain"); !strings.Contains(got, "w1\taggregated, ready\n") || strings.Contains(got, "w0") {
		t.Errorf("completion of drain: %q", got)
	}
	out.Reset()
	if code := runArgs("undrain", []string{"--json", "w0"}, &out, &errs); code != 0 || state("w0") == "draining" || !strings.Contains(out.String(), `"id": "w0"`) {
		t.Errorf("exit %d, %s: %s%s", code, state("w0"), &out, &errs)
	}
	errs.Reset()
	if code := runArgs("drain", []string{"w9"}, &out, &errs); code != 1 || !strings.Contains(errs.String(), `no worker "w9" (did you mean "w0"?)`) || strings.Contains(errs.String(), "Draining") {
		t.Errorf("exit %d: %s", code, &errs)
	}
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if got := complete("drain"); strings.Contains(got, "w") {
		t.Errorf("completion without a router: %q", got)
	}
}

// TestConfirmation: a command that changes a router it found itself asks on a terminal, and only there.
func TestConfirmation(t *testing.T) {
	r := startDiscoverable(t)
	user, terminal := openTerminal(t)
	for _, c := range []struct {
		name    string
		args    []string
		answer  string
		code    int
		asks    bool
		drained bool
	}{
		{"no", []string{"drain", "w0"}, "n\n", 1, true, false},
		{"nothing", []string{"drain", "w0"}, "\n", 1, true, false},
		{"end of input", []string{"drain", "w0"}, "\x04", 1, true, false},
		{"yes", []string{"drain", "w0"}, "yes\n", 0, true, true},
		{"--yes", []string{"drain", "--yes", "w0"}, "", 0, false, true},
		{"named", []string{"drain", "--admin", adminAddr(r), "w0"}, "", 0, false, true},
		{"named by file", []string{"drain", "--runtime-file", admin.DefaultRuntimeFile(adminAddr(r)), "w0"}, "", 0, false, true},
		{"restart", []string{"restart"}, "n\n", 1, true, false},
		{"reload", []string{"reload"}, "n\n", 1, true, false},
		{"reload --dry-run", []string{"reload", "--dry-run"}, "", 1, false, false}, // this router has no file to read
	} {
		if err := r.Components.Fleet.Drain("w0", false); err != nil {
			t.Fatal(err)
		}
		if _, err := user.WriteString(c.answer); err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		code := runWithInput(t.Context(), c.args, terminal, &out, &errs)
		drained := false
		for _, w := range r.Components.Fleet.View().Workers {
			s, _ := w.State()
			drained = drained || s == worker.Draining
		}
		if code != c.code || strings.Contains(errs.String(), "Continue? [y/N]") != c.asks || drained != c.drained {
			t.Errorf("%s: exit %d, drained %v: %s", c.name, code, drained, &errs)
		}
		if names := strings.Contains(errs.String(), "the router at "+adminAddr(r)); names == strings.Contains(c.name, "dry-run") {
			t.Errorf("%s: names the router: %v: %s", c.name, names, &errs)
		}
	}
}

// TestSeveralRouters: a command refuses to choose among several routers, and lists them.
func TestSeveralRouters(t *testing.T) {
	r := startDiscoverable(t)
	other := admin.Runtime{Address: "127.0.0.1:4", Token: "x", PID: os.Getpid(), Started: time.Now().Add(-time.Hour), Config: "/etc/other.yaml"}
	if err := admin.WriteRuntimeFile(admin.DefaultRuntimeFile(other.Address), other); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"restart"}, {"reload"}, {"drain", "w0"}, {"undrain", "w0"}, {"workers"}, {"top", "--once"}} {
		var out, errs bytes.Buffer
		code := run(t.Context(), args, &out, &errs)
		for _, want := range []string{"2 running routers", "--admin " + adminAddr(r), "--admin 127.0.0.1:4  (/etc/other.yaml, pid ", "up 1h0m0s"} {
			if code != 1 || out.Len() > 0 || !strings.Contains(errs.String(), want) {
				t.Errorf("%q: exit %d, no %q: %s%s", args, code, want, &out, &errs)
			}
		}
	}
}

// TestRestartNamesTheRouter: restart says which process it replaces before it does so.
func TestRestartNamesTheRouter(t *testing.T) {
	e := harness.StartSim(t, nil)
	env, dir := harness.ServeEnv(t)
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	harness.WriteFile(t, path, fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nworkers: [{url: %q, id: one}]\n", e.URL()))
	p := harness.Launch(t, env, "serve", "--config", path)
	p.Ready(t)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	user, terminal := openTerminal(t)
	user.WriteString("n\n")
	var out, errs bytes.Buffer
	code := runWithInput(t.Context(), []string{"restart"}, terminal, &out, &errs)
	for _, want := range []string{"Replacing the process of the router at 127.0.0.1:", "clients at " + p.Addr, "configuration " + path, fmt.Sprintf("pid %d", p.Cmd.Process.Pid), "nothing was changed"} {
		if code != 1 || !strings.Contains(errs.String(), want) {
			t.Errorf("exit %d: no %q in %s", code, want, &errs)
		}
	}
}

// TestTopInTerminal: the view is drawn in a terminal until q is pressed, and the terminal's mode is
// restored.
func TestTopInTerminal(t *testing.T) {
	startDiscoverable(t)
	user, terminal := openTerminal(t)
	before, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	var seen harness.SyncBuffer
	go io.Copy(&seen, user)
	ended := make(chan int, 1)
	go func() {
		ended <- runWithInput(context.Background(), []string{"top", "--interval", "200ms"}, terminal, terminal, io.Discard)
	}()
	testwait.UntilWithin(t, 10*time.Second, "two views are drawn", func() bool { return strings.Count(seen.String(), "requests/s") >= 2 })
	if _, err := user.WriteString("q"); err != nil {
		t.Fatal(err)
	}
	select {
	case code := <-ended:
		if code != 0 {
			t.Errorf("exit %d", code)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("q does not end it")
	}
	after, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil || after.Lflag != before.Lflag || after.Cc != before.Cc {
		t.Errorf("the terminal's mode is not restored: %v, %v", after, err)
	}
	testwait.UntilWithin(t, 10*time.Second, "the screen is left", func() bool {
		s := seen.String()
		return strings.HasPrefix(s, enterScreen) && strings.HasSuffix(s, leaveScreen)
	})
}

func TestFrame(t *testing.T) {
	if got, want := frame("abcdef\nää\nthird\n", 2, 2), homeScreen+clearLine+"ab\r\n"+clearLine+"ää"+clearBelow; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}

// TestTopFits: a long list of ranks leaves room for the requests, with the ranks first that need attention, and
// a long name does not move the columns of other rows off the screen.
func TestTopFits(t *testing.T) {
	v := &topView{Stats: new(admin.Stats)}
	for i := range 200 {
		id := fmt.Sprintf("w%03d", i)
		w := admin.Worker{ID: id, Role: "decode", State: "ready", Models: []string{strings.Repeat("模", 170)}, Ranks: []admin.Rank{{ID: id + "/0", Feed: "live", Breaker: "closed", Running: -1, Waiting: -1, KVUsage: -1}}}
		switch i {
		case 50:
			w.Ranks[0].Requests = 7
		case 150:
			w.Ranks[0].Breaker = "open"
		case 199:
			w.ID, w.State, w.Reason = strings.Repeat("x", 120)+"-gone-07", "unhealthy", "a\x1b[2Jb"
		}
		v.Workers = append(v.Workers, w)
	}
	for i := range 500 {
		v.Requests = append(v.Requests, admin.Request{ID: fmt.Sprintf("q%03d", i), Prefill: strings.Repeat("p", 128) + "/0", Decode: "w000/0", Attempts: 1})
	}
	write := func(rows int) []string {
		var b strings.Builder
		writeTopTables(&b, v, rows)
		return strings.Split(b.String(), "\n")
	}
	lines := write(40)
	shown := lines[:40-topHead+3] // the head has all but the tables' headings and the line between them
	if !strings.HasPrefix(lines[0], "WORKER") || !strings.HasPrefix(lines[1], "xxxxxxxxxxxxx…xxxxxx-gone-07 ") || !strings.HasPrefix(lines[2], "w150 ") || !strings.HasPrefix(lines[3], "w050 ") || !strings.HasPrefix(lines[4], "w000 ") {
		t.Errorf("the ranks are\n%s", strings.Join(lines[:6], "\n"))
	}
	if at := strings.Index(lines[0], "BREAKER"); at < 0 || at > 120 || lines[2][at:at+4] != "open" || strings.Contains(strings.Join(lines, ""), "\x1b") {
		t.Errorf("BREAKER is in column %d of\n%q", at, lines[:3])
	}
	var heading, requests int
	for i, line := range shown {
		if strings.HasPrefix(line, "AGE") {
			heading = i
		} else if heading > 0 {
			requests++
		}
	}
	if want := "… and 186 more; sluice workers lists all"; lines[15] != want || heading != 17 || requests != 15 {
		t.Errorf("line 15 %q, heading of requests in line %d, %d requests on the screen; want %q, 17 and 15", lines[15], heading, requests, want)
	}
	if at := strings.Index(lines[heading], "REQUEST"); at < 0 || at > 140 {
		t.Errorf("the requests' names begin in column %d", at)
	}
	all := strings.Join(write(0), "\n")
	if n := strings.Count(all, "decode"); n != 200 || !strings.Contains(all, strings.Repeat("x", 120)) || strings.Count(all, "\nq") > 0 || strings.Count(all, "  q") != 500 || strings.Contains(all, " more;") {
		t.Errorf("without a limit, %d ranks:\n%.2000s", n, all)
	}
	v.Requests = v.Requests[:3]
	if lines := write(40); lines[27] != "… and 174 more; sluice workers lists all" {
		t.Errorf("beside 3 requests: line 27 is %q", lines[27])
	}
}
