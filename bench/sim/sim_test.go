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

// fastOptions is an engine that does not wait, ended with the test.
func fastOptions(t testing.TB, o Options) *Engine {
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
