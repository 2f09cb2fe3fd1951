package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

// serverWithoutHealth starts testdata/plainserver.py and returns its URL. If SLUICE_FASTAPI_PYTHON
// names a Python with FastAPI (scripts/fastapi-test.sh), it starts fastapi_server.py instead.
func serverWithoutHealth(t *testing.T, args ...string) string {
	t.Helper()
	script, python := "testdata/fastapi_server.py", os.Getenv("SLUICE_FASTAPI_PYTHON")
	if python == "" {
		var err error
		if python, err = exec.LookPath("python3"); err != nil {
			t.Skip("no python3")
		}
		script = "testdata/plainserver.py"
	}
	cmd := exec.Command(python, append([]string{script}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	port, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the server did not start: %v", err)
	}
	return "http://127.0.0.1:" + strings.TrimSpace(port)
}

// TestServerWithoutHealth: init, check and serve work with a server without /health and /ping, with and
// without /metrics: init writes it, check accepts it, and serve sends it requests.
func TestServerWithoutHealth(t *testing.T) {
	for _, args := range [][]string{nil, {"metrics"}} {
		t.Run(strings.Join(append([]string{"with"}, args...), " "), func(t *testing.T) {
			url := serverWithoutHealth(t, args...)
			path := filepath.Join(t.TempDir(), "sluice.yaml")
			var out, errs harness.SyncBuffer
			if code := runArgs("init", []string{"-o", path, "--engine", url}, &out, &errs); code != 0 {
				t.Fatalf("init: exit %d: %s", code, errs.String())
			}
			text, err := os.ReadFile(path)
			if err != nil || !strings.Contains(string(text), `# health_path: "/v1/models"`) {
				t.Errorf("init wrote, %v:\n%s", err, text)
			}
			if code := runArgs("check", []string{"--config", path, "--probe"}, &out, &errs); code != 0 || !strings.Contains(out.String(), "ok    aggregated-0") {
				t.Errorf("check: exit %d: %s%s", code, out.String(), errs.String())
			}
			cfg, err := config.Load(path)
			if err != nil {
				t.Fatal(err)
			}
			r := harness.StartRouter(t, nil, cfg.Workers...)
			a := harness.Post(t, r.URL+"/v1/completions", `{"model":"tiny","prompt":"asked"}`)
			if a.Status != 200 || a.Text(t) != "it was asked" {
				t.Errorf("%d %s", a.Status, a.Body)
			}
			testwait.Holds(t, 4*r.Config.Health.Interval, "it is ready after more probes", func() bool { return harness.AllReady(r) })
		})
	}
}
