package disagg

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// lateAnswer keeps a prefill leg going for a while after its client has left.
//
// A prefill engine pins the blocks of a prompt when its core has finished it. Its API
// server answers a moment later, and that answer is the only thing that names the blocks.
// A server that sees the end of the connection in between drops the answer: the blocks
// stay pinned until the lease ends, and nobody can release them. So the router waits for
// the answer and releases the blocks with it (see giveBack).
//
// The wait is bounded, because a prefill that has not begun should not run for nobody.
// Beyond the bound the leg is hung up: what is pinned in that very moment is lost to the
// lease, which is rare, because the bound is not related to the engine's end.
type lateAnswer struct {
	call        *upstream.Call
	reservation *schedule.Reservation

	begin func()      // clientGone, made once
	timer *time.Timer // hangs the call up; nil until the client has left
	told  atomic.Bool // clientGone was called
}

const (
	// answerWithin is how long a prefill leg goes on at least for a client that has left.
	answerWithin = time.Second
	// answerSoon is the most time that a prefill is expected to need from then on, for
	// which the wait is extended.
	answerSoon = 2 * time.Second
)

// clientGone is called when the client has left, and returns at once.
func (l *lateAnswer) clientGone() {
	l.told.Store(true)
	if !l.call.Sent() {
		l.call.HangUp()
		return
	}
	wait := answerWithin
	if rest := l.reservation.Remaining(); rest > 0 && rest <= answerSoon {
		wait += rest
	}
	l.timer = time.AfterFunc(wait, l.call.HangUp)
}

// wasTold says that the client has left during the leg. A nil lateAnswer takes it.
func (l *lateAnswer) wasTold() bool { return l != nil && l.told.Load() }

// untilAnswered has the prefill leg answer for a client that leaves; see lateAnswer. It is
// ended by answerCame.
func (q *request) untilAnswered(call *upstream.Call, res *schedule.Reservation) {
	if q.answers == nil {
		q.answers = new(lateAnswer)
		q.answers.begin = q.answers.clientGone
	}
	q.answers.call, q.answers.reservation = call, res
	q.x.OnGone(q.answers.begin)
}

// answerCame ends untilAnswered and says whether the client has left meanwhile.
func (q *request) answerCame() (left bool) {
	q.x.OnGone(nil)
	l := q.answers
	if !l.wasTold() {
		return false
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	q.call, q.answers = nil, nil // the timer may be at work with them
	return true
}
