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
	// A live heap of largeHeapMin bytes and more may grow by half before the next
	// collection, not to twice its size, which is Go's default: thousands of streams or a
	// large index make little garbage, so that the space would be wasted. A small heap
	// keeps the default, because twice as many collections would cost requests CPU.
	largeHeapMin = 24 << 20
	// largeHeapExit is the live heap, in bytes, under which the default applies again.
	largeHeapExit = 16 << 20
	// defaultPercent and largeHeapPercent are how much the heap may grow (GOGC).
	defaultPercent, largeHeapPercent = 100, 50

	// A collection in a quiet moment needs at least minSystemMemory bytes of memory from
	// the system, stacks included, and since the last one minAllocated bytes of new objects
	// or minEndedGoroutines goroutines that ended. Otherwise it would free nothing.
	minSystemMemory, minAllocated, minEndedGoroutines = 24 << 20, 8 << 20, 256
	// quietSamples consecutive samples without a collection by Go make a quiet moment.
	quietSamples = 3
	// secondCollectAfter samples after a collection that the tuner started follows a second one: idle pooled
	// connections have closed in between, which neither allocates nor ends goroutines.
	secondCollectAfter = 15
	// maxCollectShare times as long as a collection took, no other follows: a large heap
	// takes long to collect, and traffic allocates minAllocated in a moment.
	maxCollectShare = 100
	// sampleInterval is the time between two samples.
	sampleInterval = time.Second
	// samplesPerIdle is the number of samples between two calls of Options.Idle.
	samplesPerIdle = 3
)

// Options of Run.
type Options struct {
	// Percent is how much a small heap may grow before a collection (GOGC); 0: 100.
	Percent int
	// Idle is called every few seconds, on Run's goroutine, to release unused memory outside
	// Go's heap; may be nil. It is called whatever GOGC and GOMEMLIMIT are.
	Idle func()
}

// sample is one reading of the runtime's metrics.
type sample struct {
	cycles       uint64 // collections so far
	live         uint64 // bytes in use at the last collection
	systemMemory uint64 // bytes taken from the system
	allocated    uint64 // bytes of all objects allocated so far
	goroutines   uint64
}

// tuner decides what Run does.
type tuner struct {
	percent          int
	smallHeapPercent int    // percent of a small heap
	previous         sample // the last one
	quiet            int    // samples since the last collection
	atCollection     sample // at our last collection
	secondCollect    int    // samples until the second collection; 0: none is due
	backOff          int    // samples until a collection is allowed
}

// observe processes a sample and says whether Run should collect now. Example: a burst of
// streams leaves the objects that served their heads, and while the streams run hardly
// anything is allocated, so that Go would not collect before its two minutes are over.
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
	// Ended goroutines count from the highest number since the last collection.
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

// collected resets the tuner after a collection that it started.
func (c *tuner) collected(s sample) { c.previous, c.atCollection, c.quiet = s, s, 0 }

// metricsReader reads samples from runtime/metrics.
type metricsReader []metrics.Sample

func newMetricsReader() metricsReader {
	return metricsReader{
		{Name: "/gc/cycles/total:gc-cycles"}, {Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/allocs:bytes"}, {Name: "/sched/goroutines:goroutines"},
	}
}

// read returns false if this release of Go lacks one of the metrics.
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

// Run tunes the garbage collector and calls opt.Idle until ctx ends. It does not change the
// collector if GOGC or GOMEMLIMIT is set in the environment.
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
		if c.percent != now { // setting it stops the world briefly
			debug.SetGCPercent(c.percent)
			now = c.percent
		}
		if quiet {
			// sync.Pools free their objects at the second collection, which FreeOSMemory
			// makes.
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
