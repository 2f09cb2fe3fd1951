package relay

import (
	"net"
	"sluice/dataplane/sse"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestEngineOmitsDone: an engine stops sending after the last event of an answer and before [DONE],
// and keeps the connection open. The client gets [DONE] after lastGrace if the finish reasons of all
// choices, and the usage if it was asked for, prove that the answer is complete. Otherwise the
// engine has IdleTimeout, and the client gets an error.
func TestEngineOmitsDone(t *testing.T) {
	const (
		token  = `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
		other  = `data: {"choices":[{"index":1,"delta":{"content":"b"}}]}` + "\n\n"
		finish = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
		second = `data: {"choices":[{"index":1,"delta":{},"finish_reason":"length"}]}` + "\n\n"
		usage  = `data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}` + "\n\n"
		both   = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}` + "\n\n"
		done   = "data: [DONE]\n\n"
		idle   = 2*lastGrace + lastGrace/2
	)
	one, two := Options{Choices: 1, EndsWithChoices: true}, Options{Choices: 2, EndsWithChoices: true}
	oneUsage := Options{Choices: 1, EndsWithChoices: true, Usage: true}
	var waiting sync.WaitGroup
	defer waiting.Wait()
	for name, k := range map[string]struct {
		opt   Options
		sent  []string
		whole bool
	}{
		"one choice":                  {one, []string{token, finish}, true},
		"one choice, usage unasked":   {one, []string{token, both}, true},
		"two choices":                 {two, []string{token, other, second, token, finish}, true},
		"usage":                       {oneUsage, []string{token, finish, usage}, true},
		"usage in every event":        {oneUsage, []string{token, both, usage}, true},
		"no finish":                   {one, []string{token}, false},
		"one of two choices":          {two, []string{token, finish}, false},
		"one of two that were begun":  {one, []string{token, finish, other}, false},
		"no usage":                    {oneUsage, []string{token, finish}, false},
		"usage with the finish alone": {oneUsage, []string{token, both}, false},
		"unknown number of choices":   {Options{Choices: 1}, []string{token, finish}, false},
	} {
		for _, rewrite := range []sse.Rewriter{nil, &identityRewriter{}} {
			waiting.Go(func() {
				e := engine(t, func(nc *net.TCPConn) {
					send(nc, streamHead+chunksOf(k.sent...))
					waitClosed(nc)
				})
				resp := open(t, e, nil)
				dst, began, opt := new(doneSink), time.Now(), k.opt
				opt.Protocol, opt.IdleTimeout, opt.Rewrite = sse.OpenAI, idle, rewrite
				res := Stream(dst, resp, opt)
				took := time.Since(began)
				resp.Release()
				want, cause := strings.Join(k.sent, "")+done, Completed
				if !k.whole {
					want, cause = strings.Join(k.sent, "")+"data: {\"error\"", EngineStalled
				}
				got := string(dechunk(t, dst.got))
				if !strings.HasPrefix(got, want) || k.whole && got != want || res.Cause != cause || !res.Reusable || (res.Err == nil) != k.whole {
					t.Errorf("%s: %+v, got %q", name, res, got)
				}
				if k.whole && took >= idle || !k.whole && took < idle {
					t.Errorf("%s: it took %v; the engine may be silent for %v", name, took, idle)
				}
				if n := e.Stats().Open; n != 0 {
					t.Errorf("%s: %d connections to the engine are open", name, n)
				}
			})
		}
	}
}
