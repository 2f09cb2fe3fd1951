package faults

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/klauspost/compress/zstd"

	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// failure is the way in which an attempt fails.
type failure int

const (
	unavailable failure = iota // status 503
	aborted                    // the connection is reset before the head
	broken                     // the body ends early
)

// randomFailures returns up to two failures of each leg. At most one breaks a connection, because
// the router sends a request to no third engine after two connections broke.
func randomFailures(rng *rand.Rand, pd bool) (failures [2][]failure) {
	down := false
	for leg := range failures {
		if leg == 0 && !pd {
			continue
		}
		for range rng.IntN(3) {
			how := failure(0)
			if !down {
				how = failure(rng.IntN(3))
				down = how != unavailable
			}
			failures[leg] = append(failures[leg], how)
		}
	}
	return failures
}

// attemptLog is the attempts of one request, as its engines received them.
type attemptLog struct {
	mu       sync.Mutex
	failures [2][]failure // remaining failures of the prefill leg and of the other leg
	prefills []string     // the bodies
	others   []string
	handle   string // of the last successful prefill
	handles  []string
}

// randomReader returns its bytes in reads of random sizes, so that a client sends chunks of
// these sizes.
type randomReader struct {
	rng  *rand.Rand
	most int
	rest []byte
}

func (r *randomReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), 1+r.rng.IntN(r.most))], r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// postChunked returns a POST request with body, in a random framing and content coding.
func postChunked(t *testing.T, rng *rand.Rand, url, body string) *http.Request {
	t.Helper()
	var sent bytes.Buffer
	encoding := []string{"", "gzip", "zstd"}[rng.IntN(3)]
	switch encoding {
	case "":
		sent.WriteString(body)
	case "gzip":
		w := gzip.NewWriter(&sent)
		io.WriteString(w, body)
		w.Close()
	case "zstd":
		w, err := zstd.NewWriter(&sent)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, body)
		w.Close()
	}
	var from io.Reader = bytes.NewReader(sent.Bytes())
	if rng.IntN(2) == 0 {
		from = &randomReader{rng, 1 + rng.IntN(1<<(8+rng.IntN(9))), sent.Bytes()}
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", url, from)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if encoding != "" {
		req.Header.Set("Content-Encoding", encoding)
	}
	return req
}

// TestRetriesByteForByte: however the engines of a request fail, and however the client uploaded
// it, each attempt receives the client's bytes, except for the edits of its leg.
func TestRetriesByteForByte(t *testing.T) {
	t.Parallel()
	for _, pd := range []bool{false, true} {
		t.Run(fmt.Sprint("pd=", pd), func(t *testing.T) {
			t.Parallel()
			testRetriesByteForByte(t, pd)
		})
	}
}

func testRetriesByteForByte(t *testing.T, pd bool) {
	var requests sync.Map // of *retried, by the number in the request's id
	infer := func(w http.ResponseWriter, r *http.Request) {
		number, _, _ := strings.Cut(r.Header.Get("X-Request-Id"), "n")
		got, ok := requests.Load(number)
		if !ok {
			t.Errorf("id %q", r.Header.Get("X-Request-Id"))
			return
		}
		q := got.(*attemptLog)
		body, _ := io.ReadAll(r.Body)
		leg := 1
		q.mu.Lock()
		if bytes.HasSuffix(body, []byte(harness.PrefillParams+"}")) {
			leg = 0
			q.prefills = append(q.prefills, string(body))
		} else {
			q.others, q.handles = append(q.others, string(body)), append(q.handles, q.handle)
		}
		fails, how := len(q.failures[leg]) > 0, unavailable
		if fails {
			how, q.failures[leg] = q.failures[leg][0], q.failures[leg][1:]
		} else if leg == 0 {
			q.handle = fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8,9],"remote_engine_id":"e%s-%d","remote_host":"127.0.0.1","remote_port":5557}`, number, len(q.prefills))
		}
		handle := q.handle
		q.mu.Unlock()
		switch {
		case fails && how == aborted:
			harness.ReplyRaw(w, "", true)
		case fails && how == unavailable:
			harness.ReplyJSON(w, 503, `{"error":{"message":"not now","type":"Unavailable","code":503}}`)
		case fails:
			harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{\"id\":", false)
		case leg == 0:
			harness.ReplyJSON(w, 200, harness.PrefillReply(handle))
		case bytes.Contains(body, []byte(`,"stream":true`)):
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, `data: {"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"`+number+`","finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
		default:
			harness.ReplyJSON(w, 200, `{"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"`+number+`","finish_reason":"stop"}]}`)
		}
	}
	var workers []config.Worker
	for i := range 3 {
		e := harness.StartScripted(t, infer)
		if pd {
			workers = append(workers, e.Worker(worker.Decode, fmt.Sprint("d", i)), harness.StartScripted(t, infer).Worker(worker.Prefill, fmt.Sprint("p", i)))
		} else {
			workers = append(workers, e.Worker(worker.Aggregated, fmt.Sprint("a", i)))
		}
	}
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1_000_000, 1_000_000
		c.Fleet.RetryBudgetRatio, c.Fleet.RetryBudgetMinPerSecond = 1, 10_000
		c.PD.MaxAttempts, c.PD.DecodeAttempts = 8, 4
	}, workers...)
	var again atomic.Int64 // requests with several prefills
	var wg sync.WaitGroup
	for client := range 3 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(23, uint64(client)))
			for i := range harness.Trials(40) {
				sizes := []int{0, 10, 900, 4 << 10, 12 << 10, 33 << 10, 70 << 10, 300 << 10, 1 << 20, 4 << 20}
				number := strconv.Itoa(client*1_000_000 + i)
				prompt := number + " " + harness.RandomPrompt(rng, rng.IntN(1+sizes[i%len(sizes)]))
				streamed, asked := `,"stream":true`, rng.IntN(2) == 0
				if !asked {
					streamed = `,"stream":false`
				}
				pattern := `{"x":[1,{"b":2,"a":1}],"model":"sim","prompt":"` + prompt + `","max_tokens":%s%s,"seed":9007199254740993%s}`
				body := fmt.Sprintf(pattern, "6", streamed, "")
				failures := randomFailures(rng, pd)
				q := &attemptLog{failures: failures}
				requests.Store(number, q)
				req := postChunked(t, rng, r.URL+"/v1/completions", body)
				req.Header.Set("X-Request-Id", number+"n")
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				answer, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				what := fmt.Sprintf("request %s of %d bytes, coding %q, length %d, failures %v", number, len(body), req.Header.Get("Content-Encoding"), req.ContentLength, failures)
				if err != nil || resp.StatusCode != 200 || !strings.Contains(string(answer), `"text":"`+number+`"`) {
					t.Errorf("%s: status %d, %v: %s", what, resp.StatusCode, err, answer)
					return
				}
				q.mu.Lock()
				if len(q.others) <= len(failures[1]) {
					t.Errorf("%s: %d prefills, %d others", what, len(q.prefills), len(q.others))
				}
				for n, got := range q.prefills {
					wantEqual(t, fmt.Sprintf("%s: prefill %d", what, n), got, fmt.Sprintf(pattern, "1", `,"stream":false`, ","+harness.PrefillParams))
				}
				for n, got := range q.others {
					want := body
					// After failures a decode worker may run the whole request, without a handle or edit.
					alone := len(failures[0])+len(failures[1]) > 0 && got == body
					if q.handles[n] != "" && !alone {
						want = fmt.Sprintf(pattern, "6", streamed, `,"kv_transfer_params":`+q.handles[n])
					}
					wantEqual(t, fmt.Sprintf("%s: try %d", what, n), got, want)
				}
				if len(q.prefills) > 1 {
					again.Add(1)
				}
				q.mu.Unlock()
				requests.Delete(number)
				if t.Failed() {
					return
				}
			}
		}()
	}
	wg.Wait()
	if n := again.Load(); pd && n == 0 {
		t.Errorf("no request was prefilled twice: the test shows little")
	}
}

// wantEqual compares two long texts and reports them from their first difference.
func wantEqual(t *testing.T, what, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	n := 0
	for n < min(len(got), len(want)) && got[n] == want[n] {
		n++
	}
	t.Errorf("%s: %d bytes, want %d; from byte %d: %.100q, want %.100q", what, len(got), len(want), n, got[n:], want[n:])
}
