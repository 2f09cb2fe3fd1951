package eventloop

import (
	"time"

	"sluice/dataplane/rawsocket"
)

// checkAt has check run at the given time, or deadlineSlack from now where that is later.
func (l *Loop) checkAt(t time.Time) {
	wait := max(t.Sub(l.now), min(deadlineSlack, l.tick))
	l.nextCheck = l.now.Add(wait)
	l.timer.Reset(wait)
}

// endWithin has t last no longer than most from now.
func (l *Loop) endWithin(t *Task, most time.Duration) {
	until := monoTimeOf(l.now) + monoTime(most)
	if t.deadline != 0 && t.deadline <= until {
		return
	}
	t.deadline = until
	if by := epoch.Add(time.Duration(until)); by.Before(l.nextCheck) {
		l.checkAt(by)
	}
}

// check looks, once a tick and when a task's time is over, for those that wait too long.
func (l *Loop) check() {
	if late := l.now.Sub(l.nextCheck); late > starvedAfter {
		l.extendDeadlines(late)
		if l.onStarved != nil {
			l.onStarved(late)
		}
	}
	now, next := monoTimeOf(l.now), l.now.Add(l.tick)
	for _, t := range l.tasks {
		switch {
		case t == nil || t.state != taskAttached:
		case t.unsent != nil && l.stalled(t, now):
			l.endTask(t, SendStalled, nil)
		case t.deadline != 0 && now >= t.deadline:
			l.endTask(t, DeadlineExceeded, nil)
		case t.Idle > 0 && !t.paused && time.Duration(now-t.lastIn) >= t.Idle:
			l.endTask(t, ReadIdle, nil)
		case t.deadline != 0 && t.deadline < monoTimeOf(next):
			next = epoch.Add(time.Duration(t.deadline))
		}
	}
	if l.count > 0 { // else the timer is stopped
		l.checkAt(next)
	}
}

// extendDeadlines gives all tasks the time for which the loop was held up: the process was stopped,
// the machine paused, or its cores were others'. What came meanwhile has not been looked
// at yet, and what was due on a network that stood still as well comes only now.
func (l *Loop) extendDeadlines(late time.Duration) {
	now := monoTimeOf(l.now)
	for _, t := range l.tasks {
		if t == nil || t.state != taskAttached {
			continue
		}
		t.lastIn = min(now, t.lastIn+monoTime(late))
		if t.unsent != nil {
			t.unsent.stalledSince = min(now, t.unsent.stalledSince+monoTime(late))
		}
	}
}

// stalled says whether Out has taken next to nothing for WriteTimeout. A socket is not
// writable again before a third of what may be megabytes has been taken, so that alone
// would call a client stalled that reads slowly: what is in the socket is looked at too.
func (l *Loop) stalled(t *Task, now monoTime) bool {
	s, unsent := t.unsent, rawsocket.Unsent(t.Out)
	if s.socketUnsent < 0 || unsent <= s.socketUnsent-MinProgress {
		s.socketUnsent, s.stalledSince = unsent, now
	}
	return time.Duration(now-s.stalledSince) >= t.WriteTimeout
}
