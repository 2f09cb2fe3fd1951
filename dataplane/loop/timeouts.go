package loop

import (
	"time"

	"sluice/dataplane/sock"
)

// checkAt has check run at the given time, or untilSlack from now where that is later.
func (l *Loop) checkAt(t time.Time) {
	wait := max(t.Sub(l.now), min(untilSlack, l.tick))
	l.next = l.now.Add(wait)
	l.timer.Reset(wait)
}

// endWithin has t last no longer than most from now.
func (l *Loop) endWithin(t *Task, most time.Duration) {
	until := at(l.now) + instant(most)
	if t.until != 0 && t.until <= until {
		return
	}
	t.until = until
	if by := epoch.Add(time.Duration(until)); by.Before(l.next) {
		l.checkAt(by)
	}
}

// check looks, once a tick and when a task's time is over, for those that wait too long.
func (l *Loop) check() {
	if late := l.now.Sub(l.next); late > heldUpBy {
		l.grant(late)
		if l.onHeld != nil {
			l.onHeld(late)
		}
	}
	now, next := at(l.now), l.now.Add(l.tick)
	for _, t := range l.tasks {
		switch {
		case t == nil || t.state != inside:
		case t.slow != nil && l.stalled(t, now):
			l.leave(t, SendStalled, nil)
		case t.until != 0 && now >= t.until:
			l.leave(t, ReadLate, nil)
		case t.Idle > 0 && !t.paused && time.Duration(now-t.lastIn) >= t.Idle:
			l.leave(t, ReadIdle, nil)
		case t.until != 0 && t.until < at(next):
			next = epoch.Add(time.Duration(t.until))
		}
	}
	if l.count > 0 { // else the timer is stopped
		l.checkAt(next)
	}
}

// grant gives all tasks the time for which the loop was held up: the process was stopped,
// the machine paused, or its cores were others'. What came meanwhile has not been looked
// at yet, and what was due on a network that stood still as well comes only now.
func (l *Loop) grant(late time.Duration) {
	now := at(l.now)
	for _, t := range l.tasks {
		if t == nil || t.state != inside {
			continue
		}
		t.lastIn = min(now, t.lastIn+instant(late))
		if t.slow != nil {
			t.slow.blocked = min(now, t.slow.blocked+instant(late))
		}
	}
}

// stalled says whether Out has taken next to nothing for WriteTimeout. A socket is not
// writable again before a third of what may be megabytes has been taken, so that alone
// would call a client stalled that reads slowly: what is in the socket is looked at too.
func (l *Loop) stalled(t *Task, now instant) bool {
	s, unsent := t.slow, sock.Unsent(t.Out)
	if s.unsent < 0 || unsent <= s.unsent-MinProgress {
		s.unsent, s.blocked = unsent, now
	}
	return time.Duration(now-s.blocked) >= t.WriteTimeout
}
