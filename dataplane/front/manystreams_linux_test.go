package front

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
)

// reportFigure prints a test's measurement for a point of RELIABILITY.md.
func reportFigure(t testing.TB, point int, format string, args ...any) {
	t.Helper()
	t.Logf("reliability %d: %s", point, fmt.Sprintf(format, args...))
}

// manyStreamsLoad is the number of streams, how their slow clients read, and the measurements of
// the router meanwhile.
type manyStreamsLoad struct {
	n            int
	slow         bool // one in ten, and of those every tenth reads nothing at all
	every        time.Duration
	slowReadSize int
	pause        time.Duration
	duration     time.Duration

	idle, loaded  int     // KiB resident, before and with all streams
	cpu           float64 // of a core
	p50, p99, max time.Duration
	events        int
	p90           time.Duration
}

// TestManyStreams prints the cost of many streams with a tenth of slow readers, compared with as
// many without slow readers. It checks that clients that stop reading are cut, that no others
// are, and that fast readers are not delayed.
func TestManyStreams(t *testing.T) {
	if testing.Short() {
		t.Skip("processes of their own, some seconds long")
	}
	// A slow client reads a third of the bytes that the engine sends.
	c := manyStreamsLoad{n: 400, every: time.Second, slowReadSize: 10 << 10, pause: 250 * time.Millisecond, duration: 3 * time.Second}
	if os.Getenv("SLUICE_SOAK") != "" {
		c = manyStreamsLoad{n: 10_000, every: 4 * time.Second, slowReadSize: 1 << 10, pause: time.Second, duration: 40 * time.Second}
	}
	c.n = min(c.n, (raiseFDLimit()-500)/2) // two descriptors a stream in the router
	c.n -= c.n % 100
	alone, mixed := c, c
	mixed.slow = true
	alone.run(t)
	mixed.run(t)
	reportFigure(t, 4, "%d streams, all swift: %.0f %% of a core, %.1f KiB a stream over the idle router's %d MiB; %d events: p50 %v, p99 %v, worst %v after they were sent",
		alone.n, 100*alone.cpu, alone.each(), alone.idle>>10, alone.events, alone.p50, alone.p99, alone.max)
	reportFigure(t, 4, "%d streams, %d slow of which %d stopped: %.0f %% of a core, %.1f KiB a stream; %d events of the swift: p50 %v, p99 %v, worst %v",
		mixed.n, mixed.n/10, mixed.n/100, 100*mixed.cpu, mixed.each(), mixed.events, mixed.p50, mixed.p99, mixed.max)
	if alone.p99 < 50*time.Millisecond && mixed.p99 > 10*alone.p99+time.Second {
		t.Errorf("a hundredth of the swift clients' events came %v late and more, %v without slow ones", mixed.p99, alone.p99)
	}
	if raceOn {
		return
	}
	// A little for each stream, and one read of the engine for each slow one.
	for _, c := range []*manyStreamsLoad{&alone, &mixed} {
		if most := c.idle + 32<<10 + 24*c.n; c.loaded > most {
			t.Errorf("%d KiB resident with %d streams (slow ones: %v), want at most %d", c.loaded, c.n, c.slow, most)
		}
	}
}

func (c *manyStreamsLoad) each() float64 { return float64(c.loaded-c.idle) / float64(c.n) }

func (c *manyStreamsLoad) run(t *testing.T) {
	t.Run(fmt.Sprintf("slow=%t", c.slow), func(t *testing.T) {
		engine := startRole(t, engineRole+"="+c.every.String())
		router := startRole(t, routerRole+"="+engine.addr)
		clients := newManyClients(t, router.addr)
		clients.slowReadSize, clients.pause = c.slowReadSize, c.pause
		clients.drive(200*time.Millisecond, "", nil)
		c.idle = router.rss()
		began, stops := time.Now(), 0
		for i := range c.n {
			as := readFast
			switch {
			case !c.slow:
			case i%100 == 55:
				as = readNever
				stops++
			case i%10 == 5:
				as = readSlow
			}
			clients.connect(as)
			if i%100 == 99 { // in steps: another test covers simultaneous connects
				clients.drive(3*testTimeout, "a step's streams begun", func() bool { return clients.begun == i+1 })
			}
		}
		t.Logf("%d streams begun in %v", c.n, time.Since(began).Round(time.Millisecond))
		clients.drive(c.every+c.duration/4, "", nil)
		cpu, at := router.cpu(), time.Now()
		clients.measuring = true
		clients.drive(c.duration, "", nil)
		clients.measuring = false
		c.cpu = (router.cpu() - cpu).Seconds() / time.Since(at).Seconds()
		c.loaded = router.rss()
		if c.slow {
			clients.drive(stalledAfter()+3*testTimeout, "the stopped cut", func() bool { return router.lines.count("client_stalled") >= stops })
		}
		slices.Sort(clients.lags)
		if c.events = len(clients.lags); c.events == 0 {
			t.Fatal("no event of a swift client")
		}
		q := func(p float64) time.Duration {
			return clients.lags[int(p*float64(c.events-1))].Round(10 * time.Microsecond)
		}
		c.p50, c.p90, c.p99, c.max = q(.5), q(.9), q(.99), q(1)
		switch got := router.lines.count("client_stalled"); {
		case c.p90 > time.Second:
			t.Logf("a tenth of the events came %v late and more: this machine has no time for %d clients, and slow clients cannot be distinguished (%d lost, %d called stalled)", c.p90, c.n, clients.lost, got)
		case clients.lost > 0:
			t.Errorf("%d streams of clients that read ended", clients.lost)
		case got != stops:
			t.Errorf("%d clients called stalled, want %d", got, stops)
		}
	})
}
