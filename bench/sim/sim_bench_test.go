package sim

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/textgen"
	"sluice/bench/testwait"
)

// BenchmarkPacedStreams is how many SSE events one core sends, each in a write of
// its own: 1000 streams, a token every step. The reader is another process, so
// cpu/s is the engine's alone. "asked" is the pace the cost model sets; an engine
// that cannot keep it falls behind it.
func BenchmarkPacedStreams(b *testing.B) {
	for _, rate := range []int{25_000, 50_000, 100_000, 1_000_000} {
		b.Run(strconv.Itoa(rate), func(b *testing.B) { pacedStreams(b, 1000, rate) })
	}
}

func pacedStreams(b *testing.B, streams, rate int) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	step := time.Duration(float64(streams) / float64(rate) * 1e9)
	e := fastOptions(b, Options{Speed: 1, MaxSeqs: streams, Blocks: 1 << 20, MaxModelLen: 1 << 22, KVEvents: "off", NoPrefixCache: true,
		Cost: cost.Model{Admit: -1, Step: step, PerSeq: -1, PerPrefill: -1}})
	reader := exec.Command(os.Args[0], "-test.run=TestReaderProcess")
	reader.Env = append(os.Environ(), "SIM_READER="+e.Addr(), "SIM_STREAMS="+strconv.Itoa(streams))
	in, _ := reader.StdinPipe()
	reader.Stdout, reader.Stderr = os.Stderr, os.Stderr
	if err := reader.Start(); err != nil {
		b.Fatal(err)
	}
	defer reader.Wait()
	defer in.Close()
	testwait.Until(b, "the streams have started", func() bool { return e.Stats().Sum().Running >= streams })
	cpu := func() time.Duration {
		var ru syscall.Rusage
		syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
		return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	mallocs := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.Mallocs
	}
	var events int
	allocs := mallocs()
	var used, took time.Duration
	for b.Loop() {
		from, c, t := e.Stats().Sum().GeneratedTokens, cpu(), time.Now()
		time.Sleep(500 * time.Millisecond)
		events += e.Stats().Sum().GeneratedTokens - from
		used += cpu() - c
		took += time.Since(t)
	}
	if e.Stats().SlowReaders > 0 {
		b.Fatal("the reader was too slow")
	}
	b.ReportMetric(float64(events)/took.Seconds(), "events/s")
	b.ReportMetric(float64(used)/float64(took), "cores")
	b.ReportMetric(float64(used.Nanoseconds())/float64(events), "cpu-ns/event")
	b.ReportMetric(float64(events)/used.Seconds(), "events/core-s")
	b.ReportMetric(float64(mallocs()-allocs)/float64(events), "allocs/event")
	b.ReportMetric(0, "ns/op")
}

// TestReaderProcess is the other process of the benchmark: it opens the streams
// and throws away what comes until its standard input ends.
func TestReaderProcess(t *testing.T) {
	addr := os.Getenv("SIM_READER")
	if addr == "" {
		t.Skip("run by BenchmarkPacedStreams")
	}
	n, _ := strconv.Atoi(os.Getenv("SIM_STREAMS"))
	body := `{"prompt":[300,301,302],"max_tokens":4000000,"ignore_eos":true,"stream":true}`
	var wg sync.WaitGroup
	var conns []net.Conn
	for range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len(body), body)
		wg.Go(func() {
			buf := make([]byte, 32<<10)
			for {
				if _, err := c.Read(buf); err != nil {
					return
				}
			}
		})
	}
	io.Copy(io.Discard, os.Stdin)
	for _, c := range conns {
		c.Close()
	}
	wg.Wait()
}

func BenchmarkTokenize(b *testing.B) {
	text := textgen.Detokenize(func() (ids []uint32) {
		g := textgen.NewGenerator("sim", 0, 0, 0, nil)
		for range 250_000 {
			id := g.Next(false)
			g.Fold(id)
			ids = append(ids, id)
		}
		return
	}())
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	var ids []uint32
	for b.Loop() {
		ids = textgen.Vocab().Append(ids[:0], text)
	}
	b.ReportMetric(float64(len(ids)), "tokens")
}

// BenchmarkRequests is a small chat answered whole, over 16 kept connections; the
// client's share of the time is in it.
func BenchmarkRequests(b *testing.B) {
	e := fastOptions(b, Options{})
	req := []byte(request("/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"Hello there my friend, what is the news of the day?"}],"max_tokens":1}`))
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		c := dial(b, e.Addr())
		buf := make([]byte, 16<<10)
		for pb.Next() {
			c.Write(req)
			if _, err := c.Read(buf); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
