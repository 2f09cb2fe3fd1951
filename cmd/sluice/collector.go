package main

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// A heap in use of leanFrom and more is kept lean: it may grow by half before it is
	// collected again, not to twice its size, which is what Go does by itself. That room
	// is memory for nothing where thousands of streams or a large index are held, which
	// make little garbage. A small heap is collected often enough as it is, and twice as
	// often would be seen in the price of a request.
	leanFrom = 24 << 20
	// leanUntil is where that ends again.
	leanUntil = 16 << 20
	// leanHeld of memory taken from the system, stacks included, is what makes a
	// collection in a quiet moment worth its price.
	leanHeld = 48 << 20
	// roomy and lean are how much it may grow, in percent (GOGC).
	roomy, lean = 100, 50
	// leanEvery is how often it is looked at.
	leanEvery = 5 * time.Second
)

// collector decides what keepLean does.
type collector struct {
	percent int
	cycles  uint64 // collections at the last look
	last    uint64 // with the one that was asked for last; 0: none
}

// look takes in how many collections there were, what the last one found in use, and
// what is held of the system's memory. quiet says that one is to be asked for: thousands
// of streams that came at once have left what served their heads, and while they run
// hardly anything is allocated that would make Go look before its two minutes are over.
// It is asked for once behind each collection of Go's own at the most.
func (c *collector) look(cycles, live, held uint64) (quiet bool) {
	switch {
	case live >= leanFrom:
		c.percent = lean
	case live < leanUntil:
		c.percent = roomy
	}
	quiet = held >= leanHeld && cycles == c.cycles && cycles != c.last
	c.cycles = cycles
	return quiet
}

// asked notes that a collection was asked for and is over.
func (c *collector) asked(cycles uint64) { c.cycles, c.last = cycles, cycles }

// keepLean sets the collector by what is in use until ctx ends. What GOGC or GOMEMLIMIT
// say in the environment is left as it is.
func keepLean(ctx context.Context) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	tick := time.NewTicker(leanEvery)
	defer tick.Stop()
	told := []metrics.Sample{{Name: "/gc/cycles/total:gc-cycles"}, {Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	c := collector{percent: roomy}
	for now := roomy; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		metrics.Read(told)
		for i := range told {
			if told[i].Value.Kind() != metrics.KindUint64 {
				return // a Go that does not tell
			}
		}
		quiet := c.look(told[0].Value.Uint64(), told[1].Value.Uint64(), told[2].Value.Uint64()-told[3].Value.Uint64())
		if c.percent != now { // to set it stops the world for a moment
			debug.SetGCPercent(c.percent)
			now = c.percent
		}
		if quiet {
			runtime.GC()
			runtime.GC() // pools let go of what lies in them at the second one
			metrics.Read(told)
			c.asked(told[0].Value.Uint64())
		}
	}
}
