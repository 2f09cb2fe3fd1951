package limits

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestDrainOfManyStreams is point 11 of RELIABILITY.md: SIGTERM during many streams that would last
// longer than timeouts.drain.
func TestDrainOfManyStreams(t *testing.T) {
	if testing.Short() {
		t.Skip("processes, some seconds long")
	}
	n, drain := 200, 4*time.Second
	if os.Getenv("SLUICE_SOAK") != "" {
		n, drain = 1000, 20*time.Second
	}
	e := harness.StartSim(t, nil)
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 250 * time.Millisecond})
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--engine", e.URL(), "--drain", drain.String())
	p.Ready(t)
	var reading sync.WaitGroup
	var began, bytes atomic.Int64
	ends := make(chan time.Time, n)
	gate := make(chan struct{}, 32)
	text := `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":4000,"ignore_eos":true,"stream":true}`
	for range n {
		gate <- struct{}{}
		nc := harness.Dialed(t, p.Addr)
		reading.Go(func() {
			fmt.Fprintf(nc, "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
			br := bufio.NewReader(nc)
			resp, err := http.ReadResponse(br, nil)
			<-gate
			if err != nil || resp.StatusCode != 200 {
				t.Errorf("a stream did not begin: %v", err)
				return
			}
			began.Add(1)
			got, _ := io.Copy(io.Discard, resp.Body)
			bytes.Add(got)
			ends <- time.Now()
		})
	}
	testwait.UntilWithin(t, 60*time.Second, "all streams have begun", func() bool { return began.Load() == int64(n) || t.Failed() })
	probe, err := net.Dial("tcp", p.Addr) // a persistent connection, like a load balancer's
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	signalled := time.Now()
	p.Cmd.Process.Signal(syscall.SIGTERM)
	notReady := time.Duration(0)
	for notReady == 0 && time.Since(signalled) < 20*time.Second {
		resp, err := http.Get("http://" + p.Addr + "/readyz")
		if err != nil {
			t.Errorf("the listener closed before /readyz said 503: %v", err)
			break
		}
		resp.Body.Close()
		if resp.StatusCode == 503 {
			notReady = time.Since(signalled)
		}
	}
	code := p.Wait(t, drain+60*time.Second)
	ended := time.Since(signalled)
	reading.Wait()
	close(ends)
	early, first := 0, time.Duration(1<<62)
	for at := range ends {
		first = min(first, at.Sub(signalled))
		if at.Sub(signalled) < drain {
			early++
		}
	}
	if code != 0 || early > 0 {
		t.Errorf("exit code %d; %d of %d streams ended before the deadline", code, early, n)
	}
	if late := ended - drain; late > 20*time.Second {
		t.Errorf("it ended only %v after the deadline", late)
	}
	harness.LogFigure(t, 11, "%d streams: /readyz 503 after %d ms; the first cut %.2f s and the process's end %.2f s after SIGTERM, with a deadline of %v", n, notReady.Milliseconds(), first.Seconds(), ended.Seconds(), drain)
}
