package limits

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"sluice/bench/testwait"
	"sluice/dataplane/wire"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

// TestEngineAPIMemory: the body that the router writes for the engine counts against
// limits.memory_budget. A request that fits as received but not as JSON for the engine is refused
// with the same code as one that does not fit at all (503 over HTTP), and its memory is released.
func TestEngineAPIMemory(t *testing.T) {
	r, _ := harness.StartEngineRouter(t, 1, nil, func(c *config.Config) {
		c.Limits.MemoryBudget, c.Limits.MaxBody, c.EngineAPI.MaxFrame = 1<<20, 256<<10, 256<<10
	})
	for _, network := range []string{"unix", "tcp"} {
		c := harness.DialEngine(t, r, network)
		ask := func(text string) *harness.EngineAPIAnswer {
			req := harness.EngineAPIRequest(harness.TokenIDs(20, 1), 3)
			req.Extra = map[string]any{"extra_args": map[string]any{"note": text}}
			return harness.GenerateEngineAPI(t, c, req)
		}
		// 100,000 bytes of msgpack become 600,000 bytes of JSON, which exist twice: the converted
		// request and the body for the engine.
		var refused *wire.Error
		if a := ask(strings.Repeat("\x01", 100_000)); !errors.As(a.Err, &refused) || refused.Code != wire.CodeMemory || a.Failure != nil {
			t.Errorf("%s: six times as much JSON ended with %v, %v; want the code %s", network, a.Err, a.Failure, wire.CodeMemory)
		}
		for _, text := range []string{"short", strings.Repeat("x", 100_000)} {
			if a := ask(text); a.Err != nil || a.Failure != nil || len(a.Tokens[0]) != 3 {
				t.Errorf("%s: %d plain bytes: %v, %v", network, len(text), a.Err, a.Failure)
			}
		}
		testwait.UntilWithin(t, harness.TestTimeout, "nothing is held", func() bool { st := r.Wire.Stats(); return st.Streams == 0 && st.Requests == 0 })
	}

	// Another client's incomplete body uses a quarter of the budget. The router converts a schema
	// to a string for the engine, in which each quote has two more backslashes. String and body
	// together use three quarters, and with the buffers' size classes a little more.
	other, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	fmt.Fprintf(other, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", 256<<10, strings.Repeat(" ", 255<<10))
	testwait.UntilWithin(t, harness.TestTimeout, "the other body is counted", func() bool { return r.Metric("sluice_memory_budget_used_bytes") >= 255<<10 })
	const before, after = `{"model":"sim","token_ids":[1,2,3],"stop_conditions":{"max_tokens":3},"sampling_options":{"guided_decoding":{"json":{"enum":["`, `"]}}}}`
	raw, _ := harness.GenerateEngineAPIHTTP(t, r, before+strings.Repeat(`\"`, (256<<10-len(before)-len(after))/2)+after)
	if raw.Status != http.StatusServiceUnavailable || raw.Header.Get("X-Sluice-Reason") != "memory_budget" {
		t.Errorf("over HTTP: %d %.200s", raw.Status, raw.Body)
	}
}
