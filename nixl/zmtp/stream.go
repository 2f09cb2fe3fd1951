package zmtp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
)

// Bounds of what a peer may send, beside the bytes of a message (StreamOptions).
const (
	maxParts  = 16
	maxFrames = 4 * maxParts // of a message, with the commands between its parts
	// keptBytes is what a stream holds on to when it has nothing half read.
	keptBytes = 4 << 10
)

// Faults of a peer that end a Stream.
var (
	errParts    = fmt.Errorf("a message of more than %d parts", maxParts)
	errUnread   = errors.New("it does not read what it is sent")
	errOverlong = errors.New("a message is too large")
)

// Message are the parts of one message.
type Message [][]byte

// Stream is one connection with a peer that has introduced itself. Its messages are
// read without waiting, when a Poller has said that there may be some. It holds one
// descriptor and, between messages, next to no memory.
//
// A Stream belongs to one goroutine at a time, but for Gone.
type Stream struct {
	fd     int
	most   int // bytes of one message
	minor  byte
	poller *Poller
	gone   atomic.Bool

	rest  []byte // the beginning of a message that is not whole yet
	data  []byte // what the last Fill has brought, with rest before it; nil: all was taken
	at    int    // how much of data Next has given out
	own   bool   // data lies in memory of the Stream's own, not in Fill's buffer
	parts Message
	asked []byte // a PING between the parts of a message
}

// Gone says whether the peer has closed its end, or the connection has failed. There may
// still be messages that came before.
func (s *Stream) Gone() bool { return s.gone.Load() }

// Closed says whether Close was called.
func (s *Stream) Closed() bool { return s.fd < 0 }

// Heartbeats says whether the peer answers Ping: ZMTP 3.1 has it, 3.0 has not.
func (s *Stream) Heartbeats() bool { return s.minor >= 1 }

// Fill reads what has come into buf; call it when Next has no more. It never waits: n is 0
// when nothing was there, and dry says that there was no more than that. After an error, io.EOF where the peer has closed its end, the
// Stream is of no more use but to be closed.
func (s *Stream) Fill(buf []byte) (n int, dry bool, err error) {
	if s.fd < 0 {
		return 0, true, net.ErrClosed
	}
	into, from := buf, len(s.rest)
	s.own = from > len(buf)/2
	if s.own {
		into = s.grow()
	} else {
		copy(into, s.rest)
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
	s.data, s.at = into[:from+n], 0
	return n, from+n < len(into), nil
}

// grow gives rest more room. That grows with what has come, not with what a peer says
// will come.
func (s *Stream) grow() []byte {
	if len(s.rest) == cap(s.rest) {
		s.rest = append(make([]byte, 0, 2*cap(s.rest)), s.rest...)
	}
	return s.rest[:cap(s.rest)]
}

// Next gives the next message of what Fill has read; ok is false when there is no whole
// one left. The parts lie in Fill's buffer, or in memory that is not used again: they stay
// as they are until that buffer is. The list of them is used again by Next.
func (s *Stream) Next() (m Message, ok bool, err error) {
	for s.data != nil {
		n, err := s.next(s.data[s.at:])
		if err != nil {
			s.gone.Store(true)
			return nil, false, err
		}
		if n == 0 {
			s.park()
			break
		}
		if s.at += n; len(s.parts) > 0 {
			return s.parts, true, nil
		}
	}
	return nil, false, nil
}

// Park keeps what Next has not given yet, so that Fill's buffer is free.
func (s *Stream) Park() {
	if s.data != nil && !s.own {
		s.data, s.at, s.own = append([]byte(nil), s.data[s.at:]...), 0, true
	}
}

// park keeps what is half read, so that Fill's buffer is free.
func (s *Stream) park() {
	left := s.data[s.at:]
	switch {
	case s.own && s.at == 0:
		s.rest = s.data
	case s.own || len(left) == 0 && cap(s.rest) > keptBytes: // messages lie there that may still be read
		s.rest = append([]byte(nil), left...)
	default:
		s.rest = append(s.rest[:0], left...)
	}
	s.data, s.at = nil, 0
}

// next finds one message, or a command alone, at the start of p and leaves its parts in
// s.parts. n is how long it is; 0: it is not whole yet.
func (s *Stream) next(p []byte) (n int, err error) {
	s.parts = s.parts[:0]
	for frames := 0; ; frames++ {
		if frames == maxFrames {
			return 0, errParts
		}
		flags, body, need, err := cut(p[n:], s.most)
		if err != nil {
			return 0, err
		}
		if n+need > s.most+maxFrames*longHead {
			return 0, errOverlong
		}
		if body == nil {
			return 0, nil
		}
		n += need
		switch {
		case flags&flagCommand != 0:
			// libzmq may send one between the parts of a message. It is answered when the
			// message is whole, as the parts are looked at anew until then.
			if len(s.parts) == 0 {
				return n, s.command(body)
			}
			s.asked = append(s.asked[:0], body...)
			continue
		case len(s.parts) == maxParts:
			return 0, errParts
		}
		s.parts = append(s.parts, body)
		if flags&flagMore == 0 {
			if len(s.asked) > 0 {
				err = s.command(s.asked)
				s.asked = s.asked[:0]
			}
			return n, err
		}
	}
}

// command answers heartbeats; other commands mean nothing here.
func (s *Stream) command(body []byte) error {
	name, data, err := command(body)
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

// Ping asks the peer for a sign of life, which Read takes without a word.
func (s *Stream) Ping() error { return s.write(ping) }

// Send writes one small message.
func (s *Stream) Send(parts ...[]byte) error { return s.write(encode(nil, parts...)) }

// encode appends the frames of a message whose parts are of 255 bytes at most.
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

// write sends what is small: a socket that has no room for it is one whose peer does not
// read.
func (s *Stream) write(p []byte) error {
	for {
		n, err := syscall.Write(s.fd, p)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN || err == nil && n < len(p):
			return errUnread
		}
		return err
	}
}

// Close ends the connection. It may be called more than once.
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
	s.rest, s.data, s.parts = nil, nil, nil
}
