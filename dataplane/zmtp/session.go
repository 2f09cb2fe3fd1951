package zmtp

// firstBuffer is what a connection holds from the start; it grows to one frame.
const firstBuffer = 512

type stage uint8

const (
	greeting stage = iota // the peer's greeting is awaited
	ready                 // its READY
	open                  // messages
)

// session is what a peer has said, without the socket that it comes by. It is for one
// goroutine.
type session struct {
	maxFrame    int                // bytes of a frame
	onMessage   func([]byte)       // given messages of one frame; borrows them
	onMultipart func()             // told once of each message of several frames
	send        func([]byte) error // sends

	buf         []byte // buf[from:to] has come and was not taken yet
	from, to    int
	stage       stage
	inMultipart bool // a message of several frames, which is passed over
	consumed    int  // greetings and frames taken
}

// free is where the next bytes go; it is never empty.
func (s *session) free() []byte {
	if s.buf == nil {
		s.buf = make([]byte, firstBuffer)
	}
	return s.buf[s.to:]
}

// inFrame says whether a frame has begun and not ended.
func (s *session) inFrame() bool { return s.to > s.from }

// advance takes n bytes that were put into space.
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

// next takes the greeting or one frame. It says how many bytes, from s.from on, the
// next one needs; 0 when one was taken.
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

// ensureSpace sees to it that need bytes fit behind from. Who fills the small buffer of the
// start has much to say, and gets the largest.
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

// command answers heartbeats; other commands mean nothing to a PULL socket.
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
