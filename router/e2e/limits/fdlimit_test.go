package limits

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestOutOfDescriptors is point 10 of RELIABILITY.md: a router that may open 192 files receives more
// streams than that. It must continue its streams, refuse others with Retry-After, answer admin
// requests and health probes, use no CPU while it waits, and count its own lack of descriptors
// against no engine's breaker.
func TestOutOfDescriptors(t *testing.T) {
	span := 3 * time.Second
	if os.Getenv("SLUICE_SOAK") != "" {
		span = 30 * time.Second
	}
	e := harness.StartSim(t, nil)
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 200 * time.Millisecond})
	env, dir := harness.ServeEnv(t)
	const limit = 192
	p := launchWithFileLimit(t, limit, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", e.URL(), "--set", "health.interval=100ms", "--set", "timeouts.body=5m", "--set", "timeouts.body_idle=5m")
	p.Ready(t)
	files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json"))
	if len(files) != 1 {
		t.Fatalf("runtime files: %v", files)
	}
	adminAddr := strings.TrimSuffix(filepath.Base(files[0]), ".json")

	// Requests with an incomplete body: they will need an engine connection when none can be opened.
	body := `{"model":"sim","messages":[{"role":"user","content":"late"}],"max_tokens":2}`
	var late []net.Conn
	for range 4 {
		nc := harness.Dialed(t, p.Addr)
		fmt.Fprintf(nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body[:20])
		late = append(late, nc)
	}
	// Streams, two descriptors each, until the router accepts no more.
	stream := func() (nc net.Conn, status int) {
		nc = harness.Dialed(t, p.Addr)
		text := `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":2000,"ignore_eos":true,"stream":true}`
		fmt.Fprintf(nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
		line, err := bufio.NewReader(nc).ReadString('\n')
		if err != nil {
			return nc, 0
		}
		status, _ = strconv.Atoi(strings.Fields(line)[1])
		return nc, status
	}
	var streams []net.Conn
	refused := 0
	for range limit {
		nc, status := stream()
		if status == 200 {
			streams = append(streams, nc)
			continue
		}
		nc.Close()
		if status != 503 && status != 0 {
			t.Fatalf("a stream was answered %d", status)
		}
		if refused++; refused == 5 {
			break
		}
	}
	if refused == 0 || len(streams) < 20 {
		t.Fatalf("%d streams, %d refused: the descriptors did not run out", len(streams), refused)
	}

	// While the router has no free descriptors.
	ask := func(url string) (status int, took time.Duration) {
		began := time.Now()
		req, _ := http.NewRequest("GET", url, nil)
		req.Header.Set("Authorization", "Bearer "+harness.PlantedSecret)
		resp, err := (&http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Errorf("%s: %v", url, err)
			return 0, time.Since(began)
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, time.Since(began)
	}
	began, cpu := time.Now(), cpuOf(p.Cmd.Process.Pid)
	asked, answered := 0, 0
	var worst time.Duration
	for time.Since(began) < span {
		for _, url := range []string{"http://" + adminAddr + "/admin/v1/workers", "http://" + adminAddr + "/metrics", "http://" + p.Addr + "/readyz", "http://" + p.Addr + "/livez"} {
			status, took := ask(url)
			if status != 200 {
				t.Errorf("%s answered %d", url, status)
			}
			asked++
			worst = max(worst, took)
		}
		if nc, status := stream(); status == 503 {
			answered++
			nc.Close()
		} else if status == 200 {
			streams = append(streams, nc) // one had ended
		}
		testwait.Pace(50 * time.Millisecond)
	}
	for _, nc := range late {
		io.WriteString(nc, body[20:])
		resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
		if err != nil {
			t.Errorf("a request that was in progress: %v", err)
			continue
		}
		if resp.StatusCode != 200 && (resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != "too_many_connections") {
			t.Errorf("a request that was in progress: %d %s", resp.StatusCode, resp.Header.Get("X-Sluice-Reason"))
		}
		nc.Close()
	}
	used := cpuOf(p.Cmd.Process.Pid) - cpu
	share := used.Seconds() / time.Since(began).Seconds()
	if share > 0.5 {
		t.Errorf("%.0f %% of a core while it waited", 100*share)
	}
	page := harness.Get(t, "http://"+p.Addr+"/metrics").Body
	metric := func(name string) float64 { return harness.SeriesValue(string(page), name) }
	if metric(`sluice_rank_breaker_state{`) != 0 || metric(`sluice_worker_state{worker="aggregated-0",role="aggregated",state="ready"}`) != 1 {
		t.Errorf("the engine has to pay for it:\n%s", page)
	}
	if answered == 0 || metric(`sluice_fd_limit_events_total{event="rejected"}`)+metric(`sluice_requests_refused_total{`) == 0 {
		t.Errorf("no client got a 503 with Retry-After: %d of the test's, %v", answered, string(page))
	}
	for i, nc := range streams { // the streams have continued meanwhile
		nc.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := nc.Read(make([]byte, 64<<10)); err != nil {
			t.Errorf("stream %d: %v", i, err)
		}
		nc.Close()
	}
	testwait.UntilWithin(t, 30*time.Second, "all is as before", func() bool {
		resp, err := http.Post("http://"+p.Addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	harness.LogFigure(t, 10, "%d descriptors, %d streams held for %v: %d questions to admin, metrics and health answered, the slowest in %d ms; %d new streams answered 503; %.0f %% of a core; no stream lost, no breaker opened",
		limit, len(streams), span, asked, worst.Milliseconds(), answered, 100*share)
}

// launchWithFileLimit is harness.Launch with a limit of open files.
func launchWithFileLimit(t *testing.T, files int, env []string, args ...string) *harness.Process {
	t.Helper()
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("there is no sh to set the limit with")
	}
	script := filepath.Join(t.TempDir(), "limited")
	text := fmt.Sprintf("#!%s\nulimit -n %d && exec %q \"$@\"\n", shell, files, harness.BuiltBinary(t))
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return harness.LaunchAs(t, script, env, args...)
}

// cpuOf returns the CPU time that a process has used.
func cpuOf(pid int) time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	sys, _ := strconv.Atoi(f[12])
	return time.Duration(user+sys) * 10 * time.Millisecond
}
