package zmtp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
)

// Bounds of what a peer may send, beside StreamOptions.MaxMessage.
const (
	maxParts  = 16
	maxFrames = 4 * maxParts // of a message, including commands between its parts
	// maxIdleBuffer bounds the memory of a stream without a partial message.
	maxIdleBuffer = 4 << 10
)

// Faults of a peer that end a Stream.
var (
	errParts          = fmt.Errorf("a message of more than %d parts", maxParts)
	errPeerNotReading = errors.New("the peer does not read")
	errTooLong        = errors.New("a message is too large")
)

// Message is the parts of one message.
type Message [][]byte

// Stream is one connection whose handshake is complete. Its messages are read without waiting,
// after a Poller has reported it. It has one descriptor and, between messages, next to no memory.
//
// A Stream is used by one goroutine at a time, except for Gone.
type Stream struct {
	fd         int
	maxMessage int // bound of a message, in bytes
	minor      byte
	poller     *Poller
	gone       atomic.Bool

	partial     []byte // the beginning of an incomplete message
	data        []byte // what the last Fill returned, after partial; nil: consumed
	offset      int    // how much of data Next has returned
	owned       bool   // data is the Stream's own memory, not Fill's buffer
	parts       Message
	pendingPing []byte // a PING between the parts of a message
}

// Gone reports whether the peer has closed its end or the connection has failed. There may still be
// unread messages.
func (s *Stream) Gone() bool { return s.gone.Load() }

// Closed reports whether Close was called.
func (s *Stream) Closed() bool { return s.fd < 0 }

// Heartbeats reports whether the peer answers Ping: ZMTP 3.1 does, 3.0 does not.
func (s *Stream) Heartbeats() bool { return s.minor >= 1 }

// Fill reads into buf without waiting. It is called when Next has no more messages. n is 0 if
// nothing was there. dry: the socket is empty now. After an error (io.EOF: the peer closed its end)
// the Stream can only be closed.
func (s *Stream) Fill(buf []byte) (n int, dry bool, err error) {
	if s.fd < 0 {
		return 0, true, net.ErrClosed
	}
	into, from := buf, len(s.partial)
	s.owned = from > len(buf)/2
	if s.owned {
		into = s.grow()
	} else {
		copy(into, s.partial)
	}
	n, errno := recv(s.fd, into[from:])
	switch {
	case errno == syscall.EAGAIN:
		return 0, true, nil
	case errno == syscall.ECONNRESET || errno == syscall.EPIPE || errno == syscall.ETIMEDOUT || errno == 0 && n == 0:
		s.gone.Store(true)
		return 0, true, io.EOF
	case errno != 0:
		s.gone.Store(true)
		return 0, true, errno
	}
	s.data, s.offset = into[:from+n], 0
	return n, from+n < len(into), nil
}

// grow enlarges partial in proportion to what has been received, not to what the peer announces.
func (s *Stream) grow() []byte {
	if len(s.partial) == cap(s.partial) {
		s.partial = append(make([]byte, 0, 2*cap(s.partial)), s.partial...)
	}
	return s.partial[:cap(s.partial)]
}

// Next returns the next message of what Fill has read; ok: there is a complete one. The parts lie
// in Fill's buffer, or in memory that is not reused, and stay valid until that buffer is reused.
// The list of parts is reused by Next.
func (s *Stream) Next() (m Message, ok bool, err error) {
	for s.data != nil {
		n, err := s.next(s.data[s.offset:])
		if err != nil {
			s.gone.Store(true)
			return nil, false, err
		}
		if n == 0 {
			s.detachPartial()
			break
		}
		if s.offset += n; len(s.parts) > 0 {
			return s.parts, true, nil
		}
	}
	return nil, false, nil
}

// Detach copies what Next has not returned, so that Fill's buffer can be reused.
func (s *Stream) Detach() {
	if s.data != nil && !s.owned {
		s.data, s.offset, s.owned = append([]byte(nil), s.data[s.offset:]...), 0, true
	}
}

// detachPartial copies the incomplete message, so that Fill's buffer can be reused.
func (s *Stream) detachPartial() {
	left := s.data[s.offset:]
	switch {
	case s.owned && s.offset == 0:
		s.partial = s.data
	case s.owned || len(left) == 0 && cap(s.partial) > maxIdleBuffer: // messages in this memory may still be in use
		s.partial = append([]byte(nil), left...)
	default:
		s.partial = append(s.partial[:0], left...)
	}
	s.data, s.offset = nil, 0
}

// next finds one message, or a command alone, at the beginning of p and sets s.parts. n is its
// length; 0: it is incomplete.
func (s *Stream) next(p []byte) (n int, err error) {
	s.parts = s.parts[:0]
	for frames := 0; ; frames++ {
		if frames == maxFrames {
			return 0, errParts
		}
		flags, body, need, err := splitFrame(p[n:], s.maxMessage)
		if err != nil {
			return 0, err
		}
		if n+need > s.maxMessage+maxFrames*longHead {
			return 0, errTooLong
		}
		if body == nil {
			return 0, nil
		}
		n += need
		switch {
		case flags&flagCommand != 0:
			// libzmq may send a PING between the parts of a message. It is answered when the
			// message is complete, because its parts are parsed again until then.
			if len(s.parts) == 0 {
				return n, s.command(body)
			}
			s.pendingPing = append(s.pendingPing[:0], body...)
			continue
		case len(s.parts) == maxParts:
			return 0, errParts
		}
		s.parts = append(s.parts, body)
		if flags&flagMore == 0 {
			if len(s.pendingPing) > 0 {
				err = s.command(s.pendingPing)
				s.pendingPing = s.pendingPing[:0]
			}
			return n, err
		}
	}
}

// command answers heartbeats. Other commands have no meaning here.
func (s *Stream) command(body []byte) error {
	name, data, err := splitCommand(body)
	if err != nil || name != "PING" {
		return err
	}
	answer, err := pong(data)
	if err != nil {
		return err
	}
	return s.write(answer)
}

var ping = []byte{flagCommand, 7, 4, 'P', 'I', 'N', 'G', 0, 0}

// Ping asks the peer for a PONG, which Next consumes silently.
func (s *Stream) Ping() error { return s.write(ping) }

// Send writes one small message.
func (s *Stream) Send(parts ...[]byte) error { return s.write(encode(nil, parts...)) }

// encode appends the frames of a message whose parts have at most 255 bytes.
func encode(dst []byte, parts ...[]byte) []byte {
	for i, part := range parts {
		flags := byte(flagMore)
		if i == len(parts)-1 {
			flags = 0
		}
		dst = append(append(dst, flags, byte(len(part))), part...)
	}
	return dst
}

// write sends a few bytes. A socket without space for them has a peer that does not read.
func (s *Stream) write(p []byte) error {
	for {
		n, err := syscall.Write(s.fd, p)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN || err == nil && n < len(p):
			return errPeerNotReading
		}
		return err
	}
}

// Close closes the connection. It may be called more than once.
func (s *Stream) Close() {
	if s.fd < 0 {
		return
	}
	if s.poller != nil {
		s.poller.remove(s.fd)
	}
	_ = syscall.Close(s.fd)
	s.fd = -1
	s.gone.Store(true)
	s.partial, s.data, s.parts = nil, nil, nil
}
