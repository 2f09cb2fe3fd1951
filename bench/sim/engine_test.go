package sim

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/testwait"
)

func TestRanks(t *testing.T) {
	e := fastOptions(t, Options{Ranks: 2, RankPorts: true})
	for value, want := range map[string]int{"0": 200, "1": 200, "2": 400, "-1": 400, "abc": 200, " 1 ": 200} {
		a := post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":1}`, "X-data-parallel-rank", value)
		if a.status != want {
			t.Errorf("rank %q: %d %s, want %d", value, a.status, a.body, want)
		}
		if want == 400 && !strings.Contains(string(a.body), "data_parallel_rank "+value+" is out of range [0, 2).") {
			t.Errorf("rank %q: %s", value, a.body)
		}
	}
	before := e.Stats().Ranks[1].Requests
	for range 3 {
		if a, err := tryPost(e.RankURLs()[1]+"/v1/completions", `{"prompt":[300],"max_tokens":1}`); err != nil || a.status != 200 {
			t.Fatalf("rank port: %v %d", err, a.status)
		}
	}
	if got := e.Stats().Ranks[1].Requests - before; got != 3 {
		t.Errorf("rank 1 took %d requests of its port, want 3", got)
	}
	// Without a name the ranks share the load.
	before0, before1 := e.Stats().Ranks[0].Requests, e.Stats().Ranks[1].Requests
	for range 20 { // how many each takes depends on when the one before is seen to end
		post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":1}`)
	}
	s := e.Stats()
	if a, b := s.Ranks[0].Requests-before0, s.Ranks[1].Requests-before1; a < 1 || b < 1 {
		t.Errorf("20 requests went %d and %d", a, b)
	}
}

func TestAddresses(t *testing.T) {
	e := fastOptions(t, Options{})
	if _, err := Start(context.Background(), Options{Listen: e.Addr()}); err == nil || !strings.Contains(err.Error(), "sim: cannot listen on") {
		t.Errorf("a port in use: %v", err)
	}
	for _, o := range []Options{
		{Role: "king"}, {Encoding: "x"}, {Incomplete: "x"}, {Expired: "x"}, {Engine: "x"}, {Ranks: -1}, {Blocks: 1}, {BlockSize: -1},
		{MaxModelLen: 1 << 30}, {Listen: "nowhere:x"}, {KVEvents: "ipc:///x"}, {KVEvents: "tcp://127.0.0.1"},
	} {
		if e, err := Start(context.Background(), o); err == nil || !strings.HasPrefix(err.Error(), "sim: cannot ") {
			t.Errorf("%+v: %v", o, err)
			if e != nil {
				e.Close()
			}
		}
	}
	addr := e.Addr()
	e.Crash()
	// Between lives the port is nobody's: refused, and not to be taken.
	if _, err := net.Dial("tcp", addr); err == nil {
		t.Error("a dead engine takes connections")
	}
	if l, err := net.Listen("tcp", addr); err == nil {
		l.Close()
		t.Log("the port of a dead engine can be taken explicitly") // the kernel allows it to SO_REUSEADDR
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	if status, _ := get(t, "http://"+addr+"/health"); status != 200 {
		t.Errorf("health after restart: %d", status)
	}
}

func TestFlags(t *testing.T) {
	var o Options
	fs := flag.NewFlagSet("sim", flag.ContinueOnError)
	o.Flags(fs)
	if o.Speed != 1 || o.BlockSize != 16 {
		t.Errorf("defaults: %+v", o)
	}
	err := fs.Parse(strings.Fields("--listen 127.0.0.1:0 --role decode --ranks 2 --speed inf --kv-encoding vllm-array --fault kind=status,n=1 --fault kind=slow,delay=1ms,p=0.1 --cost-step 5ms"))
	if err != nil || o.Ranks != 2 || !math.IsInf(o.Speed, 1) || len(o.Faults) != 2 || o.Cost.Step != 5*time.Millisecond {
		t.Errorf("%v %+v", err, o)
	}
	e := fastOptions(t, o)
	if a := post(t, e, "/v1/completions", `{"prompt":[300]}`); a.status != 503 {
		t.Errorf("the fault of the flags: %d", a.status)
	}
	fs.SetOutput(io.Discard)
	for _, bad := range []string{"--speed -1", "--speed x", "--fault kind=x"} {
		if err := fs.Parse(strings.Fields(bad)); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

// TestCloseReleasesEverything: after Close no goroutine and no port of the engine remains,
// whatever was in progress.
func TestCloseReleasesEverything(t *testing.T) {
	runtime.GC()
	before := runtime.NumGoroutine()
	for range 3 {
		ctx, cancel := context.WithCancel(context.Background())
		p, err := Start(ctx, Options{Speed: 1, Ranks: 2})
		if err != nil {
			t.Fatal(err)
		}
		d, err := Start(ctx, Options{Speed: 1, Cost: cost.Model{Handshake: time.Hour}})
		if err != nil {
			t.Fatal(err)
		}
		h := prefill(t, p, idPrompt(100, 1))
		var conns []net.Conn
		for _, send := range []string{
			decodeBody(idPrompt(100, 1), h, 100, true),
			`{"prompt":[300],"max_tokens":10000,"ignore_eos":true,"stream":true}`,
			`{"prompt":[300],"max_tokens":10000,"ignore_eos":true}`,
		} {
			c := dial(t, d.Addr())
			io.WriteString(c, request("/v1/completions", send))
			conns = append(conns, c)
		}
		testwait.Until(t, "all in progress", func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting == 3 })
		p.Crash()
		cancel() // ends d as Close would
		testwait.Until(t, "ended by its context", func() bool { return !d.Alive() })
		d.Close()
		p.Close()
		p.Close()
		for _, c := range conns {
			c.Close()
		}
		if _, err := net.Dial("tcp", d.Addr()); err == nil {
			t.Error("a closed engine takes connections")
		}
	}
	testwait.Until(t, fmt.Sprintf("goroutines back to %d", before), func() bool {
		return runtime.NumGoroutine() <= before+1 // one may be a connection of another test that ends
	})
}

// TestThousandStreams: a thousand streams at once, each whole and in order.
func TestThousandStreams(t *testing.T) {
	const streams, tokens = 1000, 20
	e := fastOptions(t, Options{Blocks: 1 << 14})
	var wg sync.WaitGroup
	failed := make(chan string, streams)
	for i := range streams {
		wg.Go(func() {
			c, err := net.Dial("tcp", e.Addr())
			if err != nil {
				failed <- err.Error()
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(2 * time.Minute))
			io.WriteString(c, request("/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"stream":true}`, idPrompt(20, i), tokens), "Connection: close"))
			b, err := io.ReadAll(c)
			if n := strings.Count(string(b), "data: "); err != nil || n != tokens+1 || !strings.HasSuffix(string(b), "data: [DONE]\n\n\r\n0\r\n\r\n") {
				failed <- fmt.Sprintf("%d events, %v, %.200q", n, err, b)
			}
		})
	}
	wg.Wait()
	close(failed)
	for f := range failed {
		t.Fatal(f)
	}
	if s := e.Stats().Sum(); s.GeneratedTokens != streams*tokens || s.BlocksFree != s.BlocksTotal || s.Aborted != 0 {
		t.Errorf("%+v", s)
	}
}

// TestSpeed: time follows the cost model, not faster than asked.
func TestSpeed(t *testing.T) {
	e := fastOptions(t, Options{Speed: 10, Cost: cost.Model{Admit: -1, Step: 100 * time.Millisecond, PerSeq: -1, PerPrefill: time.Millisecond}})
	start := time.Now()
	post(t, e, "/v1/completions", `{"prompt":`+idPrompt(500, 1)+`,"max_tokens":11,"ignore_eos":true}`)
	// 500 ms of prefill and eleven steps of 100 ms, ten times faster.
	if took := time.Since(start); took < 150*time.Millisecond || took > 5*time.Second {
		t.Errorf("took %v, want 160 ms", took)
	}
}
