package main

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"sluice/dataplane/wire"
	"sluice/router/config"
)

// TestEngineAPIMemory: what a request becomes counts in limits.memory_budget: one that fits as
// it comes and not as the JSON that engines are asked with is refused by the code of
// those that do not fit at all, over HTTP with 503, and nothing of it is kept.
func TestEngineAPIMemory(t *testing.T) {
	r, _ := startEngineRouter(t, 1, nil, func(c *config.Config) {
		c.Limits.BodyBudget, c.Limits.MaxBody, c.EngineAPI.MaxFrame = 1<<20, 256<<10, 256<<10
	})
	for _, network := range []string{"unix", "tcp"} {
		c := dialEngine(t, r, network)
		ask := func(text string) *engineAPIAnswer {
			req := engineAPIRequest(tokenIDs(20, 1), 3)
			req.Extra = map[string]any{"extra_args": map[string]any{"note": text}}
			return generateEngineAPI(t, c, req)
		}
		// 100,000 bytes of msgpack and 600,000 of JSON, of which there are two: what came, and
		// what goes to the engine.
		var refused *wire.Error
		if a := ask(strings.Repeat("\x01", 100_000)); !errors.As(a.err, &refused) || refused.Code != wire.CodeMemory || a.failure != nil {
			t.Errorf("%s: six times as much JSON ended with %v, %v; want the code %s", network, a.err, a.failure, wire.CodeMemory)
		}
		for _, text := range []string{"short", strings.Repeat("x", 100_000)} {
			if a := ask(text); a.err != nil || a.failure != nil || len(a.tokens[0]) != 3 {
				t.Errorf("%s: %d plain bytes: %v, %v", network, len(text), a.err, a.failure)
			}
		}
		eventually(t, testTimeout, "nothing is held", func() bool { st := r.Wire.Stats(); return st.Streams == 0 && st.Requests == 0 })
	}

	// A schema becomes a text for the engine, in which each of its quotes has a backslash:
	// with the body as it came it is over the budget.
	const before, after = `{"model":"sim","token_ids":[1,2,3],"stop_conditions":{"max_tokens":3},"sampling_options":{"guided_decoding":{"json":{"enum":["`, `"]}}}}`
	raw, _ := generateEngineAPIHTTP(t, r, before+strings.Repeat(`\"`, (256<<10-len(before)-len(after))/2)+after)
	if raw.Status != http.StatusServiceUnavailable || raw.Header.Get("X-Sluice-Reason") != "memory_budget" {
		t.Errorf("over HTTP: %d %.200s", raw.Status, raw.Body)
	}
}
