package admission

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestMemoryOfWaiting measures what a router process takes for each waiting request, all parts together: the
// connection, the goroutine, the parsed request, token ids, hashes and the queue's own part. docs/admission.md
// has its figures.
func TestMemoryOfWaiting(t *testing.T) {
	if os.Getenv("SLUICE_LONG") == "" {
		t.Skip("it only measures; SLUICE_LONG=1 runs it")
	}
	for _, c := range []struct{ requests, promptTokens int }{{4000, 60}, {2000, 3000}} {
		t.Run(fmt.Sprint(c.promptTokens), func(t *testing.T) { measureWaiting(t, c.requests, c.promptTokens) })
	}
}

// measureWaiting lets requests with prompts of token ids wait in a router of its own.
func measureWaiting(t *testing.T, requests, promptTokens int) {
	e := harness.StartSim(t, nil)
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--engine", e.URL(),
		"--set", "limits.rank_requests=1", "--set", "limits.max_conns_per_ip=0", "--set", "admission.max_wait=10m")
	p.Ready(t)
	release := harness.DelayAnswers(sim.Fault{Path: "/v1/completions"}, e)
	defer release()
	metric := func(name string) int {
		page := string(harness.Get(t, "http://"+p.Addr+"/metrics").Body)
		_, rest, found := strings.Cut(page, "\n"+name+" ")
		value, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseFloat(value, 64)
		if !found || err != nil {
			t.Fatalf("no metric %s: %q", name, value)
		}
		return int(n)
	}
	const waiting, budget = `sluice_admission_waiting_requests{class="default"}`, "sluice_memory_budget_used_bytes"
	bytes := 0
	send := func(i int) net.Conn {
		ids := make([]string, promptTokens)
		for k := range ids {
			ids[k] = strconv.Itoa((i*7919+k*31)%30000 + 1)
		}
		body := `{"model":"sim","max_tokens":2,"prompt":[` + strings.Join(ids, ",") + "]}"
		bytes = len(body)
		c, err := net.Dial("tcp", p.Addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
			t.Fatal(err)
		}
		return c
	}
	send(0)
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
	before, counted := p.MemoryOf(t, "VmRSS"), metric(budget)
	conns := make([]net.Conn, requests)
	for i := range conns {
		conns[i] = send(i + 1)
	}
	testwait.UntilWithin(t, time.Minute, "all wait", func() bool { return metric(waiting) == requests })
	t.Logf("%d requests with bodies of %d bytes wait: %.1f KiB of resident memory each, of which limits.memory_budget counts %.1f KiB",
		requests, bytes, float64(p.MemoryOf(t, "VmRSS")-before)/1024/float64(requests), float64(metric(budget)-counted)/1024/float64(requests))
	for _, c := range conns {
		c.Close()
	}
	testwait.UntilWithin(t, time.Minute, "all have left", func() bool { return metric(waiting) == 0 && metric(budget) <= counted })
}
