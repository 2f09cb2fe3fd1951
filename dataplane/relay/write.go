package relay

import (
	"errors"
	"io"
	"os"
	"time"
)

// write writes words of the relay's own.
func (s *stream) write(p []byte) error { return s.writeAt(s.converted(p), time.Now()) }

// writeAt writes p, under a deadline.
func (s *stream) writeAt(p []byte, t time.Time) error {
	if now := at(t); s.armed.never() || time.Duration(now-s.armed) > s.slack() || now >= s.armedBy {
		s.arm(t)
	}
	n, err := s.dst.Write(p)
	s.bytes += int64(n)
	switch {
	case err == nil && n == len(p):
		return nil
	case err == nil:
		return s.clientFailed(ClientGone, io.ErrShortWrite)
	case !errors.Is(err, os.ErrDeadlineExceeded):
		return s.clientFailed(ClientGone, err)
	case s.late(time.Now()):
		return s.clientFailed(Deadline, err)
	}
	return s.clientFailed(ClientStalled, err)
}

// late says whether the client's time is over.
func (s *stream) late(now time.Time) bool { return !s.rare.by.never() && at(now) >= s.rare.by }

// flush is the deadline of one write.
func (s *stream) flush() time.Duration {
	if s.patient {
		return LookAfter(s.writeTimeout)
	}
	return s.writeTimeout
}

func (s *stream) slack() time.Duration { return min(maxSlack, s.flush()/4) }

func (s *stream) arm(t time.Time) {
	by := t.Add(s.flush())
	if last := s.rare.by.time(); !last.IsZero() && by.After(last) {
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
