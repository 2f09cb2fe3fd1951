package harness

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/router/config"
	"sluice/router/worker"
)

// These tests run the families whose two legs go out at once over scripted
// engines: what is sent where, and what the end of one leg does to the other.

const (
	WholeAnswer  = `{"id":"x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
	StreamChunk  = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"ok\"}}]}\n\n"
	StreamEnding = "data: [DONE]\n\n"
)

// SGLangPD leaves the engines' tokenizers alone: a leg on a connection that was
// used before and is reset is sent once more, which these tests do not mean.
func SGLangPD(c *config.Config) { c.PD.Family, c.Tokens.Mode = "sglang", "text" }

// WithBootstrap is a prefill worker whose bootstrap port is known. Nothing
// listens there: engines meet at it, not the router.
func (s *ScriptedEngine) WithBootstrap(id string) config.Worker {
	w := s.Worker(worker.Prefill, id)
	w.Options = map[string][]string{"bootstrap_port": {"8998"}}
	return w
}

// Room is what a request of the scripted engine named as its bootstrap room.
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

// AnswerOK is a decode's good answer in the form asked for.
func AnswerOK(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if !strings.Contains(string(body), `"stream":true`) {
		ReplyJSON(w, 200, WholeAnswer)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	io.WriteString(w, StreamChunk+StreamEnding)
}

var SGLangEndpoints = []struct{ Name, More string }{{"whole", ""}, {"stream", `,"stream":true`}}

// WantNoLoad waits until no leg is booked anywhere.
func WantNoLoad(t *testing.T, r *Router) {
	t.Helper()
	Eventually(t, 10*time.Second, "no load is booked any more", func() bool {
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
