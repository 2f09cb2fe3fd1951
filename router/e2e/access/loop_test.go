package access

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestLoopThroughTokenizer: a router that is its own worker asks itself for the tokens of a prompt.
// That question does not name the routers that the request has passed, but the next one does,
// because the router passes a client's /tokenize on: the loop ends there.
func TestLoopThroughTokenizer(t *testing.T) {
	var self atomic.Pointer[url.URL]
	var mu sync.Mutex
	via := map[string][]string{} // by path, the values of the hop header
	own := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		to := self.Load()
		switch {
		case r.URL.Path == "/v1/models":
			io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model"}]}`)
			return
		case r.Method != "POST" || to == nil:
			return // the worker is healthy
		}
		mu.Lock()
		list := append(via[r.URL.Path], r.Header.Get("X-Sluice-Via"))
		via[r.URL.Path] = list
		mu.Unlock()
		if len(list) > 20 {
			w.WriteHeader(500)
			return
		}
		(&httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(to) }}).ServeHTTP(w, r)
	}))
	t.Cleanup(own.Close)
	r := harness.StartRouter(t, nil,
		config.Worker{ID: "self", URL: own.URL, Role: worker.Aggregated, Engine: "vllm", KVEvents: []string{"off"}})
	to, err := url.Parse(r.URL)
	if err != nil {
		t.Fatal(err)
	}
	self.Store(to)
	a := harness.Post(t, r.URL+"/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"round and round"}]}`)
	if a.Status != 508 {
		t.Errorf("status %d %s", a.Status, a.Body)
	}
	mu.Lock()
	defer mu.Unlock()
	if list := via["/tokenize"]; len(list) != 2 || list[0] != "" || list[1] == "" {
		t.Errorf("/tokenize was sent with the hops %q; want a question without and one with them", list)
	}
	if list := via["/v1/chat/completions"]; len(list) != 1 || list[0] == "" {
		t.Errorf("the request was sent with the hops %q; want it once, with them", list)
	}
}
