package limits

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// fixedReplyEngine starts an engine that answers every POST with the same bytes and every GET with a
// healthy probe response. It does as little work as possible, so that a profile of the benchmark
// shows the router.
func fixedReplyEngine(b testing.TB) string {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	whole := func(body string) []byte {
		return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	models := whole(`{"object":"list","data":[{"id":"sim","object":"model","parent":null,"max_model_len":4096}]}`)
	answer := whole(`{"id":"cmpl-1","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":" word word","finish_reason":"length"}],"usage":{"prompt_tokens":64,"completion_tokens":2,"total_tokens":66},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}`)
	query := whole(`{"0":{"engine_id":"e"}}`) // a Mooncake bootstrap server's
	empty := whole(``)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReaderSize(c, 64<<10)
				for {
					first, err := in.ReadSlice('\n')
					if err != nil {
						return
					}
					out := empty
					if bytes.HasPrefix(first, []byte("POST")) {
						out = answer
					} else if bytes.Contains(first, []byte("/v1/models")) {
						out = models
					} else if bytes.Contains(first, []byte("/query")) {
						out = query
					}
					length := 0
					for {
						line, err := in.ReadSlice('\n')
						if err != nil {
							return
						}
						if len(line) <= 2 {
							break
						}
						if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
							length, _ = strconv.Atoi(string(bytes.TrimSpace(v)))
						}
					}
					if _, err := in.Discard(length); err != nil {
						return
					}
					if _, err := c.Write(out); err != nil {
						return
					}
				}
			}()
		}
	}()
	return "http://" + ln.Addr().String()
}

// BenchmarkServe sends one request at a time from one client through a whole router in this process.
// Its time includes client and engine, so it is an upper bound of the router's. Nearly all of its
// allocations are the router's.
func BenchmarkServe(b *testing.B) {
	for _, mode := range []string{"aggregated", "pd", "sglang", "nixl-push", "mooncake"} {
		for _, tokens := range []int{64, 4096} {
			b.Run(fmt.Sprintf("%s/tokens=%d", mode, tokens), func(b *testing.B) {
				ask, size := benchClient(b, mode, tokens)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					ask()
				}
			})
		}
	}
}

// TestServeAllocates: a short request allocates only its id, and a second id in families that need an
// id of the router's own for both legs, sequential or concurrent. The client of the test makes one
// allocation itself.
func TestServeAllocates(t *testing.T) {
	if harness.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for mode, most := range map[string]float64{"aggregated": 2, "pd": 3, "sglang": 2, "mooncake": 2, "nixl-push": 3} {
		t.Run(mode, func(t *testing.T) {
			const rounds = 1000
			ask, _ := benchClient(t, mode, 64)
			allocations := func() float64 {
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				for range rounds {
					ask()
				}
				runtime.ReadMemStats(&after)
				return float64(after.Mallocs-before.Mallocs) / rounds
			}
			// The first rounds allocate memory that stays, mostly for records. Health probes and tests
			// that have just ended allocate too.
			allocations()
			if each := testwait.MedianOf(3, allocations); each >= most+0.5 {
				t.Errorf("%.2f allocations a request; want %.0f", each, most)
			}
		})
	}
}

// benchClient starts a router over engines with fixed responses. It returns a function that sends one
// short request and reads the response, and the size of the response's body.
func benchClient(b testing.TB, mode string, tokens int) (request func(), size int) {
	b.Helper()
	url := fixedReplyEngine(b)
	workers := []config.Worker{{ID: "w", URL: url, KVEvents: []string{"off"}}}
	if mode != "aggregated" {
		_, port, _ := strings.Cut(strings.TrimPrefix(url, "http://"), ":")
		workers = []config.Worker{
			{ID: "p", URL: url, Role: worker.Prefill, KVEvents: []string{"off"}, Options: map[string][]string{"bootstrap_port": {port}}},
			{ID: "d", URL: fixedReplyEngine(b), Role: worker.Decode, KVEvents: []string{"off"}},
		}
	}
	r := harness.LaunchRouter(b, func(c *config.Config) {
		c.Health.Interval, c.Health.MetricsInterval, c.Schedule.Explain = time.Second, -1, 1000
		if mode != "aggregated" && mode != "pd" {
			c.PD.Family = mode
		}
	}, workers...)
	testwait.UntilWithin(b, 30*time.Second, "ready", func() bool { s, _ := r.Pages.Ready(true); return s == 200 })
	return requestFunc(b, r.Addr(), tokens)
}

func requestFunc(b testing.TB, addr string, tokens int) (request func(), size int) {
	body := []byte(`{"model":"sim","max_tokens":2,"prompt":[`)
	for i := range tokens {
		if i > 0 {
			body = append(body, ',')
		}
		body = strconv.AppendInt(body, int64(i+1000), 10)
	}
	body = append(body, "]}"...)
	req := append(fmt.Appendf(nil, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body)), body...)
	c, err := net.Dial("tcp", addr)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	in := bufio.NewReader(c)
	return func() {
		if _, err := c.Write(req); err != nil {
			b.Fatal(err)
		}
		length := -1
		for {
			line, err := in.ReadSlice('\n')
			if err != nil {
				b.Fatal(err)
			}
			if len(line) <= 2 {
				break
			}
			if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
				length, _ = strconv.Atoi(string(bytes.TrimSpace(v)))
			}
		}
		if length < 0 {
			b.Fatal("no Content-Length")
		}
		if _, err := io.CopyN(io.Discard, in, int64(length)); err != nil {
			b.Fatal(err)
		}
	}, len(body)
}
