package front

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// routerFor, in the environment, makes the test's binary a router before the engine it
// names, so that its memory and CPU are its own.
const routerFor = "SLUICE_TEST_ROUTER_FOR"

func TestMain(m *testing.M) {
	if engine := os.Getenv(routerFor); engine != "" {
		raiseFiles()
		fmt.Fprintln(os.Stderr, runRouter(engine))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func runRouter(engine string) error {
	ep, err := upstream.NewEndpoint("http://"+engine, upstream.Options{MaxConns: 1 << 20, MaxIdle: 1 << 20})
	if err != nil {
		return err
	}
	head, _ := time.ParseDuration(os.Getenv("SLUICE_TEST_HEAD"))
	s, err := New(Options{
		Relay: Relay(os.Getenv("SLUICE_TEST_RELAY")), WriteTimeout: stalledAfter(), HeadTimeout: head, MaxBodyBytes: 64 << 20, Pages: testPages{},
		Handler: handlerFunc(func(x *Exchange) {
			call := new(upstream.Call)
			resp, err := ep.Do(&upstream.Request{Method: "POST", Path: x.Endpoint.Path, Body: [][]byte{x.Doc.Body}}, call)
			if err != nil {
				x.Error(UpstreamFailed, "", err.Error(), 0)
				return
			}
			x.Relay(resp, call, RelayHooks{OnEnd: func(r relay.Result) {
				fmt.Println(r.Cause, r.Err)
			}})
		}),
	})
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	go func() { // ends with the test
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	return s.Serve(ln)
}

// stalledAfter is after how long the router cuts a client that takes nothing.
func stalledAfter() time.Duration {
	if os.Getenv("SLUICE_SOAK") != "" {
		return 30 * time.Second // the default
	}
	return 3 * time.Second
}

func raiseFiles() int {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) != nil {
		return 1024
	}
	for _, most := range []uint64{60_000, lim.Max} {
		want := unix.Rlimit{Cur: most, Max: max(most, lim.Max)}
		if unix.Setrlimit(unix.RLIMIT_NOFILE, &want) == nil {
			return int(most)
		}
	}
	return int(lim.Cur)
}

// crowd is many streams through a router: of ten clients one reads half of
// what it is sent (in a soak 1 KB a second), and of those every tenth nothing at all.
type crowd struct {
	t     *testing.T
	rss   func() int
	cpu   func() time.Duration
	soak  bool
	stop  atomic.Bool
	wg    sync.WaitGroup
	mu    sync.Mutex
	lags  []time.Duration // of the fast clients' events
	lost  atomic.Int64    // streams of fast or slow clients that ended
	begun atomic.Int64
	alike atomic.Bool // measure from now on
}

// TestManyStreams prints what many streams with a tenth of slow readers take, and holds
// the promises: the stopped are cut, nobody else is, and the fast ones do not notice.
func TestManyStreams(t *testing.T) {
	if testing.Short() {
		t.Skip("a process of its own, some seconds long")
	}
	n, span := 400, 4*time.Second
	c := &crowd{t: t, soak: os.Getenv("SLUICE_SOAK") != ""}
	if c.soak {
		n, span = 10_000, 40*time.Second
	}
	n = min(n, (raiseFiles()-500)/2) // two descriptors a stream: in the router, and here
	// One event a second of each stream; those of slow clients are large.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go c.engine(ln)
	addr, out := c.router(ln.Addr().String())
	idle := c.rss()
	began := time.Now()
	gate := make(chan struct{}, 64)
	for i := range n {
		kind := "fast"
		switch {
		case i%100 == 55:
			kind = "stopped"
		case i%10 == 5:
			kind = "slow"
		}
		gate <- struct{}{}
		c.wg.Add(1)
		go c.client(addr, kind, gate)
	}
	untilFor(t, 5*patience, "all streams begun", func() bool { return c.begun.Load() == int64(n) })
	t.Logf("%d streams begun in %v", n, time.Since(began).Round(time.Millisecond))
	time.Sleep(span / 4)
	c.alike.Store(true)
	cpu, at := c.cpu(), time.Now()
	time.Sleep(span)
	used, took := c.cpu()-cpu, time.Since(at)
	full := c.rss()
	c.alike.Store(false)
	untilFor(t, stalledAfter()+patience, "the stopped cut", func() bool { return out.count("client_stalled") >= n/100 })
	lost := c.lost.Load()
	c.stop.Store(true)
	c.mu.Lock()
	lags := slices.Clone(c.lags)
	c.mu.Unlock()
	slices.Sort(lags)
	if len(lags) == 0 {
		t.Fatal("no event of a fast client")
	}
	q := func(p float64) time.Duration { return lags[int(p*float64(len(lags)-1))].Round(10 * time.Microsecond) }
	t.Logf("%d streams, %d slow of which %d stopped: %.0f %% of a core, %d MiB over the idle router's %d (%.1f KiB a stream); %d events of fast clients: p50 %v, p99 %v, p99.9 %v, worst %v after they were sent",
		n, n/10, n/100, 100*used.Seconds()/took.Seconds(), (full-idle)>>10, idle>>10, float64(full-idle)/float64(n), len(lags), q(.5), q(.99), q(.999), q(1))
	if lost > 0 {
		t.Errorf("%d streams of clients that read ended", lost)
	}
	if late := q(.9); late > time.Second {
		t.Logf("a tenth of the events came %v late and more: this machine has no time for %d clients, and who is slow cannot be told", late, n)
	} else if got := out.count("client_stalled"); got != n/100 {
		t.Errorf("%d clients called stalled, want %d", got, n/100)
	}
	if most := idle + 40*n + 400*n/10 + 32<<10; full > most && !raceOn {
		t.Errorf("%d KiB resident, want at most %d: 256 KiB for each slow stream", full, most)
	}
}

// lines counts a process's lines by their first word.
type lines struct {
	mu sync.Mutex
	n  map[string]int
}

func (l *lines) count(word string) int { l.mu.Lock(); defer l.mu.Unlock(); return l.n[word] }

// router starts the router's process.
func (c *crowd) router(engine string) (addr string, out *lines) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), routerFor+"="+engine)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		c.stop.Store(true)
		_ = stdin.Close()
		_ = cmd.Wait()
		c.wg.Wait()
	})
	br := bufio.NewReader(stdout)
	first, err := br.ReadString('\n')
	if err != nil {
		c.t.Fatal(err)
	}
	out = &lines{n: make(map[string]int)}
	go func() {
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			word, _, _ := strings.Cut(line, " ")
			out.mu.Lock()
			out.n[word]++
			out.mu.Unlock()
		}
	}()
	proc := "/proc/" + strconv.Itoa(cmd.Process.Pid)
	c.rss = func() int {
		b, _ := os.ReadFile(proc + "/status")
		_, after, _ := strings.Cut(string(b), "VmRSS:")
		f := strings.Fields(after)
		if len(f) == 0 {
			return 0
		}
		kib, _ := strconv.Atoi(f[0])
		return kib
	}
	c.cpu = func() time.Duration {
		b, _ := os.ReadFile(proc + "/stat")
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
		user, _ := strconv.Atoi(f[11])
		sys, _ := strconv.Atoi(f[12])
		return time.Duration(user+sys) * 10 * time.Millisecond
	}
	return strings.TrimSpace(first), out
}

// engine answers each request with an event a second, in a soak one each four, that
// begins with the time.
func (c *crowd) engine(ln net.Listener) {
	pause := time.Second
	if c.soak {
		pause *= 4 // this process has to keep up
	}
	for {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		c.wg.Add(1)
		go func() {
			defer c.wg.Done()
			defer nc.Close()
			req, err := http.ReadRequest(bufio.NewReaderSize(nc, 512))
			if err != nil {
				return
			}
			body := make([]byte, 64)
			n, _ := io.ReadFull(req.Body, body)
			size := 200
			if !bytes.Contains(body[:n], []byte("fast")) {
				size = 128 << 10
			}
			if _, err := io.WriteString(nc, streamHead); err != nil {
				return
			}
			for !c.stop.Load() {
				event := fmt.Appendf(nil, "%x\r\ndata: %d ", size, time.Now().UnixNano())
				event = append(event, bytes.Repeat([]byte{'x'}, size-28)...)
				event = append(event, "\n\n\r\n"...)
				_ = nc.SetWriteDeadline(time.Now().Add(time.Minute))
				if _, err := nc.Write(event); err != nil {
					return
				}
				time.Sleep(pause)
			}
		}()
	}
}

// client reads one stream, as its kind does.
func (c *crowd) client(addr, kind string, gate chan struct{}) {
	defer c.wg.Done()
	var d net.Dialer
	if kind == "slow" && c.soak {
		// A network's segments, not the loopback's of 64 KiB, and little room: a client
		// whose window is shut tells of room only when much of it is free, and looks
		// stopped until then.
		d.Control = func(_, _ string, raw syscall.RawConn) (err error) {
			outer := raw.Control(func(fd uintptr) {
				err = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, 1400),
					unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<10))
			})
			return errors.Join(outer, err)
		}
	}
	nc, err := d.Dial("tcp", addr)
	<-gate
	if err != nil {
		c.lost.Add(1)
		return
	}
	defer nc.Close()
	if kind != "fast" && !c.soak {
		_ = nc.(*net.TCPConn).SetReadBuffer(64 << 10)
	}
	if _, err := io.WriteString(nc, chatPost(`{"model":"`+kind+`","stream":true}`)); err != nil {
		c.lost.Add(1)
		return
	}
	buf := make([]byte, 1<<10)
	if _, err := nc.Read(buf); err != nil {
		c.lost.Add(1)
		return
	}
	c.begun.Add(1)
	switch kind {
	case "stopped":
		for !c.stop.Load() {
			time.Sleep(100 * time.Millisecond)
		}
		return
	case "slow":
		// Half of what comes. (A kernel tells of room in the buffer only when half of
		// it is free: a client much slower than this looks stopped in three seconds.)
		buf, pause := make([]byte, 16<<10), 250*time.Millisecond
		if c.soak {
			buf, pause = buf[:1<<10], time.Second
		}
		for !c.stop.Load() {
			if _, err := io.ReadFull(nc, buf); err != nil {
				break
			}
			time.Sleep(pause)
		}
	default:
		for !c.stop.Load() {
			_ = nc.SetReadDeadline(time.Now().Add(10 * time.Second))
			n, err := nc.Read(buf)
			if err != nil {
				break
			}
			if _, after, ok := bytes.Cut(buf[:n], []byte("data: ")); ok && len(after) >= 19 && c.alike.Load() {
				sent, _ := strconv.ParseInt(string(after[:19]), 10, 64)
				lag := time.Since(time.Unix(0, sent))
				c.mu.Lock()
				c.lags = append(c.lags, lag)
				c.mu.Unlock()
			}
		}
	}
	if !c.stop.Load() {
		c.lost.Add(1)
	}
}
