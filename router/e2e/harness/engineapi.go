package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// SocketIn returns a path for a unix socket in a new folder. It is shorter than t.TempDir's
// paths, which may exceed the system's limit for socket paths.
func SocketIn(t testing.TB) string {
	dir, err := os.MkdirTemp("", "sl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "r.sock")
}

// WithEngineAPI enables the engine API on all of its endpoints: HTTP, the unix socket path and
// TCP.
func WithEngineAPI(path string) func(*config.Config) {
	return func(c *config.Config) {
		c.EngineAPI.HTTP, c.EngineAPI.UnixSocket, c.EngineAPI.Listen = true, path, "127.0.0.1:0"
		c.EngineAPI.StartTimeout = 10 * time.Second
	}
}

// WireAddr returns the address of a router's framed socket on a network (tcp or unix), or ""
// while it is not open.
func WireAddr(r *Router, network string) string {
	for _, a := range r.EngineAPIAddrs() {
		if a.Network() == network {
			return network + "://" + a.String()
		}
	}
	return ""
}

// DialEngine waits until a router's framed socket is open and connects to it.
func DialEngine(t testing.TB, r *Router, network string) *client.Client {
	t.Helper()
	addr := ""
	testwait.UntilWithin(t, TestTimeout, "the engine socket is open", func() bool { addr = WireAddr(r, network); return addr != "" })
	c, err := client.Dial(context.Background(), addr, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TokenIDs returns a prompt of n token ids that depends on salt.
func TokenIDs(n, salt int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(300 + (i*7+salt*131)%900)
	}
	return list
}

// EngineAPIRequest returns a request for exactly n tokens (ignore_eos).
func EngineAPIRequest(prompt []uint32, n int) *client.Request {
	return &client.Request{Model: "sim", TokenIDs: prompt, StopConditions: map[string]any{"max_tokens": n, "ignore_eos": true}, SamplingOptions: map[string]any{"temperature": 0}}
}

// EngineAPIAnswer is a complete response of the engine API.
type EngineAPIAnswer struct {
	Tokens   map[int][]uint32
	Finish   map[int]string
	Usage    *client.Usage
	Comments []string
	Failure  *client.Failure
	Extra    any
	Items    int
	Err      error
}

// ReadEngineAPI reads a stream to its end and merges its items. Tokens and Finish are by index of
// the choice; Err is the error of the stream, nil after a complete one. If ctx ends first, Err is
// its error and the answer has the items received until then.
func ReadEngineAPI(ctx context.Context, s *client.Stream) *EngineAPIAnswer {
	a := &EngineAPIAnswer{Tokens: map[int][]uint32{}, Finish: map[int]string{}}
	for {
		it, err := s.Next(ctx)
		if it == nil {
			a.Err = err
			return a
		}
		a.Items++
		a.Comments = append(a.Comments, it.Comment...)
		if it.Failure != nil {
			a.Failure = it.Failure
		}
		if d := it.Data; d != nil {
			a.Tokens[d.Index] = append(a.Tokens[d.Index], d.TokenIDs...)
			if d.FinishReason != "" {
				a.Finish[d.Index] = d.FinishReason
			}
			if d.Usage != nil {
				a.Usage = d.Usage
			}
			if d.ExtraArgs != nil {
				a.Extra = d.ExtraArgs
			}
		}
	}
}

// GenerateEngineAPI sends a request over a framed socket and reads the whole response, for at most
// 20 s. It ends the test if the request cannot be sent; the caller checks Err and Failure.
func GenerateEngineAPI(t testing.TB, c *client.Client, r *client.Request) *EngineAPIAnswer {
	t.Helper()
	s, err := c.Generate(r)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return ReadEngineAPI(ctx, s)
}

// GenerateEngineAPIHTTP sends the request to the engine API's HTTP endpoint.
func GenerateEngineAPIHTTP(t testing.TB, r *Router, body string) (*Answer, *EngineAPIAnswer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	raw, err := TryPost(ctx, r.URL+"/v1/engine/generate", body)
	if err != nil {
		t.Fatal(err)
	}
	a := &EngineAPIAnswer{Tokens: map[int][]uint32{}, Finish: map[int]string{}}
	done := 0
	for event := range strings.SplitSeq(string(raw.Body), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			done++
			continue
		}
		var v struct {
			Data *struct {
				TokenIDs []uint32 `json:"token_ids"`
				Finish   *string  `json:"finish_reason"`
				Index    int      `json:"index"`
				Usage    *struct {
					P       int `json:"prompt_tokens"`
					C       int `json:"completion_tokens"`
					T       int `json:"total_tokens"`
					Details *struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				} `json:"completion_usage"`
			} `json:"data"`
			Event   string
			Comment []string
			Error   *client.Failure
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			t.Fatalf("%v in %s", err, data)
		}
		a.Items++
		a.Comments = append(a.Comments, v.Comment...)
		if v.Error != nil {
			a.Failure = v.Error
		}
		if d := v.Data; d != nil {
			a.Tokens[d.Index] = append(a.Tokens[d.Index], d.TokenIDs...)
			if d.Finish != nil {
				a.Finish[d.Index] = *d.Finish
			}
			if d.Usage != nil {
				a.Usage = &client.Usage{Prompt: d.Usage.P, Completion: d.Usage.C, Total: d.Usage.T, Cached: -1}
			}
		}
	}
	if raw.Status == 200 && done != 1 {
		t.Errorf("%d times [DONE] in %s", done, raw.Body)
	}
	return raw, a
}

// EngineAPIRequestJSON returns the body of a request to the engine API's HTTP endpoint.
func EngineAPIRequestJSON(r *client.Request) string {
	of := map[string]any{"id": r.Context.ID, "traceparent": r.Context.Traceparent}
	maps.DeleteFunc(of, func(_ string, v any) bool { return v == "" })
	b, err := json.Marshal(map[string]any{"model": r.Model, "token_ids": r.TokenIDs, "stop_conditions": r.StopConditions, "sampling_options": r.SamplingOptions, "annotations": r.Annotations, "context": of})
	if err != nil {
		panic(err)
	}
	return string(b)
}

// StartEngineRouter starts a router with the engine API over n aggregated simulated engines.
func StartEngineRouter(t *testing.T, n int, mod func(*sim.Options), conf func(*config.Config)) (*Router, []*sim.Engine) {
	t.Helper()
	var engines []*sim.Engine
	var workers []config.Worker
	for i := range n {
		e := StartSim(t, mod)
		engines = append(engines, e)
		workers = append(workers, SimWorker(e, worker.Aggregated, fmt.Sprint("e", i)))
	}
	path := SocketIn(t)
	r := StartRouter(t, func(c *config.Config) {
		WithEngineAPI(path)(c)
		if conf != nil {
			conf(c)
		}
	}, workers...)
	return r, engines
}
