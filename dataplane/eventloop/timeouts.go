package eventloop

import (
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/rawsocket"
)

// checkAt schedules check at t, or deadlineSlack from now if that is later.
func (l *Loop) checkAt(t time.Time) {
	wait := max(t.Sub(l.now), min(deadlineSlack, l.tick))
	l.nextCheck = l.now.Add(wait)
	l.timer.Reset(wait)
}

// endWithin bounds the rest of t's life by most.
func (l *Loop) endWithin(t *Task, most time.Duration) {
	until := monotime.Of(l.now) + monotime.Time(most)
	if t.deadline != 0 && t.deadline <= until {
		return
	}
	t.deadline = until
	if by := until.Time(); by.Before(l.nextCheck) {
		l.checkAt(by)
	}
}

// check finds tasks that have waited for too long. It runs once per tick and at deadlines.
func (l *Loop) check() {
	if late := l.now.Sub(l.nextCheck); late > starvedAfter {
		l.extendDeadlines(late)
		if l.onStarved != nil {
			l.onStarved(late)
		}
	}
	now, next := monotime.Of(l.now), l.now.Add(l.tick)
	for _, t := range l.tasks {
		switch {
		case t == nil || t.state != taskAttached:
		case t.unsent != nil && l.stalled(t, now):
			l.endTask(t, SendStalled, nil)
		case t.deadline != 0 && now >= t.deadline:
			l.endTask(t, DeadlineExceeded, nil)
		case t.Idle > 0 && !t.paused && time.Duration(now-t.lastIn) >= t.Idle:
			l.endTask(t, ReadIdle, nil)
		case t.deadline != 0 && t.deadline < monotime.Of(next):
			next = t.deadline.Time()
		}
	}
	if l.count > 0 { // else the timer is stopped
		l.checkAt(next)
	}
}

// extendDeadlines extends the timeouts of all tasks by the time for which the loop was delayed:
// the process was stopped, the machine paused, or others used its cores. Bytes that came meanwhile
// have not been read, and peers may have been delayed too.
func (l *Loop) extendDeadlines(late time.Duration) {
	now := monotime.Of(l.now)
	for _, t := range l.tasks {
		if t == nil || t.state != taskAttached {
			continue
		}
		t.lastIn = min(now, t.lastIn+monotime.Time(late))
		if t.unsent != nil {
			t.unsent.stalledSince = min(now, t.unsent.stalledSince+monotime.Time(late))
		}
	}
}

// stalled reports whether Out has accepted next to nothing for WriteTimeout. A socket becomes
// writable only when a third of its buffer, which may be megabytes, is free. To distinguish a slow
// client from a stalled one, the bytes in the socket are checked too.
func (l *Loop) stalled(t *Task, now monotime.Time) bool {
	s, unsent := t.unsent, rawsocket.Unsent(t.Out)
	if s.socketUnsent < 0 || unsent <= s.socketUnsent-MinProgress {
		s.socketUnsent, s.stalledSince = unsent, now
	}
	return time.Duration(now-s.stalledSince) >= t.WriteTimeout
}
