package kvtransfer

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/registration"
	"sluice/router/fleet"
	"sluice/router/kvtransfer/completion"
)

const token = "test-token-0123456789"

// The tests below run the connector's own package, which reports to a Watcher through a real
// registration listener: over ZMQ with any Python that has pyzmq, over NIXL if it has NIXL.

func cache() string {
	if d := os.Getenv("SLUICE_CACHE"); d != "" {
		return d
	}
	home, _ := os.UserHomeDir()
	return filepath.Join(home, ".cache", "sluice")
}

// python returns a Python that can import the named modules. Otherwise the test is skipped, or
// fails if SLUICE_REQUIRE_NIXL requires NIXL.
func python(t *testing.T, modules string) string {
	t.Helper()
	for _, p := range []string{os.Getenv("SLUICE_PYTHON"), filepath.Join(cache(), "connector-tests/bin/python"), filepath.Join(cache(), "vllm-0.32/venv/bin/python")} {
		if p == "" || exec.Command(p, "-c", "import "+modules).Run() != nil {
			continue
		}
		return p
	}
	const want = "no Python with %s: scripts/connector-test.sh --setup installs them"
	if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
		t.Fatalf(want, modules)
	}
	t.Skipf(want, modules)
	return ""
}

// wheel returns the NIXL library of a Python installation.
func wheel(t *testing.T, python string) string {
	t.Helper()
	found, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages/.nixl_cu1*.mesonpy.libs"))
	if len(found) == 0 {
		t.Fatalf("%s imports NIXL, but no wheel of it lies beside it", python)
	}
	return found[0]
}

// listen serves GET /v1/connector for w.
func listen(t *testing.T, w *Watcher, logs *strings.Builder) string {
	t.Helper()
	cfg := config.Default()
	cfg.Registration.Listen, cfg.Registration.Token = "127.0.0.1:0", token
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	s, err := registration.New(registration.Options{
		Config: cfg.Registration, Log: slog.New(slog.NewTextHandler(logs, nil)),
		Connector: func(reached netip.Addr) (any, error) { return w.Document(reached) },
	})
	if err != nil {
		t.Fatal(err)
	}
	f := fleet.New(fleet.Options{})
	r := discovery.NewRunner(f, slog.New(slog.DiscardHandler))
	if err := r.Start(s); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); f.Close() })
	return "http://" + s.Addr()
}

// reporter is the Python process.
type reporter struct {
	t   *testing.T
	in  *os.File
	out *bufio.Scanner
}

func startReporter(t *testing.T, python, router, channel string) *reporter {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	cmd := exec.CommandContext(ctx, python, "testdata/report.py", router, token, channel)
	cmd.Env = append(os.Environ(), "PYTHONPATH=../../nixl/connector", "PYTHONDONTWRITEBYTECODE=1", "UCX_TLS=tcp,self,cma", "UCX_NET_DEVICES=lo", "NIXL_LOG_LEVEL=ERROR")
	cmd.Stderr = os.Stderr
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = read
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	read.Close()
	t.Cleanup(func() { write.Close(); cancel(); cmd.Wait() })
	return &reporter{t, write, bufio.NewScanner(out)}
}

// send sends a report and returns the channel that carried it.
func (r *reporter) send(line string) string {
	r.t.Helper()
	fmt.Fprintln(r.in, line)
	if !r.out.Scan() {
		r.t.Fatalf("the reporter ended: %v", r.out.Err())
	}
	f := strings.Fields(r.out.Text())
	if len(f) != 3 || f[0] != "sent" {
		r.t.Fatalf("the reporter says %q", r.out.Text())
	}
	return f[2]
}

// reportAll checks that every kind of report arrives over a channel.
func reportAll(t *testing.T, w *Watcher, r *reporter, channel string) {
	t.Helper()
	wait := w.Open("plain", time.Now())
	if got := r.send("recv ok 4096 1500 cmpl-plain-0-0badcafe"); got != channel {
		t.Errorf("it went by %s, want %s", got, channel)
	}
	testwait.Until(t, "a line is booked", func() bool { return wait.expected.Result().State == completion.Done })
	if res := wait.Close(); res.Bytes != 4096 || res.Duration != 1500*time.Microsecond {
		t.Errorf("%+v", res)
	}
	for i := range 3 {
		wait = w.Open("lent", time.Now())
		wait.AcquireSlot(time.Minute)
		r.send(fmt.Sprintf(`recv ok 8192 %d cmpl-lent-0-0badcafe {"do_remote_prefill":true,"sluice":%s}`, 100+i, wait.AppendSlot(nil)))
		testwait.Until(t, "a record is booked", func() bool { return wait.expected.Result().State == completion.Done })
		if res := wait.Close(); res.Bytes != 8192 || res.Duration != time.Duration(100+i)*time.Microsecond {
			t.Errorf("%+v", res)
		}
	}
	wait = w.Open("bad", time.Now())
	wait.AcquireSlot(time.Minute)
	r.send(fmt.Sprintf(`recv failed 0 0 cmpl-bad-0-0badcafe {"sluice":%s}`, wait.AppendSlot(nil)))
	testwait.Until(t, "a failure is booked", func() bool { return wait.LostReason() == "failed" })
	wait.Close()
	wait = w.Open("late", time.Now())
	r.send("expired ok 0 0 cmpl-late-0-0badcafe")
	testwait.Until(t, "an expiry is booked", func() bool { return wait.LostReason() == "expired" })
	wait.Close()
	if rep := w.Reports(); rep["malformed"] != 0 || rep["refused"] != 0 || rep["unknown"] != 0 {
		t.Errorf("%v", rep)
	}
}

func TestConnectorOverZMQ(t *testing.T) {
	py := python(t, "zmq")
	w := startOverZMQ(t)
	var logs strings.Builder
	url := listen(t, w, &logs)
	for auth, want := range map[string]int{"": 401, "Bearer wrong": 401, "Bearer " + token: 200} {
		req, _ := http.NewRequest("GET", url+"/v1/connector", nil)
		req.Header.Set("Authorization", auth)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want || want == 200 && resp.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("Authorization %q: %d, want %d", auth, resp.StatusCode, want)
		}
	}
	reportAll(t, w, startReporter(t, py, url, "auto"), "zmq")
}

// TestRealConnectorOverNIXL sends lines by notification and records by a WRITE into the board.
// When the agent dies, the connector continues over ZMQ until the agent is back.
func TestRealConnectorOverNIXL(t *testing.T) {
	py := python(t, "zmq, nixl._api")
	var logs strings.Builder
	w := start(t, Options{
		NIXL: true, Search: nixl.Search{Path: wheel(t, py)}, Endpoint: "tcp://127.0.0.1:*", Slots: 64,
		Log: slog.New(slog.NewTextHandler(&logs, nil)),
	})
	testwait.Until(t, "NIXL is up", func() bool { return w.Up(nixl.TierNIXL) })
	url := listen(t, w, &logs)
	r := startReporter(t, py, url, "auto")
	reportAll(t, w, r, "nixl")

	before, _ := w.Document(netip.Addr{})
	w.agent.Agent().Close() // simulates a failure
	testwait.Until(t, "the agent is seen to be dead", func() bool { return !w.Up(nixl.TierNIXL) })
	if s := w.Status(); s.Active != nixl.TierZMQ {
		t.Errorf("active is %s: %s", s.Active, s.Reason)
	}
	during, _ := w.Document(netip.Addr{})
	if during.NIXL != nil || during.Epoch == before.Epoch {
		t.Errorf("the dead agent is still offered")
	}
	wait := w.Open("between", time.Now())
	wait.AcquireSlot(time.Minute)
	r.send(fmt.Sprintf(`recv ok 1 1 cmpl-between-0-0badcafe {"sluice":%s}`, wait.AppendSlot(nil)))
	testwait.Until(t, "the report after the agent's death", func() bool { return wait.expected.Result().State == completion.Done })
	wait.Close()
	testwait.Until(t, "the agent is back", func() bool { return w.Up(nixl.TierNIXL) })
	if after, _ := w.Document(netip.Addr{}); after.NIXL == nil || after.Epoch == during.Epoch {
		t.Error("the new agent is not offered")
	}
	w.Close()
	if d := string(before.NIXL.Metadata); len(d) < 100 || strings.Contains(logs.String(), d[:100]) {
		t.Error("the metadata is in the log")
	}
}
