package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/admin"

	"github.com/zeebo/xxh3"
)

var binary struct {
	once sync.Once
	path string
	err  error
}

// builtBinary returns the path of the command as make build makes bin/sluice. All test
// packages of this checkout share one file, which go build leaves alone while it is up to
// date; the lock keeps two of them from linking it at once.
func builtBinary(t *testing.T) string {
	t.Helper()
	binary.once.Do(func() { binary.path, binary.err = buildBinary() })
	if binary.err != nil {
		t.Fatal(binary.err)
	}
	return binary.path
}

func buildBinary() (path string, err error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(home, ".cache", "sluice")
	}
	dir := filepath.Join(cache, "e2e", fmt.Sprintf("%016x", xxh3.Hash(root)))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	path = filepath.Join(dir, "sluice")
	if out, err := exec.Command("go", "build", "-tags", "nokube", "-o", path, "sluice/cmd/sluice").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
}

// process is a sluice under way.
type process struct {
	cmd    *exec.Cmd
	first  string // line of standard output
	stdout *syncBuffer
	stderr *syncBuffer
	ended  chan error
}

// launch starts the binary and reads its first line.
func launch(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	return launchAs(t, builtBinary(t), env, args...)
}

// launchAs is launch by another file, which runs the binary in its own place.
func launchAs(t *testing.T, path string, env []string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(path, args...), stdout: new(syncBuffer), stderr: new(syncBuffer), ended: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = p.stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	first := make(chan string, 1)
	go func() {
		br := bufio.NewReader(io.TeeReader(out, p.stdout))
		line, _ := br.ReadString('\n')
		first <- strings.TrimSpace(line)
		io.Copy(io.Discard, br)
		p.ended <- p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		if t.Failed() {
			t.Logf("stderr of %v:\n%s", args, p.stderr.tail(4000))
		}
	})
	select {
	case p.first = <-first:
	case <-time.After(20 * time.Second):
		t.Fatalf("no line on standard output of %v; stderr: %s", args, p.stderr)
	}
	return p
}

// wait gives the exit code.
func (p *process) wait(t *testing.T, within time.Duration) int {
	t.Helper()
	select {
	case err := <-p.ended:
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode()
		}
		return 0
	case <-time.After(within):
		t.Fatalf("did not end within %s", within)
	}
	return -1
}

func (p *process) ready(t *testing.T) {
	t.Helper()
	eventually(t, 10*time.Second, "the router is ready", func() bool {
		resp, err := http.Get("http://" + p.first + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
}

// A token in the environment is used and shown to nobody.
const plantedSecret = "planted-secret-0123456789abcdef"

func serveEnv(t *testing.T) ([]string, string) {
	dir := t.TempDir()
	return []string{"SLUICE_ADMIN_TOKEN=" + plantedSecret, "XDG_RUNTIME_DIR=" + dir}, dir
}

// adminHealth is what /admin/v1/health says of the process launched with env.
func adminHealth(t *testing.T, env []string) []byte {
	t.Helper()
	for _, v := range env {
		dir, ok := strings.CutPrefix(v, "XDG_RUNTIME_DIR=")
		if !ok {
			continue
		}
		files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json"))
		if len(files) != 1 {
			return nil // not announced yet
		}
		rt, err := admin.ReadRuntimeFile(files[0])
		if err != nil {
			return nil
		}
		req, _ := http.NewRequest("GET", "http://"+rt.Address+"/admin/v1/health", nil)
		req.Header.Set("Authorization", "Bearer "+rt.Token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return body
	}
	t.Fatal("no XDG_RUNTIME_DIR")
	return nil
}

func TestServeProcess(t *testing.T) {
	e := startSim(t, nil)
	env, dir := serveEnv(t)
	p := launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "debug", "--engine", e.URL())
	if _, port, err := net.SplitHostPort(p.first); err != nil || port == "0" {
		t.Fatalf("the first line is %q, want the address", p.first)
	}
	p.ready(t)
	wantStatus(t, post(t, "http://"+p.first+"/v1/chat/completions", chat(""), "X-Request-Id", "proc-1"), 200)

	files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json"))
	if len(files) != 1 {
		t.Fatalf("runtime files: %v", files)
	}
	st, err := os.Stat(files[0])
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("runtime file: %v, mode %v", err, st.Mode())
	}
	explain := exec.Command(builtBinary(t), "explain", "proc-1")
	explain.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+dir)
	out, err := explain.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "proc-1") || !strings.Contains(string(out), "prefill") {
		t.Errorf("explain: %v\n%s", err, out)
	}

	dropIdle()
	began := time.Now()
	p.cmd.Process.Signal(syscall.SIGTERM)
	if code := p.wait(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	took := time.Since(began)
	t.Logf("idle, it ended %v after SIGTERM", took.Round(time.Millisecond))
	if took > 2*time.Second {
		t.Errorf("ended only %v after SIGTERM, want within 2s", took)
	}
	if strings.Contains(p.stdout.String()+p.stderr.String()+string(out), plantedSecret) {
		t.Error("the admin token stands in the output")
	}
	if _, err := os.Stat(files[0]); err == nil {
		t.Error("the runtime file is still there")
	}
	if n := strings.Count(p.stdout.String(), "\n"); n != 1 {
		t.Errorf("%d lines on standard output, want the address alone: %q", n, p.stdout)
	}
}

// SIGTERM with a stream under way: not ready at once, the stream ends well.
func TestServeDrainsStreams(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 20 * time.Millisecond})
	env, _ := serveEnv(t)
	r := launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefill", p.URL(), "--decode", d.URL())
	r.ready(t)
	probe, err := net.Dial("tcp", r.first) // listening ends with SIGTERM or not; this one is there
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	resp, err := http.Post("http://"+r.first+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":60,"ignore_eos":true,"stream":true}`, prompt)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	if _, err := br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	r.cmd.Process.Signal(syscall.SIGTERM)
	status := make(chan int, 1)
	go func() {
		for {
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+r.first+"/readyz", nil)
			a, err := http.DefaultClient.Do(req)
			if err == nil {
				io.Copy(io.Discard, a.Body)
				a.Body.Close()
			}
			cancel()
			switch {
			case err != nil:
				status <- 0
				return
			case a.StatusCode != 200:
				status <- a.StatusCode
				return
			}
			time.Sleep(2 * time.Millisecond)
		}
	}()
	rest, err := io.ReadAll(br)
	if err != nil || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) || bytes.Contains(rest, []byte(`"error"`)) {
		t.Errorf("the stream did not end well: %v, …%s", err, rest[max(0, len(rest)-300):])
	}
	if n := bytes.Count(rest, []byte("data: ")); n < 60 {
		t.Errorf("%d events after SIGTERM, want all", n)
	}
	if s := <-status; s != 503 {
		t.Errorf("/readyz while draining: %d, want 503", s)
	}
	if code := r.wait(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestServeRefusesToStart(t *testing.T) {
	e := startSim(t, nil)
	used, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer used.Close()
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("listen: 127.0.0.1:0\ntimeouts:\n  prefil: 3s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, k := range []struct {
		name string
		args []string
		code int
		says []string
	}{
		{"port in use", []string{"serve", "--listen", used.Addr().String(), "--admin", "off", "--engine", e.URL()}, 1, []string{used.Addr().String(), "in use", "--listen"}},
		{"admin port in use", []string{"serve", "--listen", "127.0.0.1:0", "--admin", used.Addr().String(), "--engine", e.URL()}, 1, []string{used.Addr().String(), "in use", "admin"}},
		{"bad config", []string{"serve", "--config", bad}, 1, []string{"bad.yaml:3:3", "prefil", "prefill"}},
		{"no such config", []string{"serve", "--config", bad + "x"}, 1, []string{"bad.yamlx"}},
		{"bad worker key", []string{"serve", "--engine", e.URL() + ",colour=red"}, 1, []string{"colour"}},
		{"bad level", []string{"serve", "--engine", e.URL(), "--log-level", "loud"}, 1, []string{"loud", "debug"}},
		{"unknown flag", []string{"serve", "--nope"}, 2, []string{"nope"}},
		{"an argument", []string{"serve", "here"}, 2, []string{"here"}},
		{"unknown command", []string{"swerve"}, 2, []string{"swerve", "serve"}},
		{"admin not loopback", []string{"serve", "--listen", "127.0.0.1:0", "--admin", "0.0.0.0:0", "--engine", e.URL()}, 1, []string{"loopback"}},
	} {
		env, _ := serveEnv(t)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		cmd := exec.CommandContext(ctx, builtBinary(t), k.args...)
		cmd.Env = append(os.Environ(), env...)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		cmd.Run()
		cancel()
		if code := cmd.ProcessState.ExitCode(); code != k.code {
			t.Errorf("%s: exit code %d, want %d: %s", k.name, code, k.code, stderr.String())
		}
		for _, want := range k.says {
			if !strings.Contains(stderr.String(), want) {
				t.Errorf("%s: the error does not say %q: %s", k.name, want, stderr.String())
			}
		}
		if stdout.Len() != 0 || strings.Contains(stderr.String(), plantedSecret) {
			t.Errorf("%s: standard output %q, error %s", k.name, stdout.String(), stderr.String())
		}
	}
}

// Without a worker serve runs and says what to do; a worker that is not there is
// waited for.
func TestServeWithoutWorkers(t *testing.T) {
	env, _ := serveEnv(t)
	p := launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	a := get(t, "http://"+p.first+"/readyz")
	if a.Status != 503 || !strings.Contains(string(a.Body), "--engine") {
		t.Errorf("/readyz: %d %s; want what to do", a.Status, a.Body)
	}
	a = post(t, "http://"+p.first+"/v1/chat/completions", chat(""))
	if a.Status != 404 && a.Status != 503 {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if !strings.Contains(string(a.Body), "no worker") {
		t.Errorf("a request is not told that there is no worker: %s", a.Body)
	}
	env, _ = serveEnv(t)
	launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", refusedURL(t))
	eventually(t, 5*time.Second, "/admin/v1/health says what it waits for", func() bool {
		return strings.Contains(string(adminHealth(t, env)), "connection refused")
	})
}

// sim prints its address first too, and ends well.
func TestSimProcess(t *testing.T) {
	p := launch(t, nil, "sim", "--speed", "inf")
	wantStatus(t, post(t, "http://"+p.first+"/v1/chat/completions", chat("")), 200)
	dropIdle()
	p.cmd.Process.Signal(syscall.SIGTERM)
	if code := p.wait(t, 5*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
