package faults

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
	"sluice/router/kvtransfer"
)

var agentInProcess = regexp.MustCompile(`in process (\d+)`)

// agentProcesses returns the ids of the processes of a router's agents by tier, for the tiers
// that are up.
func agentProcesses(t *testing.T, env []string) map[string]int {
	t.Helper()
	var health struct {
		Tier kvtransfer.Status `json:"kv_tier"`
	}
	if err := json.Unmarshal(harness.AdminHealth(t, env), &health); err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for _, tier := range health.Tier.Tiers {
		if m := agentInProcess.FindStringSubmatch(tier.Reason); m != nil && tier.State == "up" {
			found[string(tier.Tier)], _ = strconv.Atoi(m[1])
		}
	}
	return found
}

// TestIsolatedAgentsCrash kills the agents' processes under load. A crash inside NIXL or UCX
// disables its tier for a second and fails no request, because the agents run in processes of
// their own.
func TestIsolatedAgentsCrash(t *testing.T) {
	t.Parallel()
	wheel := harness.NixlWheel(t)
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	env, dir := harness.ServeEnv(t)
	file := filepath.Join(dir, "sluice.yaml")
	text := fmt.Sprintf(`listen: 127.0.0.1:0
admin: {listen: 127.0.0.1:0}
registration: {listen: "127.0.0.1:0", token: %s}
pd: {family: nixl}
transfers: {nixl: "on", ucx: "on", nixl_library: %s, isolate: true}
workers:
  - {id: p, url: "%s", role: prefill}
  - {id: d, url: "%s", role: decode, options: {connector: ["true"]}}
`, harness.PlantedSecret, wheel, p.URL(), d.URL())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	r := harness.Launch(t, env, "serve", "--config", file)
	r.Ready(t)
	var first map[string]int
	testwait.UntilWithin(t, 30*time.Second, "both tiers are up", func() bool { first = agentProcesses(t, env); return len(first) == 2 })

	var asked, bad atomic.Int64
	var load sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		load.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %d %s"}],"max_tokens":4,"stream":%t}`, i, n, harness.Prompt, n%2 == 0)
				resp, err := http.Post("http://"+r.Addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
				asked.Add(1)
				if err != nil || resp.StatusCode != 200 {
					bad.Add(1)
				}
				if err == nil {
					resp.Body.Close()
				}
			}
		})
	}
	testwait.UntilWithin(t, 10*time.Second, "there is load", func() bool { return asked.Load() > 20 })
	for tier, pid := range first {
		killed, before := time.Now(), asked.Load()
		if err := syscall.Kill(pid, syscall.SIGSEGV); err != nil {
			t.Fatal(err)
		}
		var again int
		testwait.UntilWithin(t, 20*time.Second, "another process of "+tier, func() bool {
			again = agentProcesses(t, env)[tier]
			return again != 0 && again != pid
		})
		t.Logf("%s: process %d crashed, %d has its place after %s; %d requests meanwhile", tier, pid, again, time.Since(killed).Round(time.Millisecond), asked.Load()-before)
	}
	close(stop)
	load.Wait()
	if bad.Load() != 0 {
		t.Errorf("%d of %d requests failed", bad.Load(), asked.Load())
	}
	if err := r.Cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the router is not the same process: %v", err)
	}
	last := agentProcesses(t, env)
	harness.DropIdle()
	r.Cmd.Process.Kill() // without a shutdown: the agents' processes must end with it
	for tier, pid := range last {
		testwait.UntilWithin(t, 5*time.Second, "the process of "+tier+" to end with its router", func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			return err != nil || strings.Contains(string(stat), ") Z ")
		})
	}
}
