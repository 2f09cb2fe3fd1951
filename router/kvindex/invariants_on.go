//go:build race || invariants

package kvindex

import (
	"math/rand/v2"
	"runtime"
	"sync/atomic"
)

// invariants: writers verify a small index from time to time.
const invariants = true

// jitters is how many of a number of steps a reader or writer yields in the middle of its work; 0
// is never. Tests set it.
var jitters atomic.Uint32

func jitter() {
	if n := jitters.Load(); n > 0 && rand.Uint32N(n) == 0 {
		runtime.Gosched()
	}
}
