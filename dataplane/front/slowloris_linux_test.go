package front

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// figure prints what a test has measured of one of RELIABILITY.md's points.
func figure(t testing.TB, point int, format string, args ...any) {
	t.Helper()
	t.Logf("reliability %d: %s", point, fmt.Sprintf(format, args...))
}

// TestSlowloris is number 2 of RELIABILITY.md, against a process of its own: clients
// that send a head byte by byte, and clients that announce 60 MB and stop.
func TestSlowloris(t *testing.T) {
	if testing.Short() {
		t.Skip("a process of its own, some seconds long")
	}
	trickling, stalled, head := 1000, 100, 3*time.Second
	if os.Getenv("SLUICE_SOAK") != "" {
		trickling, stalled, head = 10_000, 1000, 10*time.Second
	}
	trickling = min(trickling, raiseFiles()-stalled-200)
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	ln, err := net.Listen("tcp", "127.0.0.1:0") // an engine that nobody will need
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c := &crowd{t: t}
	addr, _ := c.router(ln.Addr().String())
	idle := c.rss()
	calm := goodTraffic(t, addr, time.Second)

	var open sync.WaitGroup
	var cut, early atomic.Int64
	var mu sync.Mutex
	var longest time.Duration
	gate := make(chan struct{}, 64)
	for range trickling {
		gate <- struct{}{}
		open.Go(func() {
			nc, err := net.Dial("tcp", addr)
			<-gate
			if err != nil {
				early.Add(1)
				return
			}
			defer nc.Close()
			began := time.Now()
			const text = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				_, _ = io.Copy(io.Discard, nc) // its 408, and the end
			}()
			for i := range text {
				if _, err := nc.Write([]byte{text[i]}); err != nil {
					break
				}
				select {
				case <-gone:
				case <-time.After(head / 10):
					continue
				}
				break
			}
			<-gone
			took := time.Since(began)
			mu.Lock()
			longest = max(longest, took)
			mu.Unlock()
			cut.Add(1)
		})
	}
	var stalledConns []net.Conn
	for range stalled {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		fmt.Fprintf(nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", 60_000_000, doc(9<<10))
		stalledConns = append(stalledConns, nc)
	}
	busy := goodTraffic(t, addr, head/2)
	full := c.rss()
	open.Wait()
	if early.Load() > 0 {
		t.Errorf("%d connections could not be made", early.Load())
	}
	if most := 150 << 10; full-idle > most && !raceOn {
		t.Errorf("%d KiB more than idle, want at most %d", full-idle, most)
	}
	if longest > head+patience {
		t.Errorf("a head was waited for %v", longest)
	}
	figure(t, 2, "%d heads of a byte each %v and %d bodies that stopped of 60 MB announced: %d MiB more than the idle router's %d; all heads cut, the last %v after its beginning (limit %v); other requests' p99 %v, %v without them",
		trickling, head/10, len(stalledConns), (full-idle)>>10, idle>>10, longest.Round(10*time.Millisecond), head, busy, calm)
}

// goodTraffic is the 99th percentile of a page's answers.
func goodTraffic(t *testing.T, addr string, span time.Duration) time.Duration {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	br := bufio.NewReader(nc)
	var took []time.Duration
	for end := time.Now().Add(span); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		began := time.Now()
		_, _ = io.WriteString(nc, "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("good traffic: %v", err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)*99/100].Round(10 * time.Microsecond)
}
