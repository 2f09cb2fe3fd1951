package front

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"sluice/bench/testwait"
)

// Four clients with small compressed bodies that decode to large ones keep a router on one core
// busy. Meanwhile the router still accepts other clients and closes slow ones.
func TestBurstDuringDecoding(t *testing.T) {
	if testing.Short() {
		t.Skip("a process of its own, some seconds long")
	}
	const others, head, most = 300, 2 * time.Second, 3 * time.Second
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	router, _ := startProcess(t, availableCores(t)[0], routerRole+"=127.0.0.1:1")
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	small := w.EncodeAll(append([]byte{'['}, bytes.Repeat([]byte{' '}, 30<<20)...), nil)
	request := fmt.Appendf(nil, "%sContent-Encoding: zstd\r\nContent-Length: %d\r\n\r\n%s", atHost, len(small), small)
	var over atomic.Bool
	var answered atomic.Int32
	var busy sync.WaitGroup
	for range 4 {
		busy.Go(func() {
			for !over.Load() {
				nc, err := net.Dial("tcp", router.addr)
				if err != nil {
					t.Error(err)
					return
				}
				for br := bufio.NewReader(nc); !over.Load(); {
					_ = nc.SetDeadline(time.Now().Add(testTimeout))
					_, _ = nc.Write(request)
					resp, err := http.ReadResponse(br, nil)
					if err != nil {
						break
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					if resp.StatusCode != http.StatusBadRequest {
						t.Errorf("a body that is not JSON is answered with %d", resp.StatusCode)
					}
					answered.Add(1)
					if resp.Close {
						break
					}
				}
				_ = nc.Close()
			}
		})
	}
	testwait.Until(t, "bodies are decoded", func() bool { return answered.Load() >= 8 })

	// all sends the same request from many clients at once, and returns how long the last
	// one waited for its response.
	all := func(send string, status int) time.Duration {
		var longest atomic.Int64
		var each sync.WaitGroup
		for range others {
			each.Go(func() {
				began := time.Now()
				nc, err := net.Dial("tcp", router.addr)
				if err != nil {
					t.Error(err)
					return
				}
				defer nc.Close()
				_ = nc.SetDeadline(began.Add(head + testTimeout))
				_, _ = io.WriteString(nc, send)
				resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
				if err != nil || resp.StatusCode != status {
					t.Errorf("after %v: %v, %v", time.Since(began), resp, err)
				}
				for took := int64(time.Since(began)); ; {
					if was := longest.Load(); took <= was || longest.CompareAndSwap(was, took) {
						return
					}
				}
			})
		}
		each.Wait()
		return time.Duration(longest.Load())
	}
	pages := all("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusOK)
	heads := all("GET /livez HT", http.StatusRequestTimeout)
	over.Store(true)
	busy.Wait()
	t.Logf("bodies of %d bytes that are %d MiB once decoded, four at once: the last of %d pages came after %v, of as many half heads was cut after %v (limit %v)",
		len(small), 30, others, pages.Round(time.Millisecond), heads.Round(time.Millisecond), head)
	if pages > most || heads > head+most {
		t.Errorf("pages waited for %v, half heads for %v; want at most %v and %v", pages, heads, most, head+most)
	}
}
