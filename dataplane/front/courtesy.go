package front

import (
	"runtime"
	"time"
)

const (
	// inARow connections are accepted, or cut, and then who waits for something that has
	// come goes first. With all of them in a row, requests waited 30 ms where 11,000
	// clients came at once; with 4, half a millisecond (TestSlowloris as a soak).
	inARow = 4
	// busy is when those who went first took so long that the processors have more to do
	// than there is time: with a few goroutines that compute, each wait is for 10 ms of
	// every one of them. Then as long is the polite one's own, but for ownMost at the most,
	// which is what Go gives anybody in a row.
	busy    = time.Millisecond
	ownMost = 10 * time.Millisecond
)

// courtesy is how a goroutine that always finds more to do, with others' connections,
// has requests go first: those that can run, and each inARow times those for which
// something has come, too. For the latter Go looks by itself once nobody can run, or each
// 10 ms: where it has one processor, a request that came behind a thousand connections
// waited for all of them. It is one goroutine's; the zero value has no bell.
type courtesy struct {
	bell bell
	row  int
	own  time.Time // until then nobody goes first
}

// giveWay is called between one piece of work and the next.
func (y *courtesy) giveWay() {
	began := time.Now()
	if began.Before(y.own) {
		return
	}
	if y.row++; y.row < inARow {
		runtime.Gosched()
	} else {
		y.row = 0
		y.bell.hear()
	}
	if now := time.Now(); now.Sub(began) > busy {
		y.own = now.Add(min(now.Sub(began), ownMost))
	}
}
