package relay

import (
	"errors"
	"io"
	"os"
	"time"
)

// write writes words of the relay's own.
func (s *stream) write(p []byte) error { return s.writeAt(s.converted(p), time.Now()) }

// writeAt writes p, under a deadline. A client that takes something is slow,
// and may be; one that takes next to nothing in WriteTimeout is stalled. A socket takes
// bytes again only when a third of what may be megabytes is free, so what it still
// holds is looked at too.
func (s *stream) writeAt(p []byte, t time.Time) error {
	if now := at(t); s.armed.never() || time.Duration(now-s.armed) > s.slack() || now >= s.armedBy {
		s.arm(t)
	}
	patience := NewPatience(t)
	for {
		n, err := s.dst.Write(p)
		s.bytes += int64(n)
		p = p[n:]
		if err == nil && len(p) > 0 {
			err = io.ErrShortWrite
		}
		if err == nil {
			return nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return s.clientFailed(ClientGone, err)
		}
		now := time.Now()
		if s.late(now) {
			return s.clientFailed(Deadline, err)
		}
		unsent, known := s.unsent()
		if !known {
			unsent = -1
		}
		if errors.Is(err, ErrStalled) || !patience.Lasts(n, unsent, now, s.writeTimeout-s.slack()) {
			return s.clientFailed(ClientStalled, err)
		}
		s.arm(now)
	}
}

// late says whether the client's time is over.
func (s *stream) late(now time.Time) bool { return !s.rare.by.IsZero() && !now.Before(s.rare.by) }

// flush is the deadline of one write.
func (s *stream) flush() time.Duration {
	if s.looked {
		return s.writeTimeout / Looks
	}
	return s.writeTimeout
}

func (s *stream) slack() time.Duration { return min(maxSlack, s.flush()/4) }

func (s *stream) unsent() (n int, ok bool) {
	b, ok := s.dst.(Backlog)
	if !ok {
		return 0, false
	}
	return b.Unsent()
}

func (s *stream) arm(t time.Time) {
	by := t.Add(s.flush())
	if last := s.rare.by; !last.IsZero() && by.After(last) {
		if by = last; !t.Before(last) {
			by = t.Add(overtime)
		}
	}
	s.armed, s.armedBy = at(t), at(by)
	_ = s.dst.SetWriteDeadline(by) // fails on a closed connection only: the write will say so
}

// clientFailed notes the client's failure unless the engine failed before.
func (s *stream) clientFailed(cause Cause, err error) error {
	s.deaf = true
	if s.err == nil {
		s.end(cause, err)
	}
	return err
}
