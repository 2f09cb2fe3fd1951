package accesslog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"sluice/bench/testwait"
	"sluice/router/requestlog"
)

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func start(t testing.TB, opt Options) (*Writer, *requestlog.Log) {
	t.Helper()
	w, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w, requestlog.New(w)
}

var received = time.Date(2026, 3, 4, 5, 6, 7, 89e6, time.FixedZone("", 3600))

// logFull logs a request that has every member.
func logFull(l *requestlog.Log, id string) {
	e := l.Begin(requestlog.Request{ID: id, Endpoint: "/v1/chat/completions", Key: "team \"a\"", Model: "m\n1", Client: netip.MustParseAddr("10.1.2.3"), Stream: true, Bytes: 345, Received: received})
	e.SetTokenized(received, 30)
	e.Tokenize.Took = 1500 * time.Microsecond
	e.SetPlan("disaggregated", "nixl")
	e.SetFallback("decode_only")
	e.SetClass("interactive", "team-b")
	e.AddRetry()
	e.AddMigration()
	e.EndLeg(e.StartLeg("prefill", "p0", 2, 16, received), "ok", 20*time.Millisecond)
	e.EndLeg(e.StartLeg("decode", "d0", 1, 8, received.Add(21*time.Millisecond)), "ok", 200*time.Millisecond)
	e.Queue.Took = 2 * time.Millisecond
	e.Intervals.Buckets[5].Add(50) // 10 to 15 ms
	e.Intervals.Buckets[6].Add(50)
	e.Finish(requestlog.Outcome{
		Status: 200, CachedTokens: 12, OutputTokens: 7, Events: 9, FirstToken: 33 * time.Millisecond,
		Total: 1234567 * time.Microsecond, ResponseBytes: 987, Transfer: requestlog.Transfer{State: "done", Bytes: 4096, Span: requestlog.Span{Took: time.Millisecond}},
	}, 31)
}

func TestLine(t *testing.T) {
	var out buffer
	w, l := start(t, Options{Output: "stdout", Stdout: &out, Sample: 1})
	logFull(l, "r1")
	l.Refused(requestlog.Request{ID: "r2", Received: received}, requestlog.Outcome{Status: 401, Reason: "invalid_api_key", CachedTokens: -1, OutputTokens: -1})
	w.Close()
	lines := strings.SplitAfter(out.String(), "\n")
	if len(lines) != 3 || lines[2] != "" {
		t.Fatalf("got %d lines:\n%s", len(lines)-1, out.String())
	}
	want := map[string]any{
		"time": "2026-03-04T04:06:07.089Z", "msg": "request", "request_id": "r1", "client": "10.1.2.3", "key": `team "a"`, "endpoint": "/v1/chat/completions", "model": "m\n1",
		"stream": true, "status": 200., "plan": "disaggregated", "family": "nixl", "fallback": "decode_only", "class": "interactive", "tenant": "team-b", "prefill_worker": "p0", "prefill_rank": 2.,
		"decode_worker": "d0", "decode_rank": 1., "prompt_tokens": 31., "predicted_cached_tokens": 16., "cached_tokens": 12., "output_tokens": 7., "events": 9.,
		"queue_ms": 2., "tokenize_ms": 1.5, "ttft_ms": 33., "itl_p50_ms": 15., "itl_p99_ms": 19.9, "total_ms": 1234.567, "request_bytes": 345., "response_bytes": 987.,
		"retries": 1., "migrations": 1., "transfer": "done", "transfer_bytes": 4096., "transfer_ms": 1.,
	}
	wantJSON(t, lines[0], want)
	wantJSON(t, lines[1], map[string]any{
		"time": "2026-03-04T04:06:07.089Z", "msg": "request", "request_id": "r2", "stream": false, "status": 401., "reason": "invalid_api_key", "prompt_tokens": 0.,
		"total_ms": 0., "request_bytes": 0., "response_bytes": 0., "retries": 0., "migrations": 0.,
	})
	if s := w.Stats(); s.Written != 2 || s.Dropped != 0 || s.Failed != 0 {
		t.Errorf("stats are %+v", s)
	}
}

// TestLineOnTerminal: a line has no character that a terminal interprets, and the same values.
func TestLineOnTerminal(t *testing.T) {
	const hostile = "a\x1b[2J\u009b31m\u202e\u2066\u200f\x7fb"
	e := &requestlog.Entry{}
	e.ID, e.Model = hostile, hostile
	line := appendLine(nil, e)
	if at := bytes.IndexFunc(bytes.TrimSuffix(line, []byte("\n")), func(r rune) bool { return !unicode.IsPrint(r) }); at >= 0 {
		t.Errorf("unprintable from byte %d: %q", at, line)
	}
	var got struct {
		ID    string `json:"request_id"`
		Model string `json:"model"`
	}
	if err := json.Unmarshal(line, &got); err != nil || got.ID != hostile || got.Model != hostile {
		t.Errorf("%v: %s is read as %+q", err, line, got)
	}
}

func wantJSON(t *testing.T, line string, want map[string]any) {
	t.Helper()
	var got map[string]any
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s is %v, want %v", k, got[k], v)
		}
	}
	for k, v := range got {
		if _, ok := want[k]; !ok {
			t.Errorf("unexpected member %s: %v", k, v)
		}
	}
}

// TestSample: all failed requests are written, and a share of the others.
func TestSample(t *testing.T) {
	var out buffer
	w, l := start(t, Options{Output: "stdout", Stdout: &out, Sample: 0.1})
	const n = 4000
	for range n {
		l.Begin(requestlog.Request{ID: "good"}).Finish(requestlog.Outcome{Status: 200}, 0)
		if e := l.Begin(requestlog.Request{ID: "bad"}); e != nil {
			e.Finish(requestlog.Outcome{Status: 503, Reason: "no_worker"}, 0)
		}
		testwait.Until(t, "the queue has room", func() bool { return len(w.queue) < queueLength/2 })
	}
	w.Close()
	good, bad := strings.Count(out.String(), `"good"`), strings.Count(out.String(), `"bad"`)
	if bad != n || good < n/20 || good > n/5 {
		t.Errorf("%d failed and %d successful requests of %d each were written; want all and about a tenth", bad, good, n)
	}
}

// TestBlockedOutput: an output that accepts nothing delays no request; lines are dropped and
// counted, and Close returns.
func TestBlockedOutput(t *testing.T) {
	r, out := io.Pipe() // nobody reads
	defer r.Close()
	w, l := start(t, Options{Output: "stdout", Stdout: out, Sample: 1})
	began := time.Now()
	for i := range queueLength + 5000 {
		l.Begin(requestlog.Request{ID: fmt.Sprint(i)}).Finish(requestlog.Outcome{Status: 200}, 0)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("logging to a blocked output took %v", took)
	}
	if s := w.Stats(); s.Dropped < 4000 || s.Dropped > 5000 || s.Written != 0 {
		t.Errorf("stats are %+v; want nearly 5000 dropped", s)
	}
	began = time.Now()
	w.Close()
	if took := time.Since(began); took > closeTimeout+5*time.Second {
		t.Errorf("Close took %v", took)
	}
}

// TestFile: a file is rotated at its size, old files are deleted, and no line is lost or split
// between them.
func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	w, l := start(t, Options{Output: "file:" + path, Sample: 1, MaxFileBytes: 1 << 20, MaxFiles: 100})
	const n = 6000 // about 3.5 MiB
	for i := range n {
		logFull(l, fmt.Sprintf("request-%d", i))
		if i%1000 == 0 {
			testwait.Until(t, "the queue has room", func() bool { return len(w.queue) < 100 })
		}
	}
	w.Close()
	files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "access*.log"))
	if err != nil || len(files) < 3 {
		t.Fatalf("%d files, %v; want at least three", len(files), err)
	}
	seen := make(map[string]bool)
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > 1<<20 {
			t.Errorf("%s has %d bytes", f, len(text))
		}
		for line := range bytes.Lines(text) {
			var e struct {
				ID string `json:"request_id"`
			}
			if err := json.Unmarshal(line, &e); err != nil {
				t.Fatalf("%s: %v in %s", f, err, line)
			}
			seen[e.ID] = true
		}
	}
	if len(seen) != n {
		t.Errorf("%d different requests in the files, want %d", len(seen), n)
	}
}

// TestMovedFile: a file that another program moves or removes is opened again under its name, and no line is lost.
func TestMovedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	w, l := start(t, Options{Output: "file:" + path, Sample: 1, MaxFileBytes: 1 << 20, MaxFiles: 3})
	holds := func(path, id string) func() bool {
		return func() bool {
			text, _ := os.ReadFile(path)
			return bytes.Contains(text, []byte(`"`+id+`"`))
		}
	}
	logFull(l, "first")
	testwait.Until(t, "the first line is written", holds(path, "first"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	n := 0
	more := func() bool {
		n++
		logFull(l, fmt.Sprint("more-", n))
		testwait.Until(t, "it is written", func() bool { return w.Stats().Written == uint64(n+1) })
		_, err := os.Stat(path)
		return err == nil
	}
	testwait.Until(t, "the file is there again", more)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm()&^0o640 != 0 || info.Mode().Perm()&0o440 == 0 || info.Mode().Perm()&0o040 == 0 {
		t.Errorf("the new file: %v, %v; want the mode 0640 less the umask, so that the group can read it", info.Mode(), err)
	}
	if !holds(path, fmt.Sprint("more-", n))() || n > 1 && !holds(path+".1", "more-1")() {
		t.Errorf("after %d more lines the last one is not in the new file, or the first one not in the old file", n)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the removed file is there again", more)
	if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o755)); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "a directory of its name is an error", func() bool {
		logFull(l, "lost")
		return w.Stats().Failed > 0
	})
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		t.Errorf("the directory was moved away: %v, %v", info, err)
	}
}

// TestSyslogThatIsDown: a router starts while its syslog server is down; lines are lost and counted until that is back.
func TestSyslogThatIsDown(t *testing.T) {
	c, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := c.Addr().String()
	c.Close()
	w, l := start(t, Options{Output: "syslog+tcp://" + address, Sample: 1})
	logFull(l, "lost")
	testwait.Until(t, "the line is counted as lost", func() bool { return w.Stats().Failed == 1 })
	if c, err = net.Listen("tcp", address); err != nil {
		t.Skip(err) // another process has the port
	}
	defer c.Close()
	testwait.Until(t, "a line is written", func() bool {
		logFull(l, "kept")
		return w.Stats().Written > 0
	})
}

// TestSyslog: each line is a message of its own.
func TestSyslog(t *testing.T) {
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, l := start(t, Options{Output: "syslog://" + c.LocalAddr().String(), Sample: 1})
	for _, id := range []string{"r1", "r2"} {
		logFull(l, id)
		buf := make([]byte, 4096)
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		n, _, err := c.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		header, body, ok := strings.Cut(string(buf[:n]), "{")
		if !ok || !strings.HasPrefix(header, "<30>") || !strings.Contains(header, "sluice[") || !json.Valid([]byte("{"+body)) || !strings.Contains(body, `"`+id+`"`) {
			t.Errorf("message: %s", buf[:n])
		}
	}
}

func TestBadOutputs(t *testing.T) {
	for _, output := range []string{"", "off", "stderr", "file:", "file:relative", "syslog:", "syslog://", "http://x", "file:/nowhere/at/all/access.log"} {
		if w, err := New(Options{Output: output}); err == nil {
			w.Close()
			t.Errorf("%q was accepted", output)
		} else if output != "file:/nowhere/at/all/access.log" && !strings.Contains(err.Error(), "want stdout") {
			t.Errorf("%q: the error does not say what is accepted: %v", output, err)
		}
	}
}

// BenchmarkAdd has the CPU of one line, from the request's end to the written bytes.
func BenchmarkAdd(b *testing.B) {
	w, l := start(b, Options{Output: "stdout", Stdout: io.Discard, Sample: 1})
	b.ReportAllocs()
	for b.Loop() {
		logFull(l, "4c45e58dd5d71fb8e335000000000001")
		for len(w.queue) > queueLength/2 {
			time.Sleep(50 * time.Microsecond)
		}
	}
}
