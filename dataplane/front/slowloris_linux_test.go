package front

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSlowloris is number 2 of RELIABILITY.md, against a process of its own: clients
// that send a head byte by byte, and clients that announce 60 MB and stop.
func TestSlowloris(t *testing.T) {
	if testing.Short() {
		t.Skip("a process of its own, some seconds long")
	}
	trickling, stalled, head, every := 1000, 100, 3*time.Second, 300*time.Millisecond
	if os.Getenv("SLUICE_SOAK") != "" {
		trickling, stalled, head, every = 10_000, 1000, 10*time.Second, 10*time.Second
	}
	trickling = min(trickling, raiseFiles()-stalled-200)
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	ln, err := net.Listen("tcp", "127.0.0.1:0") // an engine that nobody will need
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	router := begin(t, routerFor+"="+ln.Addr().String())
	idle := router.rss()
	calm, err := goodTraffic(router.addr, head/2)
	if err != nil {
		t.Fatal(err)
	}
	c := newCrowdClients(t, router.addr)
	heads := make([]*slowHead, trickling)
	for i := range heads {
		fd := c.dial(nil)
		heads[i] = &slowHead{began: time.Now()}
		c.by[int32(fd)] = &crowdClient{fd: fd, as: nobody}
		heads[i].one = c.by[int32(fd)]
		if err := unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
			t.Fatal(err)
		}
		heads[i].send()
	}
	request := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", 60_000_000, doc(9<<10))
	for range stalled {
		fd := c.dial(nil)
		c.by[int32(fd)] = &crowdClient{fd: fd, as: nobody}
		if _, err := unix.Write(fd, []byte(request)); err != nil {
			t.Fatal(err)
		}
	}
	var busy time.Duration
	var full int
	measured := make(chan error, 1)
	go func() {
		var err error
		busy, err = goodTraffic(router.addr, head/2)
		full = router.rss()
		measured <- err
	}()
	began, sent, open := time.Now(), 0, trickling
	var longest time.Duration
	c.drive(head+3*patience, "all heads cut", func() bool {
		due := int(float64(trickling) * time.Since(began).Seconds() / every.Seconds())
		for ; sent < due; sent++ {
			heads[sent%trickling].send()
		}
		if c.lost > trickling-open { // somebody was
			open = 0
			for _, h := range heads {
				if h.one.gone && !h.done {
					h.done = true
					longest = max(longest, time.Since(h.began))
				}
				if !h.done {
					open++
				}
			}
		}
		return open == 0
	})
	if err := <-measured; err != nil {
		t.Fatal(err)
	}
	if most := 150 << 10; full-idle > most && !raceOn {
		t.Errorf("%d KiB more than idle, want at most %d", full-idle, most)
	}
	if longest > head+patience {
		t.Errorf("a head was waited for %v", longest)
	}
	figure(t, 2, "%d heads of a byte each %v and %d bodies that stopped of 60 MB announced: %d MiB more than the idle router's %d; all heads cut, the last %v after its beginning (limit %v); other requests' p99 %v, %v without them",
		trickling, every, stalled, (full-idle)>>10, idle>>10, longest.Round(10*time.Millisecond), head, busy, calm)
}

// slowHead is a client that sends a head byte by byte.
type slowHead struct {
	one   *crowdClient
	began time.Time
	sent  int
	done  bool
}

func (h *slowHead) send() {
	const text = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	if h.one.gone || h.sent == len(text) {
		return
	}
	_, _ = unix.Write(h.one.fd, []byte{text[h.sent]}) // what is wrong with it, the read will say
	h.sent++
}

// goodTraffic is the 99th percentile of a page's answers.
func goodTraffic(addr string, span time.Duration) (p99 time.Duration, err error) {
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer nc.Close()
	br := bufio.NewReader(nc)
	var took []time.Duration
	for end := time.Now().Add(span); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		began := time.Now()
		_, _ = io.WriteString(nc, "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			return 0, fmt.Errorf("good traffic: %w", err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
			return 0, fmt.Errorf("good traffic: status %d, %v", resp.StatusCode, err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)*99/100].Round(10 * time.Microsecond), nil
}
