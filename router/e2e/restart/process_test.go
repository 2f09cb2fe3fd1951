package restart

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

func TestServeProcess(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	env, dir := harness.ServeEnv(t)
	p := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "debug", "--engine", e.URL())
	if _, port, err := net.SplitHostPort(p.Addr); err != nil || port == "0" {
		t.Fatalf("the first line is %q, want the address", p.Addr)
	}
	p.Ready(t)
	harness.WantStatus(t, harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "proc-1"), 200)

	files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json"))
	if len(files) != 1 {
		t.Fatalf("runtime files: %v", files)
	}
	st, err := os.Stat(files[0])
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("runtime file: %v, mode %v", err, st.Mode())
	}
	explain := exec.Command(harness.BuiltBinary(t), "explain", "proc-1")
	explain.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+dir)
	out, err := explain.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "proc-1") || !strings.Contains(string(out), "prefill") {
		t.Errorf("explain: %v\n%s", err, out)
	}

	harness.DropIdle()
	began := time.Now()
	p.Cmd.Process.Signal(syscall.SIGTERM)
	if code := p.Wait(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	took := time.Since(began)
	t.Logf("idle, it ended %v after SIGTERM", took.Round(time.Millisecond))
	if took > 2*time.Second {
		t.Errorf("ended only %v after SIGTERM, want within 2s", took)
	}
	if strings.Contains(p.Stdout.String()+p.Stderr.String()+string(out), harness.PlantedSecret) {
		t.Error("the admin token stands in the output")
	}
	if _, err := os.Stat(files[0]); err == nil {
		t.Error("the runtime file is still there")
	}
	if n := strings.Count(p.Stdout.String(), "\n"); n != 1 {
		t.Errorf("%d lines on standard output, want the address alone: %q", n, p.Stdout)
	}
}

// TestServeDrainsStreams: after SIGTERM during a stream, /readyz reports 503 at once and the
// stream completes.
func TestServeDrainsStreams(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 20 * time.Millisecond})
	env, _ := harness.ServeEnv(t)
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefill", p.URL(), "--decode", d.URL())
	r.Ready(t)
	probe, err := net.Dial("tcp", r.Addr) // connect now, because the listener may close after SIGTERM
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	resp, err := http.Post("http://"+r.Addr+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":60,"ignore_eos":true,"stream":true}`, harness.Prompt)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	if _, err := br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	r.Cmd.Process.Signal(syscall.SIGTERM)
	status := make(chan int, 1)
	go func() {
		for {
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+r.Addr+"/readyz", nil)
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
			testwait.Pace(2 * time.Millisecond)
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
	if code := r.Wait(t, 10*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestServeRefusesToStart(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
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
		env, _ := harness.ServeEnv(t)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		cmd := exec.CommandContext(ctx, harness.BuiltBinary(t), k.args...)
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
		if stdout.Len() != 0 || strings.Contains(stderr.String(), harness.PlantedSecret) {
			t.Errorf("%s: standard output %q, error %s", k.name, stdout.String(), stderr.String())
		}
	}
}

// TestServeWithoutWorkers: serve runs without a worker and reports what to do; it waits for a
// worker that does not answer yet.
func TestServeWithoutWorkers(t *testing.T) {
	t.Parallel()
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	a := harness.Get(t, "http://"+p.Addr+"/readyz")
	if a.Status != 503 || !strings.Contains(string(a.Body), "--engine") {
		t.Errorf("/readyz: %d %s; want what to do", a.Status, a.Body)
	}
	a = harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat(""))
	if a.Status != 404 && a.Status != 503 {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if !strings.Contains(string(a.Body), "no worker") {
		t.Errorf("the answer does not say that there is no worker: %s", a.Body)
	}
	env, _ = harness.ServeEnv(t)
	harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", harness.RefusedURL(t))
	testwait.UntilWithin(t, 5*time.Second, "/admin/v1/health says what it waits for", func() bool {
		return strings.Contains(string(harness.AdminHealth(t, env)), "connection refused")
	})
}

// TestSimProcess: sluice sim prints its address first as well, and exits with 0.
func TestSimProcess(t *testing.T) {
	p := harness.Launch(t, nil, "sim", "--speed", "inf")
	harness.WantStatus(t, harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat("")), 200)
	harness.DropIdle()
	p.Cmd.Process.Signal(syscall.SIGTERM)
	if code := p.Wait(t, 5*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
