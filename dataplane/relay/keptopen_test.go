package relay

import (
	"net"
	"sluice/dataplane/sse"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// doneSink is a client that records when its stream was reported done.
type doneSink struct {
	recordingConn
	done   []time.Time
	usage  Usage
	failed bool
}

func (d *doneSink) Done(u Usage, failed bool) {
	d.done, d.usage, d.failed = append(d.done, time.Now()), u, failed
}

// TestEngineKeepsOpen: a stream is complete at its protocol's last event. An engine that does
// not end its response behind it, or sends more, is left, and its client gets a proper end
// without what came behind.
func TestEngineKeepsOpen(t *testing.T) {
	const (
		token = `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
		usage = `data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}` + "\n\n"
		done  = "data: [DONE]\n\n"
		erred = `data: {"error":{"message":"boom","code":500}}` + "\n\n"
		stop  = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
		ended = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\"}}\n\n"
	)
	waits := func(nc *net.TCPConn) { waitClosed(nc) }
	trickle := func(nc *net.TCPConn) {
		for range 40 {
			testwait.Pace(lastGrace / 10)
			if _, err := nc.Write([]byte(chunksOf(": on\n\n"))); err != nil {
				return
			}
		}
	}
	var waiting sync.WaitGroup
	defer waiting.Wait()
	for name, k := range map[string]struct {
		protocol     sse.Protocol
		sent, behind string // behind comes in a read of its own
		more         func(nc *net.TCPConn)
		want         string // blank lines at its end do not count
		cause        Cause
	}{
		"silence":                    {sse.OpenAI, chunksOf(token, usage, done), "", waits, token + usage + done, Completed},
		"half a last chunk":          {sse.OpenAI, chunksOf(token, usage, done) + "0\r\n", "", waits, token + usage + done, Completed},
		"an error, silence":          {sse.OpenAI, chunksOf(erred, done), "", waits, erred + done, EngineReportedError},
		"Messages, silence":          {sse.Anthropic, chunksOf(stop), "", waits, stop, Completed},
		"Responses, silence":         {sse.Responses, chunksOf(ended), "", waits, ended, Completed},
		"comments without end":       {sse.OpenAI, chunksOf(token, usage, done), "", trickle, token + usage + done, Completed},
		"more in the same chunk":     {sse.OpenAI, chunksOf(token + usage + done + token), "", waits, token + usage + done, Completed},
		"more in the same read":      {sse.OpenAI, chunksOf(token, usage, done, token, token), "", waits, token + usage + done, Completed},
		"more in another read":       {sse.OpenAI, chunksOf(token, usage, done), chunksOf(token, erred), waits, token + usage + done, Completed},
		"more, and a proper end":     {sse.OpenAI, chunksOf(token, usage, done), chunksOf(token, erred) + sse.LastChunk, waits, token + usage + done, Completed},
		"half a chunk more":          {sse.OpenAI, chunksOf(token, usage, done), chunksOf(token)[:20], waits, token + usage + done, Completed},
		"more in [DONE]'s own chunk": {sse.OpenAI, chunksOf(token + usage + done + token)[:120], chunksOf(token + usage + done + token)[120:], waits, token + usage + done, Completed},
	} {
		for _, opt := range []Options{{}, {Rewrite: &identityRewriter{}}} {
			waiting.Go(func() {
				e := engine(t, func(nc *net.TCPConn) {
					send(nc, streamHead+k.sent)
					if k.behind != "" {
						testwait.Pace(20 * time.Millisecond)
						send(nc, k.behind)
					}
					k.more(nc)
				})
				resp := open(t, e, nil)
				dst, began := new(doneSink), time.Now()
				opt.Protocol, opt.IdleTimeout = k.protocol, time.Minute
				res := Stream(dst, resp, opt)
				took := time.Since(began)
				resp.Release()
				got := strings.TrimRight(string(dechunk(t, dst.got)), "\r\n: ") // a comment may fill a chunk
				if got != strings.TrimRight(k.want, "\n") || res.Cause != k.cause || !res.Reusable || (res.Err == nil) != (k.cause == Completed) {
					t.Errorf("%s: %+v, got %q", name, res, got)
				}
				if took > lastGrace+2*time.Second {
					t.Errorf("%s: it took %v", name, took)
				}
				if len(dst.done) != 1 || dst.done[0].Sub(began) > lastGrace/2 || dst.failed != (k.cause == EngineReportedError) || k.protocol == sse.OpenAI && !dst.failed && dst.usage.Completion != 1 {
					t.Errorf("%s: reported done %d times, %+v, failed %v", name, len(dst.done), dst.usage, dst.failed)
				}
				if n := e.Stats().Open; n != 0 && !strings.HasSuffix(k.behind, sse.LastChunk) {
					t.Errorf("%s: %d connections to the engine are open", name, n)
				}
			})
		}
	}
}
