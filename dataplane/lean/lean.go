package lean

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// A heap in use of tightFrom and more is kept tight: it may grow by half before it is
	// collected again, not to twice its size, which is what Go does by itself. That room
	// is memory for nothing where thousands of streams or a large index are held, which
	// make little garbage. A small heap is collected often enough as it is, and twice as
	// often would be seen in the price of a request.
	tightFrom = 24 << 20
	// tightUntil is where that ends again.
	tightUntil = 16 << 20
	// roomy and tight are how much it may grow, in percent (GOGC).
	roomy, tight = 100, 50

	// held of memory taken from the system, stacks included, is what makes a
	// collection in a quiet moment worth its price, and made of new objects since
	// the one before, or ended goroutines: without either there is nothing to find.
	held, made, ended = 24 << 20, 8 << 20, 256
	// calm looks in a row without a collection of Go's own are a quiet moment.
	calm = 3
	// late looks behind a collection that was asked for comes another: connections that
	// were kept for use again have ended meanwhile, which neither makes objects nor ends
	// goroutines.
	late = 15
	// share is how many times as long as one took none is asked for behind it: of a large
	// heap it takes long, and 8 MiB are made in a moment where there is traffic.
	share = 100
	// every is how often it is looked at.
	every = time.Second
	// idleLooks is how many looks lie between two calls of Options.Idle.
	idleLooks = 3
)

// Options of Keep.
type Options struct {
	// Percent is how much a small heap may grow before it is collected (GOGC); 0: 100.
	Percent int
	// Idle is called every few seconds, to let go of memory outside of Go's heap that
	// nobody has used meanwhile; nil: there is none. It is called whatever the
	// environment says of Go's collector.
	Idle func()
}

// sample is what one look finds.
type sample struct {
	cycles     uint64 // collections so far
	live       uint64 // bytes that the last of them found in use
	held       uint64 // bytes of the system's memory
	made       uint64 // bytes of objects made so far
	goroutines uint64
}

// collector decides what Keep does.
type collector struct {
	percent int
	small   int    // percent of a small heap
	before  sample // the last look's
	calm    int    // looks since Go has collected
	asked   sample // when a collection was asked for last
	later   int    // looks until it is asked for once more; 0: it is not
	rest    int    // looks until one may be asked for at all
}

// look takes a sample in. quiet says that a collection is to be asked for: thousands
// of streams that came at once have left what served their heads, and while they run
// hardly anything is allocated that would make Go look before its two minutes are over.
func (c *collector) look(s sample) (quiet bool) {
	switch {
	case s.live >= tightFrom:
		c.percent = tight
	case s.live < tightUntil:
		c.percent = c.small
	}
	if c.calm++; s.cycles != c.before.cycles {
		c.calm = 0
	}
	// What has ended since is counted from the most there were.
	c.asked.goroutines = max(c.asked.goroutines, s.goroutines)
	c.before = s
	if c.later > 1 {
		c.later--
	}
	if c.rest > 0 {
		c.rest--
	}
	if c.calm < calm || c.rest > 0 || s.held < held {
		return false
	}
	if s.made-c.asked.made >= made || c.asked.goroutines-s.goroutines >= ended {
		c.later = late + 1
		return true
	}
	if c.later == 1 {
		c.later = 0
		return true
	}
	return false
}

// collected notes that a collection was asked for and is over.
func (c *collector) collected(s sample) { c.before, c.asked, c.calm = s, s, 0 }

// source reads samples.
type source []metrics.Sample

func newSource() source {
	return source{
		{Name: "/gc/cycles/total:gc-cycles"}, {Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/allocs:bytes"}, {Name: "/sched/goroutines:goroutines"},
	}
}

// read is not ok with a Go that does not tell.
func (m source) read() (s sample, ok bool) {
	metrics.Read(m)
	for i := range m {
		if m[i].Value.Kind() != metrics.KindUint64 {
			return s, false
		}
	}
	return sample{
		cycles: m[0].Value.Uint64(), live: m[1].Value.Uint64(), held: m[2].Value.Uint64() - m[3].Value.Uint64(),
		made: m[4].Value.Uint64(), goroutines: m[5].Value.Uint64(),
	}, true
}

// Keep sets the collector by what is in use until ctx ends, and calls opt.Idle. The
// collector is left as it is where GOGC or GOMEMLIMIT say something in the environment.
func Keep(ctx context.Context, opt Options) {
	small := opt.Percent
	if small <= 0 {
		small = roomy
	}
	adjusts := os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == ""
	if adjusts && small != roomy {
		debug.SetGCPercent(small)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	c, from := collector{percent: small, small: small}, newSource()
	for now, looks := small, 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if looks++; opt.Idle != nil && looks%idleLooks == 0 {
			opt.Idle()
		}
		if !adjusts {
			continue
		}
		s, ok := from.read()
		if !ok {
			adjusts = false
			continue
		}
		quiet := c.look(s)
		if c.percent != now { // to set it stops the world for a moment
			debug.SetGCPercent(c.percent)
			now = c.percent
		}
		if quiet {
			// Pools let go of what lies in them at the second collection, which is the
			// one that gives what is free back.
			began := time.Now()
			runtime.GC()
			debug.FreeOSMemory()
			c.rest = min(int(share*time.Since(began)/every), 300)
			if s, ok = from.read(); ok {
				c.collected(s)
			}
		}
	}
}
