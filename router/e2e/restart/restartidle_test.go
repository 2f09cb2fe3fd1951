package restart

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// idleClient keeps one connection and sends a POST over it from time to time. It never checks
// whether the server has closed the connection, as clients with a pool may do too late.
type idleClient struct {
	addr   string
	nc     net.Conn
	reader *bufio.Reader
	dialed int
}

// post sends one request and reads the response. It dials only if the previous response announced
// that the server closes the connection.
func (c *idleClient) post(body string) error {
	if c.nc == nil {
		nc, err := net.Dial("tcp", c.addr)
		if err != nil {
			return err
		}
		c.nc, c.reader = nc, bufio.NewReader(nc)
		c.dialed++
	}
	_ = c.nc.SetDeadline(time.Now().Add(harness.TestTimeout))
	if _, err := fmt.Fprintf(c.nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		return fmt.Errorf("cannot send: %w", err)
	}
	resp, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || !strings.Contains(string(text), `"choices"`) {
		return fmt.Errorf("status %d, %v: %s", resp.StatusCode, err, text)
	}
	if resp.Close {
		c.close()
	}
	return nil
}

func (c *idleClient) close() {
	if c.nc != nil {
		_ = c.nc.Close()
		c.nc = nil
	}
}

// restartingRouter is a router that is replaced repeatedly.
type restartingRouter struct {
	*harness.Process
	dir string
	env []string
}

func startRestartingRouter(t *testing.T, args ...string) *restartingRouter {
	t.Helper()
	dir := t.TempDir()
	r := &restartingRouter{dir: dir, env: []string{"XDG_RUNTIME_DIR=" + dir}}
	r.Process = harness.Launch(t, r.env, append([]string{"serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args...)...)
	r.Ready(t)
	return r
}

// restart replaces the router; ended waits for the end of the old process.
func (r *restartingRouter) restart(t *testing.T) (ended func()) {
	t.Helper()
	before := harness.RuntimeOf(t, r.dir)
	cmd := exec.Command(harness.BuiltBinary(t), "restart")
	cmd.Env = append(os.Environ(), r.env...)
	var errors strings.Builder
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("restart: %v\n%s%s", err, out, errors.String())
	}
	var now int
	if _, err := fmt.Sscanf(string(out), "process %d replaced", &now); err != nil {
		t.Fatalf("restart says %q: %v", out, err)
	}
	t.Cleanup(func() { syscall.Kill(now, syscall.SIGKILL) })
	testwait.UntilWithin(t, harness.TestTimeout, "the runtime file is the new process's", func() bool { return harness.RuntimeOf(t, r.dir).PID == now })
	return func() {
		t.Helper()
		testwait.UntilWithin(t, 60*time.Second, "the process that was replaced has ended", func() bool { return !harness.IsRunning(before.PID) })
	}
}

// TestRestartKeepsIdleConnections: connections that were idle when a router was replaced serve the
// next requests, although the process that accepted them has ended. The requests are POSTs, which
// clients do not retry on their own.
func TestRestartKeepsIdleConnections(t *testing.T) {
	r := startRestartingRouter(t, "--engine", harness.StartSim(t, nil).URL())
	harness.DropIdle()
	clients := make([]*idleClient, 40)
	for i := range clients {
		clients[i] = &idleClient{addr: r.Addr}
		defer clients[i].close()
	}
	// Half of the connections have carried no request before the first restart.
	for _, c := range clients[:20] {
		if err := c.post(harness.Chat("")); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range clients[20:] {
		nc, err := net.Dial("tcp", r.Addr)
		if err != nil {
			t.Fatal(err)
		}
		c.nc, c.reader, c.dialed = nc, bufio.NewReader(nc), 1
	}
	for round := range 3 {
		r.restart(t)()
		for i, c := range clients {
			if err := c.post(harness.Chat("")); err != nil {
				t.Fatalf("restart %d, client %d: %v", round+1, i, err)
			}
		}
	}
	for i, c := range clients {
		if c.dialed != 1 {
			t.Errorf("client %d has had %d connections", i, c.dialed)
		}
	}
}

// TestRestartLosesNoPost: clients with persistent connections send POSTs at random intervals
// around many restarts. Some intervals exceed the time for which a replaced process once kept idle
// connections. No request fails.
func TestRestartLosesNoPost(t *testing.T) {
	t.Parallel()
	restarts, pause, every := 3, 300*time.Millisecond, time.Second
	clients := 64
	if os.Getenv("SLUICE_SOAK") != "" {
		restarts, pause, every, clients = 12, 11*time.Second, 12*time.Second, 512
	}
	r := startRestartingRouter(t, "--engine", harness.StartSim(t, nil).URL())
	harness.DropIdle()
	stop := make(chan struct{})
	var posts, lost, made atomic.Int64
	var first atomic.Pointer[string]
	var all sync.WaitGroup
	fail := func(kind string, err error) {
		lost.Add(1)
		text := kind + ": " + err.Error()
		first.CompareAndSwap(nil, &text)
	}
	for i := range clients {
		all.Go(func() {
			raw := &idleClient{addr: r.Addr}
			kind, post, end := "raw", func() error { return raw.post(harness.Chat("")) }, raw.close
			if i%2 == 1 {
				pool := &http.Client{Transport: &http.Transport{IdleConnTimeout: time.Hour}, Timeout: harness.TestTimeout}
				kind, post, end = "net/http", func() error { return oneRequest(pool, "http://"+r.Addr, i%4 == 1) }, pool.CloseIdleConnections
			}
			defer func() { made.Add(int64(raw.dialed)) }()
			defer end()
			for {
				if err := post(); err != nil {
					fail(kind, err)
					end()
				}
				posts.Add(1)
				select {
				case <-stop:
					return
				case <-time.After(rand.N(pause)):
				}
			}
		})
	}
	for range restarts {
		from := posts.Load()
		testwait.Pace(every) // clients send and pause meanwhile
		testwait.UntilWithin(t, harness.TestTimeout, "requests are answered", func() bool { return posts.Load() > from+int64(clients)/4 })
		r.restart(t)
	}
	close(stop)
	all.Wait()
	t.Logf("%d restarts, %d POSTs over kept connections, %d lost; %d connections of %d raw clients", restarts, posts.Load(), lost.Load(), made.Load(), clients/2)
	if n := lost.Load(); n > 0 {
		t.Errorf("%d of %d POSTs were lost, the first: %s", n, posts.Load(), *first.Load())
	}
}
