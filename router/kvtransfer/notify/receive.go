package notify

import (
	"hash/maphash"
	"time"
)

// run removes expired notifications until Close.
func (b *Listener) run() {
	defer close(b.sweepDone)
	tick := time.NewTicker(b.opt.Sweep)
	defer tick.Stop()
	for {
		select {
		case <-b.closed:
			return
		case now := <-tick.C:
			b.sweep(now)
		}
	}
}

// handleFrame processes one message on the goroutine of its connection.
func (b *Listener) handleFrame(frame []byte) {
	// A msgpack map begins with a byte of 0x80 or above, a report with a letter.
	if b.opt.Report != nil && len(frame) > 0 && frame[0] < 0x80 {
		if !b.opt.Report(frame) {
			b.malformed.Add(1)
		}
		return
	}
	switch id, what := parse(frame); what {
	case ready:
		b.addNotification(id)
	case otherType:
		b.otherType.Add(1)
	default:
		b.malformed.Add(1)
	}
}

// addNotification counts one notification toward its id.
func (b *Listener) addNotification(id []byte) {
	b.received.Add(1)
	s := &b.table[maphash.Bytes(b.seed, id)%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[string(id)]
	if e == nil {
		b.early.Add(1)
		if b.unmatched.Add(1) > int64(b.opt.Capacity) {
			b.unmatched.Add(-1)
			b.dropped.Add(1)
			return
		}
		s.entries[string(id)] = &entry{received: 1, since: time.Now()}
		return
	}
	e.received++
	if e.expectation == nil {
		b.early.Add(1)
	} else if e.received == e.expectation.need {
		close(e.expectation.done)
	}
}

// sweep removes unmatched notifications older than the TTL.
func (b *Listener) sweep(now time.Time) {
	for i := range b.table {
		s := &b.table[i]
		s.mu.Lock()
		for id, e := range s.entries {
			if e.expectation == nil && now.Sub(e.since) > b.opt.TTL {
				delete(s.entries, id)
				b.unmatched.Add(-1)
				b.expired.Add(1)
			}
		}
		s.mu.Unlock()
	}
}
