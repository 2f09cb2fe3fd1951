package front

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fastClientRole is the environment variable that makes the test binary a well-behaved client of
// the address in it.
const fastClientRole = "SLUICE_TEST_GOOD_AT"

// sample is a response to the well-behaved client.
type sample struct {
	At   int64 // time of the request, in ns
	Took int64
}

// runFastClient requests a page at fixed intervals, for the time that each line of standard input
// gives. It waits on a thread of its own in the kernel, so that Go's poller adds no latency. A
// request that becomes due while a response is outstanding counts as late from its due time.
func runFastClient(addr string) error {
	debug.SetGCPercent(-1)
	runtime.LockOSThread()
	setScheduler(schedRoundRobin, 1)
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err != nil {
		return err
	}
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	var took []sample
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			os.Exit(0)
		}
		var span, every time.Duration
		if _, err := fmt.Sscan(line, &span, &every); err != nil {
			return err
		}
		if took, err = requestAll(fd, span, every, took[:0]); err != nil {
			return err
		}
		fmt.Println(len(took))
		if err := binary.Write(os.Stdout, binary.LittleEndian, took); err != nil {
			return err
		}
	}
}

func requestAll(fd int, span, every time.Duration, took []sample) ([]sample, error) {
	request, buf := []byte("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"), make([]byte, 4<<10)
	began := time.Now().UnixNano()
	for due := began; due < began+int64(span); due += int64(every) {
		if wait := due - time.Now().UnixNano(); wait > 0 {
			_ = unix.Nanosleep(&unix.Timespec{Nsec: wait}, nil)
			due = max(due, time.Now().UnixNano())
		}
		if _, err := unix.Write(fd, request); err != nil {
			return took, err
		}
		n, err := unix.Read(fd, buf)
		for err == unix.EINTR {
			n, err = unix.Read(fd, buf)
		}
		if answer := string(buf[:max(n, 0)]); err != nil || !strings.HasPrefix(answer, "HTTP/1.1 200 ") {
			return took, fmt.Errorf("good traffic: %v, %q", err, answer)
		}
		took = append(took, sample{due, time.Now().UnixNano() - due})
	}
	return took, nil
}

// fastClient is a process in the fastClientRole.
type fastClient struct {
	t  *testing.T
	in io.Writer
	br *bufio.Reader
}

func startFastClient(t *testing.T, core int, addr string) *fastClient {
	t.Helper()
	p, br := startProcess(t, core, fastClientRole+"="+addr)
	return &fastClient{t, p.in, br}
}

// begin makes the client send requests for a time. The returned function waits for the end.
func (g *fastClient) begin(span, every time.Duration) (wait func() []sample) {
	g.t.Helper()
	if _, err := fmt.Fprintln(g.in, int64(span), int64(every)); err != nil {
		g.t.Fatal(err)
	}
	return func() []sample {
		g.t.Helper()
		line, err := g.br.ReadString('\n')
		if err != nil {
			g.t.Fatal("the good client ended:", err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			g.t.Fatal(err)
		}
		took := make([]sample, n)
		if err := binary.Read(g.br, binary.LittleEndian, took); err != nil {
			g.t.Fatal(err)
		}
		return took
	}
}
