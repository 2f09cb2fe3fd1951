package zmtp

// firstBuffer is the initial buffer of a connection. It grows to one frame.
const firstBuffer = 512

type stage uint8

const (
	greeting stage = iota // waits for the peer's greeting
	ready                 // waits for its READY command
	open                  // receives messages
)

// session is the protocol state of a peer, without its socket. It is used by one goroutine.
type session struct {
	maxFrame    int                // bound of a frame, in bytes
	onMessage   func([]byte)       // called with messages of one frame, borrowed
	onMultipart func()             // called once for each message of several frames
	send        func([]byte) error // writes to the peer

	buf         []byte // buf[from:to] has been received and not consumed
	from, to    int
	stage       stage
	inMultipart bool // in a message of several frames, which is ignored
	consumed    int  // greetings and frames consumed
}

// free returns the space for the next bytes. It is never empty.
func (s *session) free() []byte {
	if s.buf == nil {
		s.buf = make([]byte, firstBuffer)
	}
	return s.buf[s.to:]
}

// inFrame reports whether a frame is incomplete.
func (s *session) inFrame() bool { return s.to > s.from }

// advance processes n bytes that were read into free().
func (s *session) advance(n int) error {
	s.to += n
	full := s.to == len(s.buf)
	for {
		need, err := s.next()
		if err != nil {
			return err
		}
		if need > 0 {
			s.ensureSpace(need, full)
			return nil
		}
		s.consumed++
	}
}

// next consumes the greeting or one frame. need is how many bytes from s.from on the next one
// takes; 0: one was consumed.
func (s *session) next() (need int, err error) {
	p := s.buf[s.from:s.to]
	if s.stage == greeting {
		if err := checkGreeting(p); err != nil || len(p) < greetingBytes {
			return greetingBytes, err
		}
		s.from += greetingBytes
		s.stage = ready
		return 0, s.send(readyFrame)
	}
	flags, body, need, err := splitFrame(p, s.maxFrame)
	if err != nil || body == nil {
		return need, err
	}
	s.from += need
	switch {
	case s.stage == ready:
		s.stage = open
		return 0, checkReady(flags, body, "PUSH")
	case flags&flagCommand != 0:
		return 0, s.command(body)
	case s.inMultipart || flags&flagMore != 0:
		if !s.inMultipart {
			s.onMultipart()
		}
		s.inMultipart = flags&flagMore != 0
	default:
		s.onMessage(body)
	}
	return 0, nil
}

// ensureSpace makes space for need bytes after from. A peer that fills the small first buffer sends
// much, and gets the largest.
func (s *session) ensureSpace(need int, full bool) {
	if s.from == s.to {
		s.from, s.to = 0, 0
	}
	into, largest := s.buf, max(s.maxFrame+longHead, firstBuffer)
	switch {
	case len(into) < largest && (full || need > len(into)):
		into = make([]byte, largest)
	case s.from+need <= len(into):
		return
	}
	s.to = copy(into, s.buf[s.from:s.to])
	s.from, s.buf = 0, into
}

// command answers heartbeats. Other commands have no meaning for a PULL socket.
func (s *session) command(body []byte) error {
	name, data, err := splitCommand(body)
	if err != nil || name != "PING" {
		return err
	}
	answer, err := pong(data)
	if err != nil {
		return err
	}
	return s.send(answer)
}
