package fleet

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// The engines of these tests run in a process of their own, so that the CPU time of
// this one is the fleet's alone. One process stands for all engines: each has an
// address of its own on loopback, one listener, and answers from memory.

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv("FLEET_TEST_ENGINES")); err == nil {
		serveEngines(n)
		return
	}
	os.Exit(m.Run())
}

// cheapEngine is one of the engines of serveEngines.
type cheapEngine struct {
	ln net.Listener

	mu     sync.Mutex
	conns  map[net.Conn]bool
	frozen bool // it accepts and reads, and answers nothing
}

// serveEngines runs n engines and obeys "kill I" and "freeze I" on standard input,
// each of which it confirms on standard output, until that ends.
func serveEngines(n int) {
	page := metricsPage(os.Getenv("FLEET_TEST_PAGE"))
	answers := map[string][]byte{"/health": answer(""), "/metrics": answer(page), "/v1/models": answer(scaleModels), "/version": answer(`{"version":"0.33.0"}`)}
	engines := make([]*cheapEngine, n)
	for i := range engines {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.1.%d.%d:0", i/250, i%250+1))
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		engines[i] = &cheapEngine{ln: ln, conns: map[net.Conn]bool{}}
		go engines[i].serve(answers)
		fmt.Println(ln.Addr())
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		what, at, _ := strings.Cut(in.Text(), " ")
		i, _ := strconv.Atoi(at)
		switch what {
		case "kill":
			engines[i].kill()
		case "freeze":
			engines[i].mu.Lock()
			engines[i].frozen = true
			engines[i].mu.Unlock()
		}
		fmt.Println("done")
	}
}

func answer(body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\ndate: Tue, 01 Jul 2025 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: text/plain\r\n\r\n%s", len(body), body)
}

func (e *cheapEngine) kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	_ = e.ln.Close()
	for c := range e.conns {
		_ = c.Close()
	}
	e.conns = nil
}

func (e *cheapEngine) serve(answers map[string][]byte) {
	for {
		c, err := e.ln.Accept()
		if err != nil {
			return
		}
		e.mu.Lock()
		if e.conns == nil {
			_ = c.Close()
		} else {
			e.conns[c] = true
		}
		e.mu.Unlock()
		go e.converse(c, answers)
	}
}

func (e *cheapEngine) converse(c net.Conn, answers map[string][]byte) {
	defer func() {
		_ = c.Close()
		e.mu.Lock()
		delete(e.conns, c)
		e.mu.Unlock()
	}()
	buf := make([]byte, 4096)
	for n := 0; ; {
		k, err := c.Read(buf[n:])
		if err != nil {
			return
		}
		n += k
		if !bytes.HasSuffix(buf[:n], []byte("\r\n\r\n")) {
			continue
		}
		path, _, _ := bytes.Cut(bytes.TrimPrefix(buf[:n], []byte("GET ")), []byte(" "))
		a := answers[string(path)]
		if a == nil {
			a = []byte("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
		}
		n = 0
		e.mu.Lock()
		frozen := e.frozen
		e.mu.Unlock()
		if frozen {
			_, _ = io.Copy(io.Discard, c)
			return
		}
		if _, err := c.Write(a); err != nil {
			return
		}
	}
}

const scaleModels = `{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm","max_model_len":4096,"parent":null}]}`

// metricsPage is a page as vLLM writes it: of the size of the simulator's (7 KB), or,
// where size is "large", of a real engine's with its histograms (60 KB).
func metricsPage(size string) string {
	var b strings.Builder
	b.WriteString("# HELP python_gc_objects_collected_total Objects collected during gc\n# TYPE python_gc_objects_collected_total counter\n" +
		"python_gc_objects_collected_total{generation=\"0\"} 13961.0\n# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n" +
		"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.75130381e+09\n")
	for _, g := range []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"} {
		fmt.Fprintf(&b, "# HELP vllm:%s As vLLM has it.\n# TYPE vllm:%s gauge\nvllm:%s{engine=\"0\",model_name=\"tiny\"} 0.0\n", g, g, g)
	}
	b.WriteString("vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"0\",num_gpu_blocks=\"4000\"} 1.0\n")
	b.WriteString("vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 12345.0\nvllm:generation_tokens_total{engine=\"0\",model_name=\"tiny\"} 12345.0\n")
	histograms := 2
	if size == "large" {
		histograms = 24
	}
	for h := range histograms {
		name := fmt.Sprintf("vllm:request_latency_of_kind_%d_seconds", h)
		fmt.Fprintf(&b, "# HELP %s Histogram of a latency in seconds.\n# TYPE %s histogram\n", name, name)
		for i := range 25 {
			fmt.Fprintf(&b, "%s_bucket{engine=\"0\",le=\"%g\",model_name=\"tiny\"} %d.0\n", name, float64(i)*0.75, i*1000)
		}
	}
	return b.String()
}

// manyEngines is the process of serveEngines.
type manyEngines struct {
	t     *testing.T
	addrs []string
	in    io.Writer
	out   *bufio.Scanner
}

func startEngines(t *testing.T, n int, page string) *manyEngines {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprint("FLEET_TEST_ENGINES=", n), "FLEET_TEST_PAGE="+page, "GOMAXPROCS=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	m := &manyEngines{t: t, in: in, out: bufio.NewScanner(out)}
	for range n {
		m.addrs = append(m.addrs, m.line())
	}
	return m
}

func (m *manyEngines) line() string {
	m.t.Helper()
	if !m.out.Scan() {
		m.t.Fatalf("the engines' process ended: %v", m.out.Err())
	}
	return m.out.Text()
}

func (m *manyEngines) send(what string, i int) {
	m.t.Helper()
	if _, err := fmt.Fprintf(m.in, "%s %d\n", what, i); err != nil {
		m.t.Fatal(err)
	}
	if got := m.line(); got != "done" {
		m.t.Fatal(got)
	}
}

// join makes a fleet with the default figures of all engines, and waits until all are ready.
func (m *manyEngines) join(opt Options) (*Fleet, []*worker.Rank) {
	m.t.Helper()
	f := New(opt)
	m.t.Cleanup(f.Close)
	for i, addr := range m.addrs {
		mustAdd(m.t, f, worker.Spec{ID: fmt.Sprintf("w%04d", i), URL: "http://" + addr})
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	v, ok := f.Wait(ctx, func(v *View) bool {
		p, _ := v.Pool("tiny")
		return p != nil && len(p.Aggregated) == len(m.addrs)
	})
	if !ok {
		m.t.Fatal("not all engines became ready")
	}
	p, _ := v.Pool("tiny")
	ranks := slices.Clone(p.Aggregated)
	slices.SortFunc(ranks, func(a, b *worker.Rank) int { return strings.Compare(a.ID.Worker, b.ID.Worker) })
	return f, ranks
}

// outAfter is how long after a moment each of some workers left state Ready.
func outAfter(t *testing.T, began time.Time, ranks []*worker.Rank) (took []time.Duration) {
	t.Helper()
	out := make([]time.Duration, len(ranks))
	testwait.Until(t, "the workers are out", func() bool {
		all := true
		for i, r := range ranks {
			if out[i] != 0 {
				continue
			}
			if s, _ := r.Worker.State(); s != worker.Ready {
				out[i] = time.Since(began)
			} else {
				all = false
			}
		}
		return all
	})
	slices.Sort(out)
	return out
}

// Dead workers among many leave the pools in time: with requests in flight as soon as in
// a small fleet, without any within five seconds.
func TestDeadAmongMany(t *testing.T) {
	n := 1000
	if testing.Short() {
		n = 256
	}
	engines := startEngines(t, n, "")
	f, ranks := engines.join(Options{})
	time.Sleep(2 * time.Second) // the first probes, with shorter intervals, are over
	const each = 9
	for _, c := range []struct {
		name, how string
		first     int
		busy      bool
		within    time.Duration
	}{
		{"killed, without requests", "kill", 0, false, f.opt.DetectIdleWithin(n)},
		{"frozen, without requests", "freeze", each, false, f.opt.DetectIdleWithin(n)},
		{"killed, with requests", "kill", 2 * each, true, f.opt.DetectWithin()},
		{"frozen, with requests", "freeze", 3 * each, true, f.opt.DetectWithin()},
	} {
		dead := ranks[c.first : c.first+each]
		began := time.Now()
		for i, r := range dead {
			engines.send(c.how, c.first+i)
			if c.busy {
				r.Requests.Add(1)
			}
		}
		took := outAfter(t, began, dead)
		t.Logf("%d workers; %s: out after %s (median) and %s (slowest); bound %s", n, c.name, took[each/2], took[each-1], c.within)
		if took[each/2] > c.within || took[each-1] > 2*c.within || c.within > idleWithin {
			t.Errorf("%s: %v; want a median of at most %s, each at most twice that, and that at most %s", c.name, took, c.within, idleWithin)
		}
	}
	testwait.Until(t, "the pool is without the dead workers, and has all others", func() bool {
		p, _ := f.View().Pool("tiny")
		return len(p.Aggregated) == n-4*each
	})
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// answerAll reports an answer of every rank a second, until stop is closed.
func answerAll(f *Fleet, ranks []*worker.Rank, each time.Duration, stop chan struct{}) {
	tick := time.NewTicker(each / 10)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		for at := i % 10; at < len(ranks); at += 10 {
			f.ReportStatus(ranks[at], 200)
		}
	}
}

// The CPU time that the fleet takes of a core to look after n workers, without
// requests and with all of them answering.
func TestCPUOfManyWorkers(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector's time is measured")
	}
	if testing.Short() {
		t.Skip("measures for a quarter of a minute")
	}
	type kind struct {
		workers int
		page    string
		busy    bool
		most    float64 // percent of a core
	}
	// Without SLUICE_SOAK it leaves a machine that is busy otherwise its slack: 3 before.
	span, kinds := 2*time.Second, []kind{{256, "", false, 2}}
	if os.Getenv("SLUICE_SOAK") != "" {
		span, kinds = 10*time.Second, []kind{{64, "", false, 1}, {256, "", false, 1}, {1000, "", false, 1}, {1000, "large", false, 0}, {64, "", true, 3}, {256, "", true, 3}, {1000, "", true, 3}, {1000, "large", true, 0}}
	}
	for _, k := range kinds {
		t.Run(fmt.Sprintf("%d %s busy=%v", k.workers, k.page, k.busy), func(t *testing.T) {
			engines := startEngines(t, k.workers, k.page)
			f, ranks := engines.join(Options{})
			stop, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				if k.busy {
					answerAll(f, ranks, 200*time.Millisecond, stop)
				}
			}()
			time.Sleep(5 * time.Second) // probes spread
			var shares []float64
			for range 5 {
				before, began := ownCPU(), time.Now()
				time.Sleep(span)
				shares = append(shares, 100*float64(ownCPU()-before)/float64(time.Since(began)))
			}
			close(stop)
			<-done
			slices.Sort(shares)
			median := testwait.Median(shares...)
			t.Logf("%d workers, page of %d bytes, busy %v: %.2f %% of a core (median; %.2f to %.2f)", k.workers, len(metricsPage(k.page)), k.busy, median, shares[0], shares[len(shares)-1])
			if k.most > 0 && median > k.most {
				t.Errorf("%.2f %% of a core; want at most %g %%", median, k.most)
			}
		})
	}
}
