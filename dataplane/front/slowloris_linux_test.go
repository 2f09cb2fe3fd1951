package front

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestSlowloris measures point 2 of RELIABILITY.md: thousands of clients that send a head byte by
// byte, or announce 60 MB and stop, while a well-behaved client requests a page.
//
// The router has a core of its own. The well-behaved client shares the other core with the
// attackers. Both have priority over all other processes of the machine, the attackers have the
// lowest. The attackers delay the client on their common core, which is not the router's fault;
// therefore they also attack a server that reads nothing, as the control. The rounds (no attack,
// control, router) alternate, because the machine's speed changes from minute to minute.
func TestSlowloris(t *testing.T) {
	if testing.Short() {
		t.Skip("processes of their own, some seconds long")
	}
	plan, rounds, head, pause := slowClientPlan{heads: 1000, bodies: 100, interval: 300 * time.Millisecond}, 1, 3*time.Second, 2*time.Millisecond
	if os.Getenv("SLUICE_SOAK") != "" {
		plan, rounds, head, pause = slowClientPlan{heads: 10_000, bodies: 1000, interval: 10 * time.Second}, 8, 10*time.Second, soakPause
	}
	plan.heads = min(plan.heads, raiseFDLimit()-plan.bodies-200)
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	b := newSlowlorisSetup(t, pause, head)
	idle := b.router.rss()
	held := head - head/5
	var alone, control, attacked, joining, leaving, whole, wholeControl latencies
	var opened, cutting, longest time.Duration
	full := 0
	// round attacks a server until it has closed all connections with heads.
	round := func(addr string) (took []sample, began, open int64, cut, last processReport) {
		began = time.Now().UnixNano()
		samples := b.measure(head + head/2)
		a := startSlowClients(t, b.others, addr, plan)
		open = a.await("open", testTimeout).at
		testwait.Pace(head / 2)
		if addr == b.router.addr {
			full = max(full, b.router.rss())
		}
		cut, last = a.await("cut", head+testTimeout), a.await("heads", testTimeout)
		took = samples()
		a.stop()
		time.Sleep(time.Second) // so that their connections do not affect the next round
		return took, began, open, cut, last
	}
	for range rounds {
		alone.add(b.measure(held)(), 0, math.MaxInt64)

		took, began, open, cut, last := round(b.sinkProcess.addr)
		control.add(took, open, min(cut.at, open+int64(held)))
		wholeControl.add(took, began, last.at)

		took, began, open, cut, last = round(b.router.addr)
		joining.add(took, began, open)
		attacked.add(took, open, min(cut.at, open+int64(held)))
		leaving.add(took, cut.at, last.at)
		whole.add(took, began, last.at)
		opened, cutting = max(opened, time.Duration(open-began)), max(cutting, time.Duration(last.at-cut.at))
		longest = max(longest, last.elapsed)
	}
	if most := 150 << 10; full-idle > most && !raceOn {
		t.Errorf("%d KiB more than idle, want at most %d", full-idle, most)
	}
	if rounds > 1 {
		if attacked.over(&control) > 1.1 {
			t.Errorf("a page's p99 is %v under attack, %v while another server is attacked", &attacked, &control)
		}
		// Without the yield of the accepting goroutine it is 30 ms.
		if most := 5 * time.Millisecond; joining.median() > most {
			t.Errorf("a page's p99 is %v while they connect, want at most %v", &joining, most)
		}
	}
	if longest > head+testTimeout {
		t.Errorf("a head was waited for %v", longest)
	}
	reportFigure(t, 2, "%d heads of a byte each %v and %d bodies that stopped of 60 MB announced: "+
		"%d MiB more than the idle router's %d; all heads cut, the last %v after its beginning (limit %v)",
		plan.heads, plan.interval, plan.bodies, (full-idle)>>10, idle>>10, longest.Round(10*time.Millisecond), head)
	reportFigure(t, 2, "%s; while they connect (%v) %v, while they are cut (%v) %v; from the first that connects to the last cut %v, the other server's %v (%s)",
		b.report(rounds, &attacked, &control, &alone), opened.Round(10*time.Millisecond), &joining, cutting.Round(10*time.Millisecond), &leaving,
		&whole, &wholeControl, whole.comparedTo(&wholeControl))
}

// TestSlowlorisSteady is TestSlowloris with attackers that reconnect when they are cut: a thousand
// connections a second are opened and closed.
func TestSlowlorisSteady(t *testing.T) {
	if os.Getenv("SLUICE_SOAK") == "" {
		t.Skip("minutes; SLUICE_SOAK=1")
	}
	head, rounds := 10*time.Second, 6
	plan := slowClientPlan{heads: 10_000, bodies: 1000, interval: 10 * time.Second, spread: head, reconnect: true}
	plan.heads = min(plan.heads, raiseFDLimit()-plan.bodies-200)
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	b := newSlowlorisSetup(t, soakPause, head)
	var alone, control, attacked latencies
	var cpu time.Duration
	round := func(addr string, to *latencies) (cpu time.Duration) {
		a := startSlowClients(t, b.others, addr, plan)
		a.await("open", head+testTimeout)
		time.Sleep(2 * time.Second)
		before := b.router.cpu()
		to.add(b.measure(head)(), 0, math.MaxInt64)
		cpu = b.router.cpu() - before
		a.stop()
		time.Sleep(4 * time.Second) // so that their connections do not affect the next round
		return cpu
	}
	for range rounds {
		alone.add(b.measure(head)(), 0, math.MaxInt64)
		round(b.sinkProcess.addr, &control)
		cpu += round(b.router.addr, &attacked)
	}
	reportFigure(t, 2, "%d slow clients who come back when they are cut, after %v each: %s; the router takes %.0f %% of a core",
		plan.heads+plan.bodies, head, b.report(rounds, &attacked, &control, &alone), 100*cpu.Seconds()/(head.Seconds()*float64(rounds)))
}

// slowlorisSetup has a router on a core of its own, if there are two cores, and on the others a
// well-behaved client and a server that accepts and reads nothing.
type slowlorisSetup struct {
	router, sinkProcess *process
	others              int // the core of all but the router
	where               string
	client              *fastClient
	pause               time.Duration // between two of its requests
}

// report compares a page's p99 under attack with the p99 without.
func (b *slowlorisSetup) report(rounds int, attacked, control, alone *latencies) string {
	return fmt.Sprintf("a page's p99 meanwhile, the router on %s, of %d answers in %d rounds: %v; "+
		"while as many attack a server that reads nothing %v (%s), with no attack %v (%s)",
		b.where, attacked.n, rounds, attacked, control, attacked.comparedTo(control), alone, attacked.comparedTo(alone))
}

// soakPause is the pause between two requests in a long run: 2,000 requests a second, a sixth of
// the capacity of the router's core.
const soakPause = 500 * time.Microsecond

// newSlowlorisSetup starts the processes. The control server closes connections after the given
// time.
func newSlowlorisSetup(t *testing.T, pause, cutAfter time.Duration) *slowlorisSetup {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // an engine that gets no requests
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	b := &slowlorisSetup{others: anyCore, where: "the cores of all", pause: pause}
	own := anyCore
	if cores := availableCores(t); len(cores) > 1 {
		own, b.others, b.where = cores[0], cores[1], "a core of its own"
		startProcess(t, own, awakeRole+"=1")
		startProcess(t, b.others, awakeRole+"=1")
	}
	b.router, _ = startProcess(t, own, routerRole+"="+ln.Addr().String(), routerPriority+"=1")
	b.sinkProcess, _ = startProcess(t, b.others, sinkRole+"="+cutAfter.String())
	b.client = startFastClient(t, b.others, b.router.addr)
	b.measure(500 * time.Millisecond)()
	return b
}

// measure makes the well-behaved client send requests for a time.
func (b *slowlorisSetup) measure(span time.Duration) (wait func() []sample) {
	return b.client.begin(span, b.pause)
}

// latencies has the 99th percentiles of rounds and the number of their samples.
type latencies struct {
	p99 []time.Duration
	n   int
}

// add adds a round: the requests between two times.
func (a *latencies) add(s []sample, from, to int64) {
	var took []int64
	for i := range s {
		if s[i].At >= from && s[i].At < to {
			took = append(took, s[i].Took)
		}
	}
	if len(took) == 0 {
		return
	}
	slices.Sort(took)
	a.p99 = append(a.p99, time.Duration(took[len(took)*99/100]))
	a.n += len(took)
}

func (a *latencies) median() time.Duration {
	if len(a.p99) == 0 {
		return 0
	}
	return medianOf(a.p99)
}

func medianOf[T cmp.Ordered](all []T) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// ratios returns the ratios of its rounds to those of other, which alternated with them, because
// the machine's speed changes from minute to minute.
func (a *latencies) ratios(other *latencies) (all []float64) {
	for i := range min(len(a.p99), len(other.p99)) {
		all = append(all, float64(a.p99[i])/float64(other.p99[i]))
	}
	return all
}

// over returns the median of its ratios to other.
func (a *latencies) over(other *latencies) float64 {
	if all := a.ratios(other); len(all) > 0 {
		return medianOf(all)
	}
	return math.NaN()
}

// comparedTo returns the median and the range of its ratios to other.
func (a *latencies) comparedTo(other *latencies) string {
	more := func(ratio float64) string { return fmt.Sprintf("%+.0f %%", 100*(ratio-1)) }
	all := a.ratios(other)
	if len(all) < 2 {
		return more(a.over(other))
	}
	return fmt.Sprintf("%s, in a round %s to %s", more(medianOf(all)), more(slices.Min(all)), more(slices.Max(all)))
}

// String returns the median of the rounds and their range.
func (a *latencies) String() string {
	m := a.median().Round(time.Microsecond)
	if len(a.p99) < 2 {
		return m.String()
	}
	return fmt.Sprintf("%v (%v to %v)", m, slices.Min(a.p99).Round(time.Microsecond), slices.Max(a.p99).Round(time.Microsecond))
}
