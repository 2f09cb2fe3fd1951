package engineapi

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// openDescriptors returns the number of descriptors that this process has open.
func openDescriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestEngineAPILeavesNoState starts and stops routers on the same engines. Each serves complete,
// stopped, killed and abandoned requests, slow readers, and peers that send garbage. Afterwards no
// goroutines, descriptors or buffers remain.
func TestEngineAPILeavesNoState(t *testing.T) {
	type fleet struct {
		family string
		p, d   *sim.Engine
	}
	var fleets []fleet
	for _, name := range []string{"nixl", "nixl-push", "sglang"} {
		engine := func(role string) *sim.Engine {
			return harness.StartSim(t, func(o *sim.Options) {
				o.Role = role
				if name == "sglang" {
					o.Engine = name
				} else {
					o.PD = name
				}
			})
		}
		fleets = append(fleets, fleet{name, engine("prefill"), engine("decode")})
	}
	round := func(t *testing.T) {
		for _, f := range fleets {
			t.Run(f.family, func(t *testing.T) { // the router ends with the subtest
				path := harness.SocketIn(t)
				w := harness.SimWorker(f.p, worker.Prefill, "p0")
				harness.WithBootstrap(&w, f.p)
				r := harness.StartRouter(t, func(c *config.Config) {
					harness.WithEngineAPI(path)(c)
					c.PD.Family, c.PD.AbortDelay = f.family, 300*time.Millisecond
					c.Timeouts.Drain = 200 * time.Millisecond
				}, w, harness.SimWorker(f.d, worker.Decode, "d0"))
				exerciseEngineAPI(t, r, f.p, f.d)
			})
		}
		harness.DropIdle()
	}
	t.Run("before", round) // creates what lives as long as the process
	goroutines := testwait.Settled(t, 100*time.Millisecond, "the number of goroutines", harness.ModuleGoroutines)
	fds := testwait.Settled(t, 100*time.Millisecond, "the number of descriptors", func() int { return openDescriptors(t) })
	for range 2 {
		t.Run("again", round)
	}
	testwait.UntilWithin(t, harness.TestTimeout, "goroutines and descriptors are back", func() bool {
		harness.DropIdle()
		g, d := harness.ModuleGoroutines(), openDescriptors(t)
		return g <= goroutines && d <= fds
	})
}

// exerciseEngineAPI uses a router's engine API in every way in which callers may.
func exerciseEngineAPI(t *testing.T, r *harness.Router, p, d *sim.Engine) {
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	path := r.Config.EngineAPI.UnixSocket
	c := harness.DialEngine(t, r, "unix")
	for i := range 10 {
		if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(50, i), 20)); a.Failure != nil || a.Err != nil {
			t.Errorf("%v %v", a.Failure, a.Err)
		}
	}
	d.Fault(sim.Fault{Kind: sim.Slow, Delay: 2 * time.Millisecond})
	defer d.ClearFaults()
	var remaining []*client.Stream
	for i := range 12 {
		c := c
		if i%3 == 2 {
			line := harness.StartBreakableProxy(t, path)
			defer line.Sever()
			var err error
			if c, err = client.Dial(ctx, line.Addr, client.Options{}); err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			s := harness.StartEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(50, 100+i), 3000))
			firstTokens(t, s)
			line.Sever()
			<-c.Done()
			continue
		}
		s := harness.StartEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(50, 100+i), 3000))
		if i%2 == 0 {
			firstTokens(t, s)
		}
		remaining = append(remaining, s)
	}
	for i, s := range remaining {
		if i%2 == 0 {
			s.Stop()
		} else {
			s.Kill()
		}
		harness.ReadEngineAPI(ctx, s)
	}
	// A caller that reads nothing; the end of its connection kills its request.
	slow, err := client.Dial(ctx, "unix://"+path, client.Options{Window: 64})
	if err != nil {
		t.Fatal(err)
	}
	harness.StartEngineAPI(t, slow, harness.EngineAPIRequest(harness.TokenIDs(50, 200), 3000))
	testwait.UntilWithin(t, harness.TestTimeout, "the slow one's request runs", func() bool { return d.Stats().Sum().Running > 0 })
	slow.Close()
	// Garbage: at once, after a valid HELLO, and a partial frame.
	hello := "\x00\x00\x00\x35\x01\x00\x00\x00\x00\x84\xa8protocol\xadsluice-routed\xa7version\x01\xa6oldest\x01\xa6window\xce\x00\x01\x00\x00"
	for _, text := range []string{
		"GET / HTTP/1.1\r\n\r\n", "\x00", hello[:20], hello + strings.Repeat("\xff", 100), hello + "\x00\x10\x00\x00\x03\x00\x00\x00\x01half of a request",
		hello + "\x00\x00\x00\x01\x03\x00\x00\x00\x01\xc1", hello + "\x00\x00\x00\x00\x06\x00\x00\x00\x09",
	} {
		nc, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = nc.Write([]byte(text)) // the router may close the connection before all is sent
		if rand.IntN(2) == 0 {
			_ = nc.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			_, _ = nc.Read(make([]byte, 100))
		}
		nc.Close()
	}
	c.Close()
	harness.WantIdle(t, r, harness.TestTimeout, p, d)
	testwait.UntilWithin(t, harness.TestTimeout, "nothing is held", func() bool {
		st := r.Wire.Stats()
		return st.Conns == 0 && st.Streams == 0 && st.Requests == 0 && r.Front.BodyBytes() == 0
	})
}
