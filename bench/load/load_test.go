package load

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// engine answers like an OpenAI server: a role chunk, n token chunks every gap,
// a usage chunk, [DONE].
func engine(t *testing.T, tokens int, gap time.Duration) (*httptest.Server, *atomic.Int64) {
	t.Helper()
	var served atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		var req struct {
			Stream    bool `json:"stream"`
			MaxTokens int  `json:"max_tokens"`
		}
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("X-Sluice-Worker", "decode-0")
		w.Header().Set("X-Sluice-Cached-Tokens", "16")
		if !req.Stream {
			fmt.Fprint(w, `{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32}}}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		send := func(s string) {
			fmt.Fprintf(w, "data: %s\n\n", s)
			w.(http.Flusher).Flush()
		}
		send(`{"choices":[{"delta":{"role":"assistant","content":""}}]}`)
		for range tokens {
			testwait.Pace(gap)
			send(`{"choices":[{"delta":{"content":"word"}}]}`)
		}
		send(`{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32}}}`)
		send(`[DONE]`)
	}))
	t.Cleanup(srv.Close)
	return srv, &served
}

func options(url string) Options {
	o := Default()
	o.URL, o.Concurrency, o.Requests, o.Duration, o.PromptTokens, o.OutputTokens = url, 4, 20, time.Minute, 40, 3
	return o
}

func TestClosedLoopStreams(t *testing.T) {
	srv, served := engine(t, 3, 5*time.Millisecond)
	o := options(srv.URL)
	var mu sync.Mutex
	var got []Result
	o.OnResult = func(r Result) { mu.Lock(); got = append(got, r); mu.Unlock() }
	rep, err := Run(context.Background(), o, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rep.OK != 20 || rep.Failed != 0 || served.Load() != 20 || len(got) != 20 {
		t.Fatalf("ok %d, failed %d, served %d, seen %d; want 20, 0, 20, 20: %v", rep.OK, rep.Failed, served.Load(), len(got), rep.Errors)
	}
	for _, r := range got {
		if r.Chunks != 3 || r.Prompt != 40 || r.Output != 3 || r.Cached != 32 || r.PredictedCached != 16 || r.Worker != "decode-0" {
			t.Fatalf("result %+v; want 3 chunks, 40 prompt, 3 output, 32 cached, 16 expected, decode-0", r)
		}
		if r.TTFT < 4*time.Millisecond || r.Total < 14*time.Millisecond || r.TTFT > r.Total {
			t.Fatalf("first token after %s, end after %s; the engine waits 5 ms before each of 3", r.TTFT, r.Total)
		}
	}
	if rep.InterChunk.Count != 40 || rep.InterChunk.Max < 4 {
		t.Errorf("between chunks: %+v; want 40 gaps of 5 ms", rep.InterChunk)
	}
	if rep.Loop != "closed" || rep.ByWorker["decode-0"] != 20 || rep.CachedTokens != 20*32 || rep.PredictedCachedTokens != 20*16 {
		t.Errorf("report %+v", rep)
	}
}

func TestNonStreaming(t *testing.T) {
	srv, _ := engine(t, 0, 0)
	o := options(srv.URL)
	o.Stream, o.Endpoint = false, "completions"
	rep, err := Run(context.Background(), o, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rep.OK != 20 || rep.OutputTokens != 60 || rep.Total.Count != 20 {
		t.Errorf("report %+v", rep)
	}
}

// TestOpenLoopCountsQueueing: a server that stalls once must be charged for the
// requests that were due in the meantime.
func TestOpenLoopCountsQueueing(t *testing.T) {
	var n atomic.Int64
	var lock sync.Mutex // the stalled request holds all others up
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		lock.Lock()
		if n.Add(1) == 10 {
			testwait.Pace(400 * time.Millisecond)
		}
		lock.Unlock()
		fmt.Fprint(w, `{"usage":{"prompt_tokens":1}}`)
	}))
	defer srv.Close()
	o := options(srv.URL)
	o.Stream, o.Rate, o.Requests = false, 100, 60
	rep, err := Run(context.Background(), o, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Loop != "open" || rep.OK != 60 {
		t.Fatalf("report %+v", rep)
	}
	// 40 of 60 requests fall due within the stall, 10 ms apart: the median of
	// their waits is far above the server's own speed.
	if rep.Total.P50 < 20 || rep.Total.Max < 350 {
		t.Errorf("end to end %+v; the stall of 400 ms was not charged to those it held up", rep.Total)
	}
}

func TestOpenLoopDropsBeyondBound(t *testing.T) {
	release := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-release
	}))
	defer srv.Close()
	o := options(srv.URL)
	o.Rate, o.Requests, o.MaxInFlight, o.Stream = 500, 50, 5, false
	time.AfterFunc(500*time.Millisecond, func() { close(release) })
	rep, err := Run(context.Background(), o, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Dropped == 0 || rep.Requests+rep.Dropped != 50 {
		t.Errorf("%d requests, %d dropped; want 50 together and some dropped", rep.Requests, rep.Dropped)
	}
}

func TestErrorsAreCounted(t *testing.T) {
	cases := map[string]http.HandlerFunc{
		"status 503": func(w http.ResponseWriter, r *http.Request) { http.Error(w, "busy", http.StatusServiceUnavailable) },
		"carried an error": func(w http.ResponseWriter, r *http.Request) {
			stream(w, `data: {"error":{"message":"x"}}`, `data: [DONE]`)
		},
		"without [DONE]": func(w http.ResponseWriter, r *http.Request) { stream(w, `data: {"choices":[]}`) },
		"stream cut short": func(w http.ResponseWriter, r *http.Request) {
			stream(w, `data: {"choices":[]}`)
			panic(http.ErrAbortHandler)
		},
		"no HTTP response": nil,
		"cannot connect":   nil,
		"idle connection":  func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) },
		"answer cut short": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "50")
			w.Write([]byte("x"))
		},
	}
	for want, h := range cases {
		t.Run(want, func(t *testing.T) {
			o := options("http://127.0.0.1:1")
			o.Requests, o.Concurrency = 1, 1
			switch {
			case h != nil:
				srv := httptest.NewServer(h)
				defer srv.Close()
				o.URL = srv.URL
			case want == "no HTTP response":
				o.URL = "http://" + rawServer(t, "garbage\n")
			}
			rep, err := Run(context.Background(), o, nil)
			if err != nil {
				t.Fatal(err)
			}
			if rep.Failed != 1 || rep.OK != 0 {
				t.Fatalf("report %+v; want one failure", rep)
			}
			for text := range rep.Errors {
				if !strings.Contains(text, want) {
					t.Errorf("error %q; want one with %q", text, want)
				}
			}
		})
	}
}

func stream(w http.ResponseWriter, events ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, e := range events {
		fmt.Fprintf(w, "%s\n\n", e)
		w.(http.Flusher).Flush()
	}
}

func TestTrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	lines := `{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [5, 6]}
{"timestamp": 100, "input_length": 1100, "output_length": 0, "hash_ids": [5, 6, 7]}

{"timestamp": 200, "input_length": 512, "output_length": 1, "hash_ids": [9]}
`
	if err := os.WriteFile(path, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	o := Default()
	o.Trace, o.Endpoint, o.TokenIDs, o.TraceSpeed = path, "completions", true, 2
	w, err := openTrace(&o, o.sources())
	if err != nil {
		t.Fatal(err)
	}
	var prompts [][]uint32
	var jobs []Job
	for {
		j, ok := w.next()
		if !ok {
			break
		}
		var body struct{ Prompt []uint32 }
		if err := json.Unmarshal(j.Body, &body); err != nil {
			t.Fatalf("body is not JSON: %v", err)
		}
		prompts, jobs = append(prompts, body.Prompt), append(jobs, j)
	}
	if w.err != nil || len(jobs) != 3 {
		t.Fatalf("%d jobs, %v; want 3", len(jobs), w.err)
	}
	if len(prompts[0]) != 600 || len(prompts[1]) != 1100 || len(prompts[2]) != 512 {
		t.Fatalf("lengths %d %d %d", len(prompts[0]), len(prompts[1]), len(prompts[2]))
	}
	for i := range prompts[0] {
		if prompts[0][i] != prompts[1][i] {
			t.Fatalf("token %d differs, but both prompts begin with the blocks 5 and 6", i)
		}
	}
	if jobs[1].Due != 50*time.Millisecond || jobs[1].Output != 1 {
		t.Errorf("job %+v; want it due after 50 ms at twice the speed, one token at least", jobs[1])
	}
}

func TestTraceErrorsNameTheLine(t *testing.T) {
	for _, bad := range []string{"{", `{"input_length":0}`, `{"input_length":99999999999}`, `[]`} {
		path := filepath.Join(t.TempDir(), "t.jsonl")
		if err := os.WriteFile(path, []byte(`{"input_length":1}`+"\n"+bad+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		o := options("http://127.0.0.1:1")
		o.Trace, o.Concurrency, o.Timeout = path, 1, time.Second
		if _, err := Run(context.Background(), o, nil); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%s: error %v; want one that names line 2", bad, err)
		}
	}
}

func TestSharedPrefixAndTurns(t *testing.T) {
	o := Default()
	o.PromptTokens, o.SharedPrefix, o.Groups, o.Turns, o.Endpoint, o.TokenIDs = 100, 0.6, 2, 3, "completions", true
	w := newSynthetic(&o, &o.sources()[0], 0)
	first := map[string]int{}
	longer := 0
	for range 200 {
		j, _ := w.next()
		var body struct{ Prompt []uint32 }
		if err := json.Unmarshal(j.Body, &body); err != nil {
			t.Fatal(err)
		}
		first[fmt.Sprint(body.Prompt[:60])]++
		if len(body.Prompt) > 100 {
			longer++
		}
	}
	if len(first) != 2 {
		t.Errorf("%d different prefixes of 60 tokens; want 2 groups", len(first))
	}
	if longer < 40 {
		t.Errorf("%d of 200 prompts are later turns; want many", longer)
	}
}

func TestSameSeedSameLoad(t *testing.T) {
	bodies := func() (all []string) {
		o := Default()
		w := newSynthetic(&o, &o.sources()[0], 0)
		for range 20 {
			j, _ := w.next()
			all = append(all, string(j.Body))
		}
		return all
	}
	a, b := bodies(), bodies()
	for i := range a {
		if a[i] != b[i] {
			t.Fatalf("job %d differs between two runs of one seed", i)
		}
		if !json.Valid([]byte(a[i])) {
			t.Fatalf("job %d is not JSON: %s", i, a[i])
		}
	}
}

func TestEventScanAnySplit(t *testing.T) {
	in := []byte("data: {\"choices\":[{\"delta\":{\"content\":\"\"}}]}\r\n\r\n: comment\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n")
	for i := range in {
		var s eventScan
		s.feed(in[:i])
		s.feed(in[i:])
		if s.events != 4 || s.tokens != 1 || !s.done || s.prompt != 7 || s.output != 2 || s.failed {
			t.Fatalf("split at %d: %+v", i, s)
		}
	}
}

func TestValidateNamesEveryMistake(t *testing.T) {
	o := Default()
	o.URL, o.Endpoint, o.SharedPrefix, o.Groups, o.Headers = "ftp://x", "smoke", 2, 0, []string{"no colon"}
	err := o.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"--url", "--endpoint", "--shared-prefix", "--groups", "--header", `"smoke"`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %s:\n%v", want, err)
		}
	}
}

func TestReportFormats(t *testing.T) {
	srv, _ := engine(t, 2, 0)
	rep, err := Run(context.Background(), options(srv.URL), nil)
	if err != nil {
		t.Fatal(err)
	}
	var table, js bytes.Buffer
	if err := rep.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	if err := rep.WriteJSON(&js); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"first token", "between chunks", "end to end", "20 ok", "decode-0"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, table.String())
		}
	}
	var back Report
	if err := json.Unmarshal(js.Bytes(), &back); err != nil || back.OK != 20 {
		t.Errorf("JSON does not read back: %v, ok %d", err, back.OK)
	}
	var members map[string]any
	if err := json.Unmarshal(js.Bytes(), &members); err != nil {
		t.Fatal(err)
	}
	for present, old := range map[string]string{"send_delay": "sent_late", "requests_by_worker": "placed"} {
		if members[present] == nil || !reflect.DeepEqual(members[present], members[old]) {
			t.Errorf("%s and its old name %s differ or are missing: %v, %v", present, old, members[present], members[old])
		}
	}
}
