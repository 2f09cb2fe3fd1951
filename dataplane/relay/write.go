package relay

import (
	"errors"
	"io"
	"os"
	"time"

	"sluice/dataplane/monotime"
)

// write writes bytes of the relay's own.
func (s *stream) write(p []byte) error { return s.writeAt(s.convert(p), time.Now()) }

// writeAt writes p under a deadline.
func (s *stream) writeAt(p []byte, t time.Time) error {
	if now := monotime.Of(t); s.deadlineSetAt.IsZero() || time.Duration(now-s.deadlineSetAt) > s.deadlineSlack() || now >= s.deadline {
		s.setWriteDeadline(t)
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
	case s.pastClientDeadline(time.Now()):
		return s.clientFailed(Deadline, err)
	}
	return s.clientFailed(ClientStalled, err)
}

// pastClientDeadline reports whether Options.ClientDeadline has passed.
func (s *stream) pastClientDeadline(now time.Time) bool {
	return !s.extras.clientDeadline.IsZero() && monotime.Of(now) >= s.extras.clientDeadline
}

// writeDeadline returns the bound of one write.
func (s *stream) writeDeadline() time.Duration {
	if s.detectsStalls {
		return StallCheckInterval(s.writeTimeout)
	}
	return s.writeTimeout
}

func (s *stream) deadlineSlack() time.Duration { return min(maxDeadlineSlack, s.writeDeadline()/4) }

func (s *stream) setWriteDeadline(t time.Time) {
	by := t.Add(s.writeDeadline())
	if last := s.extras.clientDeadline.Time(); !last.IsZero() && by.After(last) {
		if by = last; !t.Before(last) {
			by = t.Add(finalWriteTime)
		}
	}
	s.deadlineSetAt, s.deadline = monotime.Of(t), monotime.Of(by)
	_ = s.dst.SetWriteDeadline(by) // fails only on a closed connection, which the write reports
}

// clientFailed records that the client failed, unless the engine failed before.
func (s *stream) clientFailed(cause Cause, err error) error {
	s.clientFailedWrite = true
	if s.err == nil {
		s.setCause(cause, err)
	}
	return err
}
