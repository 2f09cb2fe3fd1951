package liveness

import (
	"strings"
	"testing"
	"time"
)

// look is how often the fleet looks.
const look = 250 * time.Millisecond

var bounds = Bounds{Process: 10 * time.Second, Core: 30 * time.Second, Host: 10 * time.Second}

// engine is evidence that is made as an engine's would change.
type engine struct {
	e       Evidence
	d       Detector
	answers bool // a question to its core
}

func newEngine() *engine {
	g := &engine{e: Evidence{Ranks: []Rank{{Running: 1, Calls: 1, HasComputed: true}}}}
	g.run(5*time.Second, alive)
	return g
}

func (g *engine) rank() *Rank { return &g.e.Ranks[0] }

// run lets time pass, calls f before each look with the time since it began, and returns
// when the verdict changed, or d when it did not.
func (g *engine) run(d time.Duration, f func(g *engine, at time.Duration)) time.Duration {
	was := g.d.State(0)
	for at := look; at <= d; at += look {
		g.e.At += look
		f(g, at)
		g.d.Observe(&g.e, bounds)
		for i := range g.e.Ranks {
			switch r := &g.e.Ranks[i]; {
			case !g.d.NeedsProbe(i):
				r.ProbePending = 0
			case g.answers:
				r.ProbesAnswered++
			default:
				r.ProbePending += look
			}
		}
		if g.d.State(0) != was {
			return at
		}
	}
	return d
}

// each says whether at is a multiple of d.
func each(at, d time.Duration) bool { return at%d == 0 }

func answers(g *engine, at time.Duration) {
	if each(at, 500*time.Millisecond) {
		g.e.Answered++
	}
	if each(at, time.Second) {
		g.e.Answered++
		g.rank().Reads++
	}
}

func alive(g *engine, at time.Duration) {
	answers(g, at)
	if each(at, time.Second) {
		g.rank().Counters++
		g.rank().Bytes++
	}
}

func hangs(g *engine, at time.Duration) {
	if each(at, time.Second) {
		g.e.Hung++
	}
}

func unreachable(g *engine, at time.Duration) {
	if each(at, time.Second) {
		g.e.Unreachable++
	}
}

// TestVerdicts: what an engine shows, and what it is taken for after how long. The middle
// of three parts is a busy engine that shows little, and is left alone.
func TestVerdicts(t *testing.T) {
	const minutes = 10 * time.Minute
	for _, k := range []struct {
		name  string
		set   func(g *engine)
		shows func(g *engine, at time.Duration)
		want  State
		after time.Duration // until the verdict
	}{
		{"stopped", nil, hangs, ProcessStopped, 10 * time.Second},
		{"vanished", nil, unreachable, HostVanished, 10 * time.Second},
		{"vanished, with a kept-alive probe", nil, func(g *engine, at time.Duration) {
			if at == time.Second {
				g.e.Hung++
			} else {
				unreachable(g, at)
			}
		}, HostVanished, 10 * time.Second},
		{"core stopped", nil, answers, CoreStalled, 30 * time.Second},
		{"core stopped with a long prompt", func(g *engine) { g.rank().LongestPrefill = 20 * time.Second }, answers, CoreStalled, 90 * time.Second},
		{"core stopped while it was idle", func(g *engine) { g.rank().Running, g.rank().Overdue = 0, 1 }, answers, CoreStalled, 30 * time.Second},
		{"core stopped, refuses to be asked", func(g *engine) { g.rank().ProbeRefused = true }, answers, CoreStalled, 30 * time.Second},
		{"stopped without work", func(g *engine) { g.rank().Calls, g.rank().Running = 0, 0 }, hangs, ProcessStopped, 10 * time.Second},

		{"busy", nil, alive, Alive, minutes},
		{"idle", func(g *engine) { g.rank().Calls = 0 }, answers, Alive, minutes},
		{"nobody asks", nil, func(*engine, time.Duration) {}, Alive, minutes},
		{"probes hang, counters advance", nil, func(g *engine, at time.Duration) {
			hangs(g, at)
			if each(at, 9*time.Second) {
				g.e.Answered++
				g.rank().Reads++
				g.rank().Counters++
			}
		}, Alive, minutes},
		{"probes hang, events come", nil, func(g *engine, at time.Duration) {
			hangs(g, at)
			if each(at, 9*time.Second) {
				g.rank().Events++
			}
		}, Alive, minutes},
		{"probes hang, bytes come", nil, func(g *engine, at time.Duration) {
			hangs(g, at)
			if each(at, 9*time.Second) {
				g.rank().Bytes++
			}
		}, Alive, minutes},
		{"one probe in nine is answered", nil, func(g *engine, at time.Duration) {
			hangs(g, at)
			if each(at, 9*time.Second) {
				g.e.Answered++
			}
		}, Alive, minutes},
		{"a long prefill in chunks", nil, func(g *engine, at time.Duration) {
			answers(g, at)
			if each(at, 25*time.Second) {
				g.rank().Counters++
			}
		}, Alive, minutes},
		{"a long prefill in one step", func(g *engine) { g.rank().LongestPrefill = 25 * time.Second }, func(g *engine, at time.Duration) {
			answers(g, at)
			if each(at, time.Minute) {
				g.rank().Counters++
				g.rank().Bytes++
			}
		}, Alive, minutes},
		{"whole answers only, a minute each", nil, func(g *engine, at time.Duration) {
			answers(g, at)
			if each(at, time.Second) {
				g.rank().Counters++
			}
			if each(at, time.Minute) {
				g.rank().Answered++
			}
		}, Alive, minutes},
		{"waits for a transfer", func(g *engine) { g.rank().Running, g.rank().Overdue, g.answers = 0, 1, true }, answers, Alive, minutes},
		{"runs what does not advance, and answers", func(g *engine) { g.answers = true }, answers, Alive, minutes},
		{"answers are there and their clients are slow", func(g *engine) { g.rank().Running = 0 }, answers, Alive, minutes},
		{"refuses to be asked, and says it runs nothing", func(g *engine) { g.rank().Running, g.rank().Overdue, g.rank().ProbeRefused = 0, 1, true }, answers, Alive, minutes},
		{"cold", func(g *engine) { g.rank().HasComputed = false }, answers, Alive, minutes},
		{"tells no requests running", func(g *engine) { g.rank().Running = -1 }, answers, Alive, minutes},
		{"no counters", nil, func(g *engine, at time.Duration) {
			if each(at, 500*time.Millisecond) {
				g.e.Answered++
			}
		}, Alive, minutes},
		{"the core is stopped, events come", nil, func(g *engine, at time.Duration) {
			answers(g, at)
			if each(at, 20*time.Second) {
				g.rank().Events++
			}
		}, Alive, minutes},
		{"heads come and nothing behind them", nil, func(g *engine, at time.Duration) {
			answers(g, at)
			g.rank().Answered++
		}, CoreStalled, 30 * time.Second},
	} {
		t.Run(k.name, func(t *testing.T) {
			g := newEngine()
			if k.set != nil {
				k.set(g)
			}
			took := g.run(minutes, k.shows)
			if got := g.d.State(0); got != k.want {
				t.Fatalf("%s after %s, want %s; %s", got, took, k.want, g.d.Reason(0))
			}
			if slack := took - k.after; k.want != Alive && (slack < 0 || slack > time.Second) {
				t.Errorf("after %s, want %s", took, k.after)
			}
			if why := g.d.Reason(0); (why == "") != (k.want == Alive) {
				t.Errorf("reason %q", why)
			}
		})
	}
}

// TestThaw: a frozen engine counts as alive again by the sign that the verdict lacked.
func TestThaw(t *testing.T) {
	for _, k := range []struct {
		name  string
		shows func(g *engine, at time.Duration)
		sign  func(g *engine)
		none  func(g *engine, at time.Duration) // no sign for it
	}{
		{"process", hangs, func(g *engine) { g.e.Answered++ }, unreachable},
		{"process, a byte", hangs, func(g *engine) { g.rank().Bytes++ }, hangs},
		{"host", unreachable, func(g *engine) { g.e.Answered++ }, hangs},
		{"core", answers, func(g *engine) { g.rank().Counters++ }, answers},
		{"core, an event", answers, func(g *engine) { g.rank().Events++ }, answers},
		{"core, a question", answers, func(g *engine) { g.rank().ProbesAnswered++ }, answers},
	} {
		t.Run(k.name, func(t *testing.T) {
			g := newEngine()
			g.run(time.Minute, k.shows)
			name, _, _ := strings.Cut(k.name, ",")
			if g.d.State(0).String() != name {
				t.Fatalf("state %s", g.d.State(0))
			}
			g.rank().Calls = 0 // they were ended
			if g.run(time.Minute, k.none); g.d.State(0).String() != name {
				t.Fatalf("state %s a minute later", g.d.State(0))
			}
			k.sign(g)
			g.run(look, func(*engine, time.Duration) {})
			if g.d.State(0) != Alive || g.d.Reason(0) != "" {
				t.Errorf("state %s behind a sign of life", g.d.State(0))
			}
		})
	}
}

// TestRouterStopped: a router that was stopped itself has heard nothing meanwhile.
func TestRouterStopped(t *testing.T) {
	g := newEngine()
	for range 8 {
		g.e.At += time.Hour
		g.e.Hung++
		g.d.Observe(&g.e, bounds)
	}
	if g.d.State(0) != Alive {
		t.Errorf("state %s", g.d.State(0))
	}
}

// TestOff: a bound of 0 or less gives no verdict.
func TestOff(t *testing.T) {
	defer func(b Bounds) { bounds = b }(bounds)
	bounds = Bounds{Process: -1, Core: -1, Host: -1}
	for _, shows := range []func(*engine, time.Duration){hangs, unreachable, answers} {
		g := newEngine()
		if g.run(10*time.Minute, shows); g.d.State(0) != Alive {
			t.Errorf("state %s", g.d.State(0))
		}
	}
}

// TestRanks: the core of one rank is judged by itself, the server for all.
func TestRanks(t *testing.T) {
	g := &engine{e: Evidence{Ranks: []Rank{{Running: 1, Calls: 1, HasComputed: true}, {Running: 1, Calls: 1, HasComputed: true}}}}
	both := func(g *engine, at time.Duration) {
		alive(g, at)
		g.e.Ranks[1].Reads, g.e.Ranks[1].Counters = g.rank().Reads, g.rank().Counters
	}
	g.run(5*time.Second, both)
	g.run(time.Minute, func(g *engine, at time.Duration) {
		answers(g, at)
		g.e.Ranks[1].Reads = g.rank().Reads
		g.e.Ranks[1].Counters++
	})
	if g.d.State(0) != CoreStalled || g.d.State(1) != Alive {
		t.Fatalf("states %s, %s", g.d.State(0), g.d.State(1))
	}
	g.run(time.Minute, hangs)
	if g.d.State(0) != ProcessStopped || g.d.State(1) != ProcessStopped {
		t.Errorf("states %s, %s", g.d.State(0), g.d.State(1))
	}
}
