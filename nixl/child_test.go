package nixl

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// childVariable makes this test binary play a part in a process of its own: one
// that is killed, runs another NIXL, or gets signals.
const childVariable = "SLUICE_NIXL_TEST_CHILD"

func TestMain(m *testing.M) {
	part, version, _ := strings.Cut(os.Getenv(childVariable), ":")
	switch part {
	case "":
		os.Exit(m.Run())
	case "host":
		killSoon()
		if err := ServeHost(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	case "peer":
		childSends(childOpen(version, gotLine))
	case "vram":
		childVRAM(version)
	case "hangup":
		childHangup(childOpen(version, nil), func() (*Agent, error) {
			return Open(context.Background(), Config{Name: "other", Search: Search{Path: wheelDir(version)}, OnNotification: func(Notification) {}})
		})
	case "idle":
		childIdle(childOpen(version, nil))
	case "hang":
		childHang()
	case "ucx-peer":
		childSends(childUCX(version, gotLine))
	case "ucx-hangup":
		childHangup(childUCX(version, nil), func() (*Agent, error) {
			return OpenUCX(context.Background(), UCXConfig{Agent: Config{Name: "other", OnNotification: func(Notification) {}}, Path: wheelDir(version)})
		})
	case "ucx-idle":
		childIdle(childUCX(version, nil))
	}
}

// child is this binary in another part. Its lines come one by one.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser // the child ends when it is closed
	lines chan string
}

func startChild(t testing.TB, part string, env ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0]), lines: make(chan string, 64)}
	c.cmd.Env = append(append(os.Environ(), childVariable+"="+part), env...)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			c.lines <- s.Text()
		}
		close(c.lines)
	}()
	t.Cleanup(func() {
		c.in.Close()
		c.cmd.Process.Kill()
		c.cmd.Wait()
	})
	return c
}

func (c *child) line(t testing.TB) string {
	t.Helper()
	select {
	case l, ok := <-c.lines:
		if !ok {
			t.Fatalf("the child ended: %v", c.cmd.Wait())
		}
		return l
	case <-time.After(20 * time.Second):
		t.Fatal("the child says nothing")
	}
	return ""
}

func childOpen(version string, on func(Notification)) *Agent {
	a, err := Open(context.Background(), Config{Name: fmt.Sprintf("child-%d", os.Getpid()), Search: Search{Path: wheelDir(version)}, OnNotification: on})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
	return a
}

func gotLine(n Notification) { fmt.Printf("got %s\n", n.Message) }

// childSends tells its metadata; its handler tells each notification.
func childSends(a *Agent) {
	md, err := a.Metadata(context.Background())
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
	fmt.Println("metadata", base64.StdEncoding.EncodeToString(md))
	os.Stdin.Read(make([]byte, 1))
}

func (c *child) metadata(t testing.TB) []byte {
	t.Helper()
	_, b64, ok := strings.Cut(c.line(t), "metadata ")
	md, err := base64.StdEncoding.DecodeString(b64)
	if !ok || err != nil {
		t.Fatalf("the child sent no metadata: %v", err)
	}
	return md
}

func TestRealKilledPeer(t *testing.T) {
	realNIXL(t)
	down := make(chan time.Time, 1)
	a := realNetwork().open(t, Config{OnPeerDown: func(*Peer) { down <- time.Now() }})
	c := startChild(t, "peer:1.5.1")
	p := must[*Peer](t)(a.LoadPeer(t.Context(), c.metadata(t), "NIXL 1.5.1"))
	if err := a.Notify(t.Context(), p, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if l := c.line(t); l != "got hello" {
		t.Fatalf("the child says %q", l)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	// NIXL reports it at a send, and takes a few before.
	testwait.Until(t, "a send to the killed peer to fail", func() bool { return a.Notify(t.Context(), p, []byte("gone?")) != nil })
	select {
	case at := <-down:
		t.Logf("known %s after the kill", at.Sub(killed).Round(time.Microsecond))
	case <-time.After(20 * time.Second):
		t.Error("OnPeerDown was not called")
	}
	if err := a.DropPeer(t.Context(), p); err != nil {
		t.Error(err)
	}
	// The agent is none the worse: a new peer is reached.
	again := startChild(t, "peer:1.5.1")
	p = must[*Peer](t)(a.LoadPeer(t.Context(), again.metadata(t), ""))
	if err := a.Notify(t.Context(), p, []byte("again")); err != nil {
		t.Fatal(err)
	}
	if l := again.line(t); l != "got again" {
		t.Errorf("the new child says %q", l)
	}
}

// UCX changed its address between 1.21 (NIXL 1.3) and 1.22. The error names both
// sides, and the peer lives on: without the refusal its process crashes.
func TestRealVersionMismatch(t *testing.T) {
	realNIXL(t)
	realVersion(t, "1.3.2")
	a := realNetwork().open(t, Config{})
	c := startChild(t, "peer:1.3.2")
	_, err := a.LoadPeer(t.Context(), c.metadata(t), "NIXL 1.3.2")
	if !errors.Is(err, ErrVersion) {
		t.Fatalf("%v; want ErrVersion", err)
	}
	for _, want := range []string{"NIXL 1.5.1", "1.3.2", "UCX here: 1.23", "engine's own wheel"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	if err := a.Health(); err != nil {
		t.Error(err)
	}
	select {
	case l, ok := <-c.lines:
		t.Errorf("the peer said %q, or ended (%v)", l, !ok)
	case <-time.After(100 * time.Millisecond):
	}
}

func hexOf(b []byte) string { return hex.EncodeToString(b) }

// childHangup works hard, on Go's side and on NIXL's, and tells the SIGHUPs it saw.
func childHangup(a *Agent, other func() (*Agent, error)) {
	var seen atomic.Int64
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	go func() {
		for range hup {
			seen.Add(1)
		}
	}()
	b, err := other()
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
	md, err := b.Metadata(context.Background())
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
	p, err := a.LoadPeer(context.Background(), md, "")
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
	for range 2 {
		go func() {
			for i := 0; ; i++ {
				b := make([]byte, 1<<10+i%4096) // keeps the collector busy
				_ = a.Post(p, b[:8])
				runtime.Gosched()
			}
		}()
	}
	fmt.Println("taken", a.Counters().Signals)
	buf := make([]byte, 1)
	for {
		if _, err := os.Stdin.Read(buf); err != nil {
			return
		}
		fmt.Println("seen", seen.Load())
	}
}

func TestRealHangupStorm(t *testing.T)    { hangupStorm(t, "hangup:1.5.1") }
func TestRealUCXHangupStorm(t *testing.T) { hangupStorm(t, "ucx-hangup:1.5.1") }

func hangupStorm(t *testing.T, part string) {
	realNIXL(t)
	c := startChild(t, part, "UCX_DEBUG_SIGNO=HUP", "UCX_HANDLE_ERRORS=bt")
	if l := c.line(t); l != "taken 0" {
		t.Errorf("of the signals: %q; UCX was configured to handle none", l)
	}
	ask := func() (n int) {
		t.Helper()
		if _, err := c.in.Write([]byte{1}); err != nil {
			t.Fatalf("the child is gone: %v", err)
		}
		fmt.Sscanf(c.line(t), "seen %d", &n)
		return n
	}
	for range 4000 {
		if err := c.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		if time.Now().UnixNano()%7 == 0 {
			testwait.Pace(50 * time.Microsecond)
		}
	}
	before := ask()
	if before == 0 {
		t.Error("Go saw none of 4000 SIGHUPs")
	}
	t.Logf("4000 SIGHUPs survived, %d seen by Go", before)
	if err := c.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the last SIGHUP reaches Go", func() bool { return ask() > before })
}

// childIdle tells the CPU time of a second in which nothing happens.
func childIdle(a *Agent) {
	time.Sleep(200 * time.Millisecond)
	before := cpuTime()
	time.Sleep(2 * time.Second)
	fmt.Println("idle", int64(cpuTime()-before)/2)
	_ = a.Close()
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestRealIdle(t *testing.T) {
	realNIXL(t)
	if testing.Short() {
		t.Skip("two seconds of rest")
	}
	ns := idleCPU(t, "idle:1.5.1")
	t.Logf("an idle agent takes %.2f %% of a core", float64(ns)/1e7)
	// About 1 %, and twice that on a crowded machine; what must not come back is the
	// progress thread's spin, a whole core.
	if limit := 60 * time.Millisecond; ns > limit {
		t.Errorf("an idle agent takes %s of CPU a second, want at most %s", ns, limit)
	}
}

func TestRealUCXIdle(t *testing.T) {
	realNIXL(t)
	if testing.Short() {
		t.Skip("two seconds of rest")
	}
	ns := idleCPU(t, "ucx-idle:1.5.1")
	t.Logf("an idle agent over UCX alone takes %.2f %% of a core", float64(ns)/1e7)
	// It sleeps on descriptors; the bound leaves room for Go's own threads on a crowded machine.
	if limit := 20 * time.Millisecond; ns > limit {
		t.Errorf("an idle agent takes %s of CPU a second, want at most %s", ns, limit)
	}
}

// idleCPU is the CPU time a second of a child at rest.
func idleCPU(t *testing.T, part string) (ns time.Duration) {
	c := startChild(t, part)
	if _, err := fmt.Sscanf(c.line(t), "idle %d", &ns); err != nil {
		t.Fatal(err)
	}
	return ns
}
