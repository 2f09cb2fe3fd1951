package limits

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

const mib = 1 << 20

// memoryCgroup creates a memory cgroup with a limit and returns the shell command that runs its
// arguments in it; "" if this process may not create one.
func memoryCgroup(t *testing.T, limit int) string {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for _, line := range strings.Split(strings.TrimSpace(string(own)), "\n") {
		part := strings.SplitN(line, ":", 3)
		if len(part) != 3 {
			continue
		}
		root, file := "", ""
		switch {
		case part[1] == "memory":
			root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
		case part[0] == "0":
			root, file = "/sys/fs/cgroup", "memory.max"
		default:
			continue
		}
		for _, parent := range []string{filepath.Join(root, part[2]), root} {
			dir := filepath.Join(parent, fmt.Sprintf("sluice-test-%d-%d", os.Getpid(), time.Now().UnixNano()))
			if os.Mkdir(dir, 0o755) != nil {
				continue
			}
			if os.WriteFile(filepath.Join(dir, file), []byte(strconv.Itoa(limit)), 0o644) != nil {
				os.Remove(dir)
				continue
			}
			_ = os.WriteFile(filepath.Join(dir, "memory.swap.max"), []byte("0"), 0o644)
			t.Cleanup(func() {
				testwait.Poll(2*time.Second, func() bool { // the cgroup is busy until the process has been reaped
					err := os.Remove(dir)
					return err == nil || errors.Is(err, os.ErrNotExist)
				})
			})
			return "echo $$ > " + dir + `/cgroup.procs && exec "$0" "$@"`
		}
	}
	return ""
}

// bufferingEngine is an engine that reads every request and can withhold its responses.
type bufferingEngine struct {
	url        string
	block      atomic.Pointer[chan struct{}]
	answerSize atomic.Int64 // bytes of a response's text; 0: two bytes
	received   atomic.Int64 // requests read completely
}

func startBufferingEngine(t *testing.T) *bufferingEngine {
	t.Helper()
	e := new(bufferingEngine)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/models":
			io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":1000000}]}`)
			return
		case r.Method == http.MethodGet:
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		e.received.Add(1)
		if hold := e.block.Load(); hold != nil {
			select {
			case <-*hold:
			case <-r.Context().Done():
				return
			}
		}
		text := strings.Repeat("ok", 1+int(e.answerSize.Load()/2))
		answer := `{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},` +
			`"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
		io.WriteString(w, answer)
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	e.url = s.URL
	return e
}

// blockAnswers makes the engine withhold its responses until unblock is called.
func (e *bufferingEngine) blockAnswers() (unblock func()) {
	hold := make(chan struct{})
	e.block.Store(&hold)
	return func() { e.block.Store(nil); close(hold) }
}

// longChat returns a chat request of n bytes.
func longChat(n int) []byte {
	const head, tail = `{"model":"m","messages":[{"role":"user","content":"`, `"}]}`
	b := append(make([]byte, 0, n), head...)
	for len(b) < n-len(tail) {
		b = append(b, "word "[len(b)%5])
	}
	return append(b, tail...)
}

func gzipOf(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestSpeed)
	_, _ = w.Write(b)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// zstdOf encodes b with a window of 8 MiB, without its length.
func zstdOf(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := zstd.NewWriter(&out, zstd.WithWindowSize(8*mib), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(b); at += mib {
		_, _ = w.Write(b[at:min(at+mib, len(b))])
		_ = w.Flush()
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// chunkedOf returns b in chunked encoding with chunks of 64 KiB.
func chunkedOf(b []byte) []byte {
	var out bytes.Buffer
	for at := 0; at < len(b); at += 64 << 10 {
		part := b[at:min(at+64<<10, len(b))]
		fmt.Fprintf(&out, "%x\r\n", len(part))
		out.Write(part)
		out.WriteString("\r\n")
	}
	out.WriteString("0\r\n\r\n")
	return out.Bytes()
}

// attack is a number of concurrent requests.
type attack struct {
	name         string
	clients      int
	header       string // lines
	body         []byte
	send         int  // bytes of the body that the client sends; 0: all
	blockAnswers bool // the engine answers only after all requests were sent or refused
	unreadBytes  int  // bytes of a response that the client does not read; 0: it reads all
}

// run sends the attack and returns the number of responses by status; status 0: no response.
func (a *attack) run(t *testing.T, addr string, e *bufferingEngine) map[int]int {
	t.Helper()
	unblock := func() {}
	e.answerSize.Store(int64(a.unreadBytes))
	defer e.answerSize.Store(0)
	before := e.received.Load()
	if a.blockAnswers {
		unblock = e.blockAnswers()
	}
	counts := map[int]int{}
	var mu sync.Mutex
	var all, sent sync.WaitGroup
	finish := make(chan struct{})
	for range a.clients {
		all.Add(1)
		sent.Add(1)
		go func() {
			defer all.Done()
			status := 0
			nc, err := net.Dial("tcp", addr)
			if err != nil {
				sent.Done()
				return
			}
			defer nc.Close()
			_ = nc.SetDeadline(time.Now().Add(2 * time.Minute))
			if a.unreadBytes > 0 {
				_ = nc.(*net.TCPConn).SetReadBuffer(4 << 10)
			}
			body := a.body
			if a.send > 0 {
				body = body[:a.send]
			}
			length := "Content-Length: " + strconv.Itoa(len(a.body)) + "\r\n"
			if strings.Contains(a.header, "chunked") {
				length = ""
			}
			go func() {
				defer sent.Done()
				if _, err := fmt.Fprintf(nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n%s%s\r\n", a.header, length); err == nil {
					_, _ = nc.Write(body)
				}
			}()
			if a.send > 0 || a.unreadBytes > 0 {
				<-finish
			} else if resp, err := http.ReadResponse(bufio.NewReader(nc), nil); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				status = resp.StatusCode
			}
			mu.Lock()
			counts[status]++
			mu.Unlock()
		}()
	}
	sent.Wait()
	if a.blockAnswers || a.send > 0 {
		time.Sleep(300 * time.Millisecond) // until the router has read the last bytes
	}
	if a.unreadBytes > 0 { // until some are refused
		testwait.Poll(10*time.Second, func() bool { return e.received.Load()-before >= int64(a.clients) })
	}
	unblock()
	close(finish)
	all.Wait()
	return counts
}

// sidecarWithLimit starts the sidecar of docs/sidecar.md under a memory limit.
func sidecarWithLimit(t *testing.T, limit int, e *bufferingEngine, args ...string) (p *harness.Process, limited bool) {
	t.Helper()
	args = append([]string{"sidecar", "--listen", "127.0.0.1:0", "--engine", e.url, "--prefill-networks", "127.0.0.0/8"}, args...)
	env, _ := harness.ServeEnv(t)
	if sh := memoryCgroup(t, limit); sh != "" {
		p, limited = harness.LaunchAs(t, "/bin/sh", env, append([]string{"-c", sh, harness.BuiltBinary(t)}, args...)...), true
	} else {
		p = harness.Launch(t, env, args...)
	}
	p.Ready(t)
	return p, limited
}

// TestSidecarMemory attacks the sidecar of docs/sidecar.md under its memory limit. The sidecar
// survives, stays below the limit, serves small requests throughout, and releases the memory.
func TestSidecarMemory(t *testing.T) {
	const limit = 512 * mib
	e := startBufferingEngine(t)
	p, limited := sidecarWithLimit(t, limit, e)
	quiet := p.MemoryOf(t, "VmRSS")
	text := longChat(31 * mib)
	packed, zpacked := gzipOf(t, text), zstdOf(t, text)
	bomb := gzipOf(t, longChat(33*mib))
	for _, a := range []attack{
		{name: "prompts", clients: 60, body: text, blockAnswers: true},
		{name: "prompts in chunks", clients: 60, header: "Transfer-Encoding: chunked\r\n", body: chunkedOf(text), blockAnswers: true},
		{name: "gzip", clients: 60, header: "Content-Encoding: gzip\r\n", body: packed, blockAnswers: true},
		{name: "zstd", clients: 60, header: "Content-Encoding: zstd\r\n", body: zpacked, blockAnswers: true},
		{name: "gzip bombs", clients: 200, header: "Content-Encoding: gzip\r\n", body: bomb},
		{name: "slow bodies", clients: 1000, body: text, send: 300 << 10},
		{name: "many connections", clients: 2000, body: longChat(60 << 10), blockAnswers: true},
		{name: "answers that nobody reads", clients: 1000, body: longChat(1 << 10), unreadBytes: 900 << 10},
		{name: "prompts again", clients: 60, body: text},
	} {
		began := time.Now()
		counts := a.run(t, p.Addr, e)
		peak := p.MemoryOf(t, "VmHWM")
		t.Logf("%s: %d MiB at most, answers by status %v, %s", a.name, peak/mib, counts, time.Since(began).Round(time.Millisecond))
		if peak > limit {
			t.Errorf("%s: %d MiB at most, over %d", a.name, peak/mib, limit/mib)
		}
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.Cmd.Process.Pid), []byte("5"), 0) // reset VmHWM
		harness.WantStatus(t, harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat("")), 200)
	}
	over := time.Now()
	testwait.UntilWithin(t, 30*time.Second, "the memory goes back", func() bool { return p.MemoryOf(t, "VmRSS") < quiet+64*mib })
	t.Logf("%d MiB at rest, %d MiB %s afterwards; limited by a cgroup: %v", quiet/mib, p.MemoryOf(t, "VmRSS")/mib,
		time.Since(over).Round(time.Second), limited)
}
