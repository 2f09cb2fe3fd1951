package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"testing"
	"time"
)

// fast is an engine that does not wait, ended with the test.
func fast(t testing.TB, o Options) *Engine {
	t.Helper()
	if o.Speed == 0 {
		o.Speed = math.Inf(1)
	}
	e, err := Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

type answer struct {
	status int
	body   []byte
	json   map[string]any
}

// post sends a JSON body and reads the whole answer; extra are header pairs.
func post(t testing.TB, e *Engine, path, body string, extra ...string) answer {
	t.Helper()
	a, err := tryPost(e.URL()+path, body, extra...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func tryPost(url, body string, extra ...string) (answer, error) {
	req, _ := http.NewRequest("POST", url, bytes.NewReader([]byte(body)))
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(extra); i += 2 {
		req.Header.Set(extra[i], extra[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 60 * time.Second}
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	a := answer{status: resp.StatusCode, body: b}
	json.Unmarshal(b, &a.json)
	return a, err
}

func TestSmoke(t *testing.T) {
	e := fast(t, Options{})
	for _, c := range [][2]string{
		{"/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"Hello"}],"max_tokens":12}`},
		{"/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"Hello"}],"max_tokens":3,"stream":true,"n":2,"stream_options":{"include_usage":true},"return_token_ids":true}`},
		{"/v1/completions", `{"model":"sim","prompt":"Hello world","max_tokens":5,"return_token_ids":true}`},
		{"/v1/completions", `{"model":"sim","prompt":[100,101,102],"max_tokens":2,"stream":true,"return_token_ids":true}`},
		{"/inference/v1/generate", `{"token_ids":[100,101,102],"sampling_params":{"max_tokens":2}}`},
		{"/tokenize", `{"messages":[{"role":"user","content":"Hello"}],"return_token_strs":true}`},
		{"/v1/completions", `{"model":"sim","prompt":"Hello world","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`},
	} {
		a := post(t, e, c[0], c[1])
		t.Logf("%s %d\n%s", c[0], a.status, a.body)
	}
	resp, _ := http.Get(e.URL() + "/metrics")
	b, _ := io.ReadAll(resp.Body)
	t.Logf("%s", b[:800])
	t.Logf("%+v", e.Stats())
}
