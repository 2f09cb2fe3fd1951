package restart

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// traffic sends requests, alternately streamed and not, from several clients with persistent
// connections, until it is stopped. None may fail.
type traffic struct {
	stop   context.CancelFunc
	work   sync.WaitGroup
	done   atomic.Int64
	failed atomic.Int64
	first  atomic.Pointer[string]
}

func startTraffic(url string, clients int) *traffic {
	ctx, stop := context.WithCancel(context.Background())
	tr := &traffic{stop: stop}
	for i := range clients {
		// A transport of its own gives each client a connection that it reuses.
		client := &http.Client{Transport: &http.Transport{}, Timeout: 60 * time.Second}
		tr.work.Go(func() {
			defer client.CloseIdleConnections()
			for n := 0; ctx.Err() == nil; n++ {
				stream := (n+i)%2 == 0
				if err := oneRequest(client, url, stream); err != nil {
					tr.failed.Add(1)
					text := fmt.Sprintf("stream %t: %v", stream, err)
					tr.first.CompareAndSwap(nil, &text)
				}
				tr.done.Add(1)
			}
		})
	}
	return tr
}

func oneRequest(client *http.Client, url string, stream bool) error {
	body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"hello there"}],"max_tokens":8,"ignore_eos":true,"stream":%t}`, stream)
	// Go's client never retries a POST whose body it cannot rewind.
	req, err := http.NewRequest("POST", url+"/v1/chat/completions", io.NopCloser(strings.NewReader(body)))
	if err != nil {
		return err
	}
	req.ContentLength = int64(len(body))
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != 200:
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	case stream && (!bytes.HasSuffix(text, []byte("data: [DONE]\n\n")) || bytes.Contains(text, []byte(`"error"`))):
		return fmt.Errorf("the stream ended with %q", text[max(0, len(text)-200):])
	}
	return nil
}

// TestRestartLosesNothing: a router is replaced repeatedly under load, by signal and by command.
// No request fails, and the admin token and the runtime file remain valid.
func TestRestartLosesNothing(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	dir := t.TempDir()
	env := []string{"XDG_RUNTIME_DIR=" + dir}
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain", "20s", "--prefill", p.URL(), "--decode", d.URL())
	r.Ready(t)
	harness.DropIdle() // a replaced process keeps an idle connection open for a while
	began := harness.RuntimeOf(t, dir)
	pids := map[int]bool{began.PID: true}
	t.Cleanup(func() {
		for pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	load := startTraffic("http://"+r.Addr, 6)
	rounds := 4
	if testing.Short() {
		rounds = 2
	}
	for i := range rounds {
		from := load.done.Load()
		testwait.UntilWithin(t, 20*time.Second, "requests are served", func() bool { return load.done.Load() > from+20 })
		before := harness.RuntimeOf(t, dir)
		if i%2 == 0 {
			syscall.Kill(before.PID, syscall.SIGUSR2)
		} else {
			cmd := exec.Command(harness.BuiltBinary(t), "restart")
			cmd.Env = append(os.Environ(), env...)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("restart: %v\n%s", err, out)
			}
		}
		testwait.UntilWithin(t, 60*time.Second, "another process has taken over", func() bool { return harness.RuntimeOf(t, dir).PID != before.PID })
		now := harness.RuntimeOf(t, dir)
		pids[now.PID] = true
		if now.Token != began.Token || now.Address != began.Address {
			t.Errorf("the admin listener changed: %s, then %s; same token: %t", began.Address, now.Address, now.Token == began.Token)
		}
		if !testwait.Poll(30*time.Second, func() bool { return !harness.IsRunning(before.PID) }) {
			syscall.Kill(before.PID, syscall.SIGQUIT) // print its goroutines to the log
			testwait.Poll(10*time.Second, func() bool { return !harness.IsRunning(before.PID) })
			t.Fatalf("process %d, which was replaced, has not ended:\n%s", before.PID, r.Stderr.Tail(30000))
		}
	}
	from := load.done.Load()
	testwait.UntilWithin(t, 20*time.Second, "requests are served", func() bool { return load.done.Load() > from+20 })
	load.stop()
	load.work.Wait()
	t.Logf("%d restarts, %d requests, %d failed", rounds, load.done.Load(), load.failed.Load())
	if n := load.failed.Load(); n > 0 {
		t.Errorf("%d of %d requests failed, the first: %s", n, load.done.Load(), *load.first.Load())
	}
	last := harness.RuntimeOf(t, dir)
	syscall.Kill(last.PID, syscall.SIGTERM)
	testwait.UntilWithin(t, 10*time.Second, "the last process has ended", func() bool { return !harness.IsRunning(last.PID) })
	if files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json")); len(files) != 0 {
		t.Errorf("the runtime file is still there: %v", files)
	}
}

// TestRestartFails: if the new process cannot start, the old one continues and logs the reason.
func TestRestartFails(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	dir := t.TempDir()
	env := []string{"XDG_RUNTIME_DIR=" + dir}
	file := filepath.Join(t.TempDir(), "sluice.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	good := fmt.Sprintf("listen: 127.0.0.1:0\nadmin:\n  listen: 127.0.0.1:0\ndiscovery:\n  file_poll_interval: 1h\ntimeouts:\n  restart: 3s\nworkers:\n  - url: %s\n", e.URL())
	write(good)
	p := harness.Launch(t, env, "serve", "--config", file)
	p.Ready(t)
	restart := func() (string, error) {
		cmd := exec.Command(harness.BuiltBinary(t), "restart")
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	write(good + "nonsense: true\n")
	if out, err := restart(); err == nil || !strings.Contains(out, "nonsense") || !strings.Contains(out, "sluice.yaml:10:1") {
		t.Errorf("restart with a bad file: %v\n%s", err, out)
	}
	// A new process that never becomes ready, because it waits for workers that do not exist.
	write(good + "fleet:\n  min_workers: 5\n")
	if out, err := restart(); err == nil || !strings.Contains(out, "not ready in time") {
		t.Errorf("restart without workers enough: %v\n%s", err, out)
	}
	harness.WantStatus(t, harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat("")), 200)
	if pid := harness.RuntimeOf(t, dir).PID; pid != p.Cmd.Process.Pid {
		t.Errorf("the runtime file is of process %d, want %d", pid, p.Cmd.Process.Pid)
	}
}

// TestRestartWhilePrefillIsDown: a router that serves without prefill workers, because they have
// failed, can be replaced, and the new process uses them when they are back.
func TestRestartWhilePrefillIsDown(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := startRestartingRouter(t, "--prefill", p.URL(), "--decode", d.URL())
	p.Crash()
	degraded := func() bool {
		a := harness.Get(t, "http://"+r.Addr+"/readyz")
		return a.Status == 200 && strings.Contains(string(a.Body), "no prefill worker is healthy")
	}
	testwait.UntilWithin(t, harness.TestTimeout, "the router is ready without prefill", degraded)
	ended := r.restart(t)
	harness.DropIdle()
	ended()
	if !degraded() {
		t.Error("the new process is not ready, or does not say that prefill is down")
	}
	if a := harness.Post(t, "http://"+r.Addr+"/v1/chat/completions", harness.Chat("")); a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "decode-0" {
		t.Errorf("status %d, headers %v", a.Status, a.Header)
	}
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	testwait.UntilWithin(t, harness.TestTimeout, "prefill is used again", func() bool {
		return harness.Post(t, "http://"+r.Addr+"/v1/chat/completions", harness.Chat("")).Header.Get("X-Sluice-Prefill-Worker") != ""
	})
}

// TestSystemdSockets: the router uses sockets passed by systemd instead of the configured
// addresses, and notifies systemd of its start and end.
func TestSystemdSockets(t *testing.T) {
	for _, engineAPI := range []string{"engine-api-unix", "routed-unix"} { // the second is the former name
		t.Run(engineAPI, func(t *testing.T) { testSystemdSockets(t, engineAPI) })
	}
}

func testSystemdSockets(t *testing.T, engineAPI string) {
	e := harness.StartSim(t, nil)
	client, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	adminLn, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	defer adminLn.Close()
	path := harness.SocketIn(t)
	engineAPILn, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer engineAPILn.Close()
	words := filepath.Join(t.TempDir(), "notify")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: words, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	env, _ := harness.ServeEnv(t)
	// LISTEN_PID must be the process's own id, so a shell sets it and executes the binary.
	sh := `LISTEN_PID=$$ exec "$@"`
	cmd := exec.Command("/bin/sh", "-c", sh, "sh", harness.BuiltBinary(t), "serve", "--engine", e.URL(), "--listen", "127.0.0.1:1", "--set", "engine_api.unix_socket=/nowhere/r.sock")
	cmd.Env = append(append(os.Environ(), env...), "LISTEN_FDS=3", "LISTEN_FDNAMES=client:admin:"+engineAPI, "NOTIFY_SOCKET="+words)
	for _, ln := range []interface{ File() (*os.File, error) }{client.(*net.TCPListener), adminLn.(*net.TCPListener), engineAPILn} {
		f, err := ln.File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	logs := new(harness.SyncBuffer)
	cmd.Stderr = logs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Log(logs.Tail(4000))
		}
	})
	hear := func(want string) {
		t.Helper()
		buf := make([]byte, 256)
		notify.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := notify.Read(buf); err != nil || string(buf[:n]) != want {
			t.Errorf("systemd heard %q, %v; want %q", buf[:n], err, want)
		}
	}
	hear("READY=1")
	testwait.UntilWithin(t, 10*time.Second, "a request is served on the socket passed", func() bool {
		return oneRequest(http.DefaultClient, "http://"+client.Addr().String(), false) == nil
	})
	if a := harness.Get(t, "http://"+adminLn.Addr().String()+"/"); a.Status != 200 {
		t.Errorf("the console on the admin socket passed: %d", a.Status)
	}
	if a := harness.GenerateEngineAPI(t, harness.DialRetry(t, "unix://"+path), harness.EngineAPIRequest(harness.TokenIDs(20, 1), 3)); a.Failure != nil || a.Err != nil {
		t.Errorf("the engine socket passed: %v %v", a.Failure, a.Err)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	hear("STOPPING=1")
	testwait.UntilWithin(t, harness.TestTimeout, "the process has ended", func() bool { return !harness.IsRunning(cmd.Process.Pid) })
	if _, err := os.Stat(path); err != nil {
		t.Errorf("systemd's socket file went with the process: %v", err)
	}
}

// TestDrainDelay: with timeouts.drain_delay /readyz reports 503 before connections are refused.
func TestDrainDelay(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--set", "timeouts.drain_delay=1500ms", "--engine", e.URL())
	p.Ready(t)
	began := time.Now()
	p.Cmd.Process.Signal(syscall.SIGTERM)
	testwait.UntilWithin(t, 5*time.Second, "/readyz says 503", func() bool { return harness.Get(t, "http://"+p.Addr+"/readyz").Status == 503 })
	resp, err := http.Post("http://"+p.Addr+"/v1/chat/completions", "application/json", strings.NewReader(harness.Chat("")))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 || !resp.Close {
		t.Errorf("a request in the delay: status %d, last of its connection: %t", resp.StatusCode, resp.Close)
	}
	if code := p.Wait(t, 20*time.Second); code != 0 || time.Since(began) < 1500*time.Millisecond {
		t.Errorf("it ended with %d after %v", code, time.Since(began))
	}
}

// TestRestartKeepsRegistered: the new process knows the registered workers at once, long before
// they renew their registrations.
func TestRestartKeepsRegistered(t *testing.T) {
	e := harness.StartSim(t, nil)
	dir := t.TempDir()
	env := []string{"XDG_RUNTIME_DIR=" + dir, "SLUICE_REGISTRATION_TOKEN=" + harness.RegisterToken}
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--register", "127.0.0.1:0", "--drain", "2s")
	var at string
	testwait.UntilWithin(t, 10*time.Second, "the registration listener says where it is", func() bool {
		_, rest, found := strings.Cut(r.Stderr.String(), `msg="registration is listening" address=`)
		at, _, _ = strings.Cut(rest, "\n")
		return found && at != ""
	})
	call := func(method, path, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, "http://"+at+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+harness.RegisterToken)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(text)
	}
	if status, text := call("PUT", "/v1/workers/w", fmt.Sprintf(`{"version":1,"url":%q,"lease_seconds":300}`, e.URL())); status != 201 {
		t.Fatalf("registration: %d %s", status, text)
	}
	r.Ready(t)
	before := harness.RuntimeOf(t, dir)
	harness.DropIdle()
	cmd := exec.Command(harness.BuiltBinary(t), "restart")
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("restart: %v\n%s", err, out)
	}
	testwait.UntilWithin(t, 20*time.Second, "the old process has ended", func() bool { return !harness.IsRunning(before.PID) })
	testwait.UntilWithin(t, 20*time.Second, "the runtime file is the new process's", func() bool { return harness.RuntimeOf(t, dir).PID != before.PID })
	now := harness.RuntimeOf(t, dir)
	t.Cleanup(func() { syscall.Kill(now.PID, syscall.SIGKILL) })
	harness.DropIdle()
	if err := oneRequest(http.DefaultClient, "http://"+r.Addr, true); err != nil {
		t.Error(err)
	}
	if status, text := call("POST", "/v1/workers/w/renew", ""); status != 200 || !strings.Contains(text, `"lease_seconds":300`) {
		t.Errorf("the lease: %d %s", status, text)
	}
}

// TestRestartKeepsDrains: a drained worker is drained in the process that replaces the router, until undrain.
func TestRestartKeepsDrains(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	dir := t.TempDir()
	env := []string{"XDG_RUNTIME_DIR=" + dir}
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", a.URL()+",id=a", "--engine", b.URL()+",id=b", "--drain", "2s")
	r.Ready(t)
	sluice := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(harness.BuiltBinary(t), args...)
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	state := func(id string) string {
		var list struct {
			Workers []struct{ ID, State string }
		}
		if err := json.Unmarshal([]byte(sluice("workers", "--json")), &list); err != nil {
			t.Fatal(err)
		}
		for _, w := range list.Workers {
			if w.ID == id {
				return w.State
			}
		}
		return "absent"
	}
	sluice("drain", "a", "--yes")
	before := harness.RuntimeOf(t, dir)
	harness.DropIdle()
	sluice("restart", "--yes")
	testwait.UntilWithin(t, 20*time.Second, "the runtime file is the new process's", func() bool { return harness.RuntimeOf(t, dir).PID != before.PID })
	now := harness.RuntimeOf(t, dir)
	t.Cleanup(func() { syscall.Kill(now.PID, syscall.SIGKILL) })
	testwait.UntilWithin(t, 20*time.Second, "the other worker is ready", func() bool { return state("b") == "ready" })
	if s := state("a"); s != "draining" {
		t.Errorf("the drained worker is %s after the restart; want draining", s)
	}
	harness.DropIdle()
	for range 6 {
		if err := oneRequest(http.DefaultClient, "http://"+r.Addr, true); err != nil {
			t.Error(err)
		}
	}
	if n := len(harness.GenerateRequests(a)); n != 0 {
		t.Errorf("the drained worker got %d requests", n)
	}
	sluice("undrain", "a", "--yes")
	testwait.UntilWithin(t, 20*time.Second, "the worker is ready again", func() bool { return state("a") == "ready" })
}

// TestSIGHUPReloads: on SIGHUP the router reads the file at once; it applies a valid one and
// rejects an invalid one.
func TestSIGHUPReloads(t *testing.T) {
	one, two := harness.StartSim(t, nil), harness.StartSim(t, nil)
	env, _ := harness.ServeEnv(t)
	file := filepath.Join(t.TempDir(), "sluice.yaml")
	text := fmt.Sprintf("listen: 127.0.0.1:0\nadmin:\n  listen: 127.0.0.1:0\ndiscovery:\n  file_poll_interval: 1h\nworkers:\n  - url: %s\n    id: one\n", one.URL())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := harness.Launch(t, env, "serve", "--config", file)
	p.Ready(t)
	if err := os.WriteFile(file, []byte(text+"nonsense: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Cmd.Process.Signal(syscall.SIGHUP)
	testwait.UntilWithin(t, 10*time.Second, "the fault is logged with its place", func() bool { return strings.Contains(p.Stderr.String(), "sluice.yaml:9:1") })
	if err := os.WriteFile(file, fmt.Appendf(nil, "%s  - url: %s\n    id: two\n", text, two.URL()), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Cmd.Process.Signal(syscall.SIGHUP)
	testwait.UntilWithin(t, 10*time.Second, "the second worker is there", func() bool {
		return strings.Contains(string(harness.AdminHealth(t, env)), `"two"`)
	})
}

// TestRestartPassesReports: the new process receives transfer reports at transfers.zmq_listen as
// soon as it serves, even while the old process still has a stream.
func TestRestartPassesReports(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 100 * time.Millisecond})
	dir := t.TempDir()
	env := []string{"XDG_RUNTIME_DIR=" + dir}
	reports := fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain", "60s", "--set", "transfers.zmq_listen=tcp://"+reports, "--engine", e.URL())
	r.Ready(t)
	before := harness.RuntimeOf(t, dir)
	t.Cleanup(func() { syscall.Kill(before.PID, syscall.SIGKILL) })
	peer := harness.Dialed(t, reports)
	long := harness.StartPending("http://"+r.Addr, "long", true, 10000)
	<-long.First
	harness.DropIdle()
	cmd := exec.Command(harness.BuiltBinary(t), "restart")
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("restart: %v\n%s", err, out)
	}
	now := harness.RuntimeOf(t, dir)
	t.Cleanup(func() { syscall.Kill(now.PID, syscall.SIGKILL) })
	harness.Dialed(t, reports)
	// The old process accepts until the new one reports that it serves, and closes its peers'
	// connections once it expects no more reports.
	_ = peer.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.Copy(io.Discard, peer); err != nil {
		t.Errorf("a peer of the old process: %v; want the connection closed", err)
	}
	harness.Dialed(t, reports)
	testwait.UntilWithin(t, 5*time.Second, "the new process has the peers", func() bool {
		return strings.Contains(string(harness.Get(t, "http://"+r.Addr+"/metrics").Body), `sluice_zmq_connections{socket="reports"} `) &&
			!strings.Contains(string(harness.Get(t, "http://"+r.Addr+"/metrics").Body), `sluice_zmq_connections{socket="reports"} 0`)
	})
	if !harness.IsRunning(before.PID) {
		t.Error("the old process has ended; want its stream to go on")
	}
}
