package liveness

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// namespaceVariable is an environment variable of the process that TestVanishedHost starts in a
// network namespace of its own. Its value is the path of the built binary.
const namespaceVariable = "SLUICE_TEST_IN_NAMESPACE"

// TestVanishedHost: an engine's host, behind a pair of virtual network devices, starts to drop all
// packets. The test needs user and network namespaces, and the programs unshare, nsenter and ip.
func TestVanishedHost(t *testing.T) {
	t.Parallel()
	if path := os.Getenv(namespaceVariable); path != "" {
		harness.Binary.Once.Do(func() { harness.Binary.Path = path })
		testVanishedHost(t)
		return
	}
	for _, program := range []string{"unshare", "nsenter", "ip"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the program %s is not there", program)
		}
	}
	if out, err := exec.Command("unshare", "-Urn", "unshare", "-n", "true").CombinedOutput(); err != nil {
		t.Skipf("network namespaces are not permitted here: %v: %s", err, out)
	}
	cmd := exec.Command("unshare", "-Urn", os.Args[0], "-test.run=^TestVanishedHost$", "-test.v", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), namespaceVariable+"="+harness.BuiltBinary(t))
	out, err := cmd.CombinedOutput()
	text := string(out)
	for line := range strings.Lines(text) {
		if strings.Contains(line, "all answered") {
			t.Log(strings.TrimSpace(line))
		}
	}
	switch {
	case strings.Contains(text, "--- SKIP"):
		t.Skip(text)
	case err != nil || !strings.Contains(text, "--- PASS: TestVanishedHost"):
		t.Errorf("in a network namespace: %v\n%s", err, text)
	}
}

func testVanishedHost(t *testing.T) {
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Skipf("ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	const near, far = "10.99.0.1", "10.99.0.2"
	ip("link", "set", "lo", "up")
	vanishedID := harness.LaunchAs(t, "unshare", nil, "-n", harness.BuiltBinary(t), "sim", "--listen", "0.0.0.0:8000", "--kv-events", "off", "--cost-step", "20ms")
	pid := strconv.Itoa(vanishedID.Cmd.Process.Pid)
	// there returns an ip command line for the engine's namespace.
	there := func(args ...string) []string { return append([]string{"-t", pid, "-n", "ip"}, args...) }
	must := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("nsenter", there(args...)...).CombinedOutput(); err != nil {
			t.Skipf("on the engine's host, ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", pid)
	ip("addr", "add", near+"/24", "dev", "near")
	ip("link", "set", "near", "up")
	must("addr", "add", far+"/24", "dev", "far")
	must("link", "set", "far", "up")

	_, well := launchSim(t, worker.Aggregated, "well")
	r := harness.StartRouter(t, shortDetection, config.Worker{ID: "sick", URL: "http://" + far + ":8000", Role: worker.Aggregated, KVEvents: []string{"off"}}, well)
	plain := harness.StartSim(t, nil)
	var all []*harness.PendingRequest
	for i := range 8 {
		all = append(all, harness.StartPending(r.URL, fmt.Sprint("held-", i), i%2 == 0, 80))
	}
	for i := 0; i < len(all); i += 2 {
		<-all[i].First
	}
	must("route", "add", "blackhole", near+"/32") // the host does not even acknowledge packets
	began := time.Now()
	for i, c := range all {
		a, want := c.Wait(t, 30*time.Second), harness.StartPending(plain.URL(), c.Id, i%2 == 0, 80).Wait(t, 10*time.Second)
		if a.Status != 200 || a.Text(t) != want.Text(t) {
			t.Errorf("%s: status %d, text %q, want %q", c.Id, a.Status, a.Text(t), want.Text(t))
		}
	}
	took := time.Since(began)
	cut := r.Metric(`sluice_engine_frozen_calls_total{state="host"}`)
	t.Logf("host vanished: all answered %v later, %v calls ended", took.Round(10*time.Millisecond), cut)
	if n := r.Metric(`sluice_engine_frozen_total{state="host"}`); n != 1 || cut == 0 || took > 10*time.Second {
		t.Errorf("%v verdicts, %v calls ended, after %v", n, cut, took)
	}
	must("route", "del", "blackhole", near+"/32")
	testwait.UntilWithin(t, 20*time.Second, "it is let in again", func() bool {
		return harness.StartPending(r.URL, "again", false, 5).Wait(t, 5*time.Second).Header.Get("X-Sluice-Worker") == "sick"
	})
}
