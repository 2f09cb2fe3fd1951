//go:build race || invariants

package kvindex

import (
	"math/rand/v2"
	"runtime"
	"sync/atomic"
)

// invariants: writers check the whole of a small index now and then.
const invariants = true

// jitters is how often, of so many times, a reader or a writer lets others go first
// in the middle of its work; 0 is never. Tests set it.
var jitters atomic.Uint32

func jitter() {
	if n := jitters.Load(); n > 0 && rand.Uint32N(n) == 0 {
		runtime.Gosched()
	}
}
