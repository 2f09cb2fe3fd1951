//go:build cgo

package notify

import (
	"hash/maphash"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// burst is how many frames are taken between two looks at the clock and at
// Close.
const burst = 1024

// run receives until Close. It sleeps in ZMQ's poll: until a frame comes, Close
// kicks, or the next sweep is due.
func (b *Board) run() {
	defer close(b.ended)
	poll := zmq.NewPoller()
	poll.Add(b.wake, zmq.POLLIN)
	poll.Add(b.pull, zmq.POLLIN)
	sweep := time.Now().Add(b.opt.Sweep)
	for {
		if _, err := poll.Poll(max(time.Until(sweep), 0)); err != nil {
			b.opt.Log.Error("notify: cannot wait for notifications", "endpoint", b.endpoint, "error", err)
			return
		}
		select {
		case <-b.closed:
			return
		default:
		}
		now := time.Now()
		b.receive(now)
		if !now.Before(sweep) {
			b.sweep(now)
			sweep = now.Add(b.opt.Sweep)
		}
	}
}

// receive takes in what has come, at most burst frames.
func (b *Board) receive(now time.Time) {
	for range burst {
		frame, err := b.pull.RecvBytes(zmq.DONTWAIT)
		if err != nil {
			return // nothing more now
		}
		if more, _ := b.pull.GetRcvmore(); more {
			b.skipRest()
			b.malformed.Add(1)
			continue
		}
		// A msgpack map begins with 0x80 or above, a report with a letter.
		if b.opt.Report != nil && len(frame) > 0 && frame[0] < 0x80 {
			if !b.opt.Report(frame) {
				b.malformed.Add(1)
			}
			continue
		}
		switch id, what := parse(frame); what {
		case ready:
			b.arrived(id, now)
		case foreign:
			b.foreign.Add(1)
		default:
			b.malformed.Add(1)
		}
	}
}

// skipRest drops the further frames of a message: a notification has one.
func (b *Board) skipRest() {
	for {
		if _, err := b.pull.RecvBytes(zmq.DONTWAIT); err != nil {
			return
		}
		if more, err := b.pull.GetRcvmore(); err != nil || !more {
			return
		}
	}
}

// arrived books one notification.
func (b *Board) arrived(id []byte, now time.Time) {
	b.received.Add(1)
	s := &b.table[maphash.Bytes(b.seed, id)%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[string(id)]
	if e == nil {
		b.early.Add(1)
		if b.unclaimed.Load() >= int64(b.opt.Capacity) {
			b.dropped.Add(1)
			return
		}
		b.unclaimed.Add(1)
		s.entries[string(id)] = &entry{came: 1, since: now}
		return
	}
	e.came++
	if e.ticket == nil {
		b.early.Add(1)
	} else if e.came == e.ticket.need {
		close(e.ticket.done)
	}
}

// sweep drops what nobody has asked for in time.
func (b *Board) sweep(now time.Time) {
	for i := range b.table {
		s := &b.table[i]
		s.mu.Lock()
		for id, e := range s.entries {
			if e.ticket == nil && now.Sub(e.since) > b.opt.TTL {
				delete(s.entries, id)
				b.unclaimed.Add(-1)
				b.expired.Add(1)
			}
		}
		s.mu.Unlock()
	}
}
