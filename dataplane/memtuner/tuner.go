package memtuner

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// A heap in use of largeHeapMin and more is kept tight: it may grow by half before it is
	// collected again, not to twice its size, which is what Go does by itself. That room
	// is memory for nothing where thousands of streams or a large index are held, which
	// make little garbage. A small heap is collected often enough as it is, and twice as
	// often would be seen in the price of a request.
	largeHeapMin = 24 << 20
	// largeHeapExit is where that ends again.
	largeHeapExit = 16 << 20
	// defaultPercent and tight are how much it may grow, in percent (GOGC).
	defaultPercent, largeHeapPercent = 100, 50

	// minSystemMemory of memory taken from the system, stacks included, is what makes a
	// collection in a quiet moment worth its price, and made of new objects since
	// the one before, or ended goroutines: without either there is nothing to find.
	minSystemMemory, minAllocated, minEndedGoroutines = 24 << 20, 8 << 20, 256
	// quietSamples looks in a row without a collection of Go's own are a quiet moment.
	quietSamples = 3
	// secondCollectAfter looks behind a collection that was asked for comes another: connections that
	// were kept for use again have ended meanwhile, which neither makes objects nor ends
	// goroutines.
	secondCollectAfter = 15
	// maxCollectShare is how many times as long as one took none is asked for behind it: of a large
	// heap it takes long, and 8 MiB are made in a moment where there is traffic.
	maxCollectShare = 100
	// sampleInterval is how often it is looked at.
	sampleInterval = time.Second
	// samplesPerIdle is how many looks lie between two calls of Options.Idle.
	samplesPerIdle = 3
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
	cycles       uint64 // collections so far
	live         uint64 // bytes that the last of them found in use
	systemMemory uint64 // bytes of the system's memory
	allocated    uint64 // bytes of objects made so far
	goroutines   uint64
}

// tuner decides what Keep does.
type tuner struct {
	percent          int
	smallHeapPercent int    // percent of a small heap
	previous         sample // the last look's
	quiet            int    // looks since Go has collected
	atCollection     sample // when a collection was asked for last
	secondCollect    int    // looks until it is asked for once more; 0: it is not
	backOff          int    // looks until one may be asked for at all
}

// observe takes a sample in. quiet says that a collection is to be asked for: thousands
// of streams that came at once have left what served their heads, and while they run
// hardly anything is allocated that would make Go look before its two minutes are over.
func (c *tuner) observe(s sample) (collect bool) {
	switch {
	case s.live >= largeHeapMin:
		c.percent = largeHeapPercent
	case s.live < largeHeapExit:
		c.percent = c.smallHeapPercent
	}
	if c.quiet++; s.cycles != c.previous.cycles {
		c.quiet = 0
	}
	// What has ended since is counted from the most there were.
	c.atCollection.goroutines = max(c.atCollection.goroutines, s.goroutines)
	c.previous = s
	if c.secondCollect > 1 {
		c.secondCollect--
	}
	if c.backOff > 0 {
		c.backOff--
	}
	if c.quiet < quietSamples || c.backOff > 0 || s.systemMemory < minSystemMemory {
		return false
	}
	if s.allocated-c.atCollection.allocated >= minAllocated || c.atCollection.goroutines-s.goroutines >= minEndedGoroutines {
		c.secondCollect = secondCollectAfter + 1
		return true
	}
	if c.secondCollect == 1 {
		c.secondCollect = 0
		return true
	}
	return false
}

// collected notes that a collection was asked for and is over.
func (c *tuner) collected(s sample) { c.previous, c.atCollection, c.quiet = s, s, 0 }

// metricsReader reads samples.
type metricsReader []metrics.Sample

func newMetricsReader() metricsReader {
	return metricsReader{
		{Name: "/gc/cycles/total:gc-cycles"}, {Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/allocs:bytes"}, {Name: "/sched/goroutines:goroutines"},
	}
}

// read is not ok with a Go that does not tell.
func (m metricsReader) read() (s sample, ok bool) {
	metrics.Read(m)
	for i := range m {
		if m[i].Value.Kind() != metrics.KindUint64 {
			return s, false
		}
	}
	return sample{
		cycles: m[0].Value.Uint64(), live: m[1].Value.Uint64(), systemMemory: m[2].Value.Uint64() - m[3].Value.Uint64(),
		allocated: m[4].Value.Uint64(), goroutines: m[5].Value.Uint64(),
	}, true
}

// Run sets the collector by what is in use until ctx ends, and calls opt.Idle. The
// collector is left as it is where GOGC or GOMEMLIMIT say something in the environment.
func Run(ctx context.Context, opt Options) {
	small := opt.Percent
	if small <= 0 {
		small = defaultPercent
	}
	adjusts := os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == ""
	if adjusts && small != defaultPercent {
		debug.SetGCPercent(small)
	}
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	c, from := tuner{percent: small, smallHeapPercent: small}, newMetricsReader()
	for now, looks := small, 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if looks++; opt.Idle != nil && looks%samplesPerIdle == 0 {
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
		quiet := c.observe(s)
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
			c.backOff = min(int(maxCollectShare*time.Since(began)/sampleInterval), 300)
			if s, ok = from.read(); ok {
				c.collected(s)
			}
		}
	}
}
