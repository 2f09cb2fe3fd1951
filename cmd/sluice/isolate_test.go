package main

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

	"sluice/router/kvtransfer"
)

// nixlWheel is where scripts/nixl-wheel.sh unpacks the pinned NIXL.
func nixlWheel(t *testing.T) string {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache", "sluice")
	}
	dir := filepath.Join(cache, "nixl-1.5.1")
	if _, err := os.Stat(filepath.Join(dir, ".complete")); err != nil {
		msg := "no NIXL 1.5.1 in the cache: run scripts/nixl-wheel.sh"
		if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
			t.Fatal(msg)
		}
		t.Skip(msg)
	}
	return dir
}

var agentInProcess = regexp.MustCompile(`in process (\d+)`)

// agentProcesses are the processes that the agents of a router live in, by tier,
// where their tiers are up.
func agentProcesses(t *testing.T, env []string) map[string]int {
	t.Helper()
	var health struct {
		Tier kvtransfer.Status `json:"kv_tier"`
	}
	if err := json.Unmarshal(adminHealth(t, env), &health); err != nil {
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

// A crash inside of NIXL or UCX costs their tiers for a second, and no request: the
// agents live in processes of their own, which are killed here under load.
func TestIsolatedAgentsCrash(t *testing.T) {
	wheel := nixlWheel(t)
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	env, dir := serveEnv(t)
	file := filepath.Join(dir, "sluice.yaml")
	text := fmt.Sprintf(`listen: 127.0.0.1:0
admin: {listen: 127.0.0.1:0}
registration: {listen: "127.0.0.1:0", token: %s}
pd: {family: nixl}
transfers: {nixl: "on", ucx: "on", nixl_library: %s, isolate: true}
workers:
  - {id: p, url: "%s", role: prefill}
  - {id: d, url: "%s", role: decode, options: {connector: ["true"]}}
`, plantedSecret, wheel, p.URL(), d.URL())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	r := launch(t, env, "serve", "--config", file)
	r.ready(t)
	var first map[string]int
	eventually(t, 30*time.Second, "both tiers are up", func() bool { first = agentProcesses(t, env); return len(first) == 2 })

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
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %d %s"}],"max_tokens":4,"stream":%t}`, i, n, prompt, n%2 == 0)
				resp, err := http.Post("http://"+r.first+"/v1/chat/completions", "application/json", strings.NewReader(body))
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
	eventually(t, 10*time.Second, "there is load", func() bool { return asked.Load() > 20 })
	for tier, pid := range first {
		killed, before := time.Now(), asked.Load()
		if err := syscall.Kill(pid, syscall.SIGSEGV); err != nil {
			t.Fatal(err)
		}
		var again int
		eventually(t, 20*time.Second, "another process of "+tier, func() bool {
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
	if err := r.cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the router is not the same process: %v", err)
	}
	last := agentProcesses(t, env)
	dropIdle()
	r.cmd.Process.Kill() // not even asked: its agents' processes go with it
	for tier, pid := range last {
		eventually(t, 5*time.Second, "the process of "+tier+" to end with its router", func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			return err != nil || strings.Contains(string(stat), ") Z ")
		})
	}
}
