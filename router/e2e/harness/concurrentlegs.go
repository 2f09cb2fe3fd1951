package harness

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/worker"
)

// The helpers of this file serve the tests of families whose two legs run concurrently. The
// tests use scripted engines and check which engine receives what, and the effect that the end
// of one leg has on the other.

// Responses of a decode leg to a chat request, with the text "ok": one that is not streamed, and the
// two parts of a stream, an event with the text and the final event.
const (
	WholeAnswer  = `{"id":"x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
	StreamChunk  = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"ok\"}}]}\n\n"
	StreamEnding = "data: [DONE]\n\n"
)

// SGLangPD selects the sglang family without calls of the engines' tokenizers. A tokenizer call
// would leave an idle connection in the pool, and the router sends a leg again if a reused
// connection is reset; the tests do not expect the second leg.
func SGLangPD(c *config.Config) { c.PD.Family, c.Tokens.Mode = "sglang", "text" }

// WithBootstrap returns the engine as a prefill worker with a bootstrap port. Nothing listens
// on the port, because only engines connect to it, never the router.
func (s *ScriptedEngine) WithBootstrap(id string) config.Worker {
	w := s.Worker(worker.Prefill, id)
	w.Options = map[string][]string{"bootstrap_port": {"8998"}}
	return w
}

// Room returns the bootstrap room of the i-th request that the engine received.
func (s *ScriptedEngine) Room(t *testing.T, i int) string {
	t.Helper()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if i >= len(s.Bodies) {
		t.Fatalf("the engine saw %d requests, want more than %d", len(s.Bodies), i)
	}
	var v struct {
		Room json.Number `json:"bootstrap_room"`
	}
	if err := json.Unmarshal([]byte(s.Bodies[i]), &v); err != nil || v.Room == "" {
		t.Fatalf("no room in %s (%v)", s.Bodies[i], err)
	}
	return v.Room.String()
}

// AnswerOK writes a successful decode response, streamed if the request asks for a stream.
func AnswerOK(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if !strings.Contains(string(body), `"stream":true`) {
		ReplyJSON(w, 200, WholeAnswer)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	io.WriteString(w, StreamChunk+StreamEnding)
}

// SGLangEndpoints are the two forms of a response: whole, and as a stream. More is appended to the
// members of a request's body.
var SGLangEndpoints = []struct{ Name, More string }{{"whole", ""}, {"stream", `,"stream":true`}}

// WantNoLoad waits until no rank has reserved load.
func WantNoLoad(t *testing.T, r *Router) {
	t.Helper()
	testwait.UntilWithin(t, 10*time.Second, "no load is booked any more", func() bool {
		for _, w := range r.Fleet.View().Workers {
			for _, rank := range w.Ranks {
				if rank.Requests.Load() != 0 || rank.PrefillTokens.Load() != 0 || rank.DecodeBlocks.Load() != 0 {
					return false
				}
			}
		}
		return true
	})
}
