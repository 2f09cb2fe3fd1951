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
)

// TestSlowloris is number 2 of RELIABILITY.md: clients that send a head byte by byte, and
// clients that announce 60 MB and stop, in their thousands, beside one that asks for a page.
//
// The router has a core of its own, the good client shares the other with the attackers;
// both go before whatever else the machine does, the attackers behind it. What they cost it
// there is no matter of the router's, so they attack a server that reads nothing as well,
// which is the control; and the rounds, nobody, the control, the router, alternate, for what
// a machine gives is not the same in each minute.
func TestSlowloris(t *testing.T) {
	if testing.Short() {
		t.Skip("processes of their own, some seconds long")
	}
	plan, rounds, head, pause := attack{heads: 1000, bodies: 100, every: 300 * time.Millisecond}, 1, 3*time.Second, 2*time.Millisecond
	if os.Getenv("SLUICE_SOAK") != "" {
		plan, rounds, head, pause = attack{heads: 10_000, bodies: 1000, every: 10 * time.Second}, 8, 10*time.Second, soakPause
	}
	plan.heads = min(plan.heads, raiseFiles()-plan.bodies-200)
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	b := newBeside(t, pause, head)
	idle := b.router.rss()
	held := head - head/5
	var alone, control, attacked, joining, leaving, whole, wholeControl answers
	var opened, cutting, longest time.Duration
	full := 0
	// round has a server attacked until it has cut all heads.
	round := func(addr string) (took []sample, began, open int64, cut, last told) {
		began = time.Now().UnixNano()
		samples := b.ask(head + head/2)
		a := startAttack(t, b.others, addr, plan)
		open = a.await("open", patience).at
		time.Sleep(head / 2)
		if addr == b.router.addr {
			full = max(full, b.router.rss())
		}
		cut, last = a.await("cut", head+patience), a.await("heads", patience)
		took = samples()
		a.end()
		time.Sleep(time.Second) // what they leave is not the next round's
		return took, began, open, cut, last
	}
	for range rounds {
		alone.add(b.ask(held)(), 0, math.MaxInt64)

		took, began, open, cut, last := round(b.sink.addr)
		control.add(took, open, min(cut.at, open+int64(held)))
		wholeControl.add(took, began, last.at)

		took, began, open, cut, last = round(b.router.addr)
		joining.add(took, began, open)
		attacked.add(took, open, min(cut.at, open+int64(held)))
		leaving.add(took, cut.at, last.at)
		whole.add(took, began, last.at)
		opened, cutting = max(opened, time.Duration(open-began)), max(cutting, time.Duration(last.at-cut.at))
		longest = max(longest, last.took)
	}
	if most := 150 << 10; full-idle > most && !raceOn {
		t.Errorf("%d KiB more than idle, want at most %d", full-idle, most)
	}
	if rounds > 1 {
		if attacked.over(&control) > 1.1 {
			t.Errorf("a page's p99 is %v under attack, %v while another server is attacked", &attacked, &control)
		}
		// That of a goroutine that accepts all that come in a row is 30 ms.
		if most := 5 * time.Millisecond; joining.median() > most {
			t.Errorf("a page's p99 is %v while they connect, want at most %v", &joining, most)
		}
	}
	if longest > head+patience {
		t.Errorf("a head was waited for %v", longest)
	}
	figure(t, 2, "%d heads of a byte each %v and %d bodies that stopped of 60 MB announced: "+
		"%d MiB more than the idle router's %d; all heads cut, the last %v after its beginning (limit %v)",
		plan.heads, plan.every, plan.bodies, (full-idle)>>10, idle>>10, longest.Round(10*time.Millisecond), head)
	figure(t, 2, "%s; while they connect (%v) %v, while they are cut (%v) %v; from the first that connects to the last cut %v, the other server's %v (%s)",
		b.say(rounds, &attacked, &control, &alone), opened.Round(10*time.Millisecond), &joining, cutting.Round(10*time.Millisecond), &leaving,
		&whole, &wholeControl, whole.comparedTo(&wholeControl))
}

// TestSlowlorisSteady is the same with attackers who come back when they are cut: a
// thousand connections a second are opened and cut.
func TestSlowlorisSteady(t *testing.T) {
	if os.Getenv("SLUICE_SOAK") == "" {
		t.Skip("minutes; SLUICE_SOAK=1")
	}
	head, rounds := 10*time.Second, 6
	plan := attack{heads: 10_000, bodies: 1000, every: 10 * time.Second, spread: head, again: true}
	plan.heads = min(plan.heads, raiseFiles()-plan.bodies-200)
	t.Setenv("SLUICE_TEST_HEAD", head.String())
	b := newBeside(t, soakPause, head)
	var alone, control, attacked answers
	var cpu time.Duration
	round := func(addr string, to *answers) (cpu time.Duration) {
		a := startAttack(t, b.others, addr, plan)
		a.await("open", head+patience)
		time.Sleep(2 * time.Second)
		before := b.router.cpu()
		to.add(b.ask(head)(), 0, math.MaxInt64)
		cpu = b.router.cpu() - before
		a.end()
		time.Sleep(4 * time.Second) // what they leave is not the next round's
		return cpu
	}
	for range rounds {
		alone.add(b.ask(head)(), 0, math.MaxInt64)
		round(b.sink.addr, &control)
		cpu += round(b.router.addr, &attacked)
	}
	figure(t, 2, "%d slow clients who come back when they are cut, after %v each: %s; the router takes %.0f %% of a core",
		plan.heads+plan.bodies, head, b.say(rounds, &attacked, &control, &alone), 100*cpu.Seconds()/(head.Seconds()*float64(rounds)))
}

// beside is a router on a core of its own where there are two, and on the others a good
// client and a server that accepts and reads nothing.
type beside struct {
	router, sink *process
	others       int // the core of all but the router
	where        string
	good         *goodClient
	pause        time.Duration // between two of its requests
}

// say compares a page's p99 under attack with what it is without.
func (b *beside) say(rounds int, attacked, control, alone *answers) string {
	return fmt.Sprintf("a page's p99 meanwhile, the router on %s, of %d answers in %d rounds: %v; "+
		"while as many attack a server that reads nothing %v (%s), with no attack %v (%s)",
		b.where, attacked.n, rounds, attacked, control, attacked.comparedTo(control), alone, attacked.comparedTo(alone))
}

// soakPause is that of a long run: 2,000 requests a second, a sixth of what the router's
// core could answer.
const soakPause = 500 * time.Microsecond

// newBeside starts them; the other server cuts after so long.
func newBeside(t *testing.T, pause, cutAfter time.Duration) *beside {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // an engine that nobody will need
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	b := &beside{others: anyCore, where: "the cores of all", pause: pause}
	own := anyCore
	if cores := coresHere(t); len(cores) > 1 {
		own, b.others, b.where = cores[0], cores[1], "a core of its own"
		launch(t, own, awakeOn+"=1")
		launch(t, b.others, awakeOn+"=1")
	}
	b.router, _ = launch(t, own, routerFor+"="+ln.Addr().String(), routerFirst+"=1")
	b.sink, _ = launch(t, b.others, sinkOf+"="+cutAfter.String())
	b.good = startGood(t, b.others, b.router.addr)
	b.ask(500 * time.Millisecond)()
	return b
}

// ask has the good client ask for so long.
func (b *beside) ask(span time.Duration) (wait func() []sample) {
	return b.good.begin(span, b.pause)
}

// answers are the 99th percentiles of rounds, and of how many samples they are.
type answers struct {
	p99 []time.Duration
	n   int
}

// add takes a round in: what was asked for from one time to the other.
func (a *answers) add(s []sample, from, to int64) {
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

func (a *answers) median() time.Duration {
	if len(a.p99) == 0 {
		return 0
	}
	return medianOf(a.p99)
}

func medianOf[T cmp.Ordered](all []T) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// ratios are what its rounds are to those of other, which were taken by turns with them:
// what the machine gives changes from minute to minute.
func (a *answers) ratios(other *answers) (all []float64) {
	for i := range min(len(a.p99), len(other.p99)) {
		all = append(all, float64(a.p99[i])/float64(other.p99[i]))
	}
	return all
}

// over is the median of its ratios to other.
func (a *answers) over(other *answers) float64 {
	if all := a.ratios(other); len(all) > 0 {
		return medianOf(all)
	}
	return math.NaN()
}

// comparedTo is the median of its ratios to other, and between which they lie.
func (a *answers) comparedTo(other *answers) string {
	more := func(ratio float64) string { return fmt.Sprintf("%+.0f %%", 100*(ratio-1)) }
	all := a.ratios(other)
	if len(all) < 2 {
		return more(a.over(other))
	}
	return fmt.Sprintf("%s, in a round %s to %s", more(medianOf(all)), more(slices.Min(all)), more(slices.Max(all)))
}

// String is the median of the rounds, and between which it lies.
func (a *answers) String() string {
	m := a.median().Round(time.Microsecond)
	if len(a.p99) < 2 {
		return m.String()
	}
	return fmt.Sprintf("%v (%v to %v)", m, slices.Min(a.p99).Round(time.Microsecond), slices.Max(a.p99).Round(time.Microsecond))
}
