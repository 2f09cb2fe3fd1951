package harness

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/router/config"
	"sluice/router/worker"
)

// ScriptedEngine is an HTTP server whose inference handler is written by a test. It answers
// probes like a healthy engine, publishes no KV events, and has a tokenizer only if Tokenize is
// set.
type ScriptedEngine struct {
	*httptest.Server
	Mu       sync.Mutex
	Bodies   []string
	Ids      []string
	Tokenize http.HandlerFunc // nil: 404
}

// StartScripted starts an engine that serves one model, sim, and calls infer for every POST request
// but /tokenize, each in its own goroutine. The body is recorded, and infer can read it. When the
// test ends, the connections of the engine are closed; the test fails if a handler does not return
// within 20 s.
func StartScripted(t *testing.T, infer http.HandlerFunc) *ScriptedEngine {
	t.Helper()
	s := new(ScriptedEngine)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model","root":"sim","parent":null,"max_model_len":4096}]}`)
	})
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, r *http.Request) {
		if s.Tokenize == nil {
			http.NotFound(w, r)
			return
		}
		s.Tokenize(w, r)
	})
	mux.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		s.Mu.Lock()
		s.Bodies = append(s.Bodies, string(body))
		s.Ids = append(s.Ids, r.Header.Get("X-Request-Id"))
		s.Mu.Unlock()
		infer(w, r)
	})
	s.Server = httptest.NewServer(mux)
	t.Cleanup(func() {
		s.CloseClientConnections()
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			s.Close()
		}()
		select {
		case <-closed:
		case <-time.After(handlerEnd):
			t.Errorf("a handler of the engine at %s still runs %s after its connections were closed", s.URL, handlerEnd)
		}
	})
	return s
}

// handlerEnd is how long handlers may run after their connections were closed. Close waits for them
// without a bound, and so hides the failure that keeps a handler waiting.
const handlerEnd = 20 * time.Second

// Requests returns the number of inference requests received.
func (s *ScriptedEngine) Requests() int {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return len(s.Bodies)
}

// Worker returns the configuration of the engine as a worker without KV events.
func (s *ScriptedEngine) Worker(r worker.Role, id string) config.Worker {
	return config.Worker{ID: id, URL: s.URL, Role: r, KVEvents: []string{"off"}}
}

// ReplyRaw hijacks the connection, writes bytes that need not be valid HTTP, and closes it, with
// a RST if reset is set.
func ReplyRaw(w http.ResponseWriter, bytes string, reset bool) {
	nc, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	io.WriteString(nc, bytes)
	if tc, ok := nc.(*net.TCPConn); ok && reset {
		tc.SetLinger(0)
	}
	nc.Close()
}

// ReplyJSON writes a response whose body is JSON.
func ReplyJSON(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	io.WriteString(w, body)
}

// PrefillReply returns the response of a prefill leg. handle is the JSON of its
// kv_transfer_params; "" omits the member.
func PrefillReply(handle string) string {
	if handle != "" {
		handle = `,"kv_transfer_params":` + handle
	}
	return fmt.Sprintf(`{"id":"cmpl-x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}%s}`, handle)
}

// ReplyHandler returns an engine handler that sends the same JSON response to every request.
func ReplyHandler(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { ReplyJSON(w, status, body) }
}
