package upstream

import (
	"errors"
	"io"
	"net"
	"syscall"

	"sluice/dataplane/sock"
)

// toldUnderTLS is peerClosed over TLS: a read that gives up where it would have to wait.
func (c *conn) toldUnderTLS() bool {
	under, ok := plain(c.nc).(*underTLS)
	if !ok {
		return false
	}
	under.asks = true
	n, err := c.nc.Read(c.one[:])
	under.asks = false
	return n > 0 || !errors.Is(err, errNothing) || under.midway()
}

// cutShort says of a connection over TLS that has ended whether that was TCP's end alone,
// without the engine's close_notify, which anybody on the way can bring about: crypto/tls
// says io.EOF to both where the last record was whole.
func (c *conn) cutShort() bool {
	if c.raw != nil {
		return false
	}
	under, ok := plain(c.nc).(*underTLS)
	return ok && under.cut
}

// underTLS is the connection below a TLS one, which can be asked for what has come.
type underTLS struct {
	*net.TCPConn
	raw  syscall.RawConn
	asks bool // Read must not wait
	cut  bool // TCP has ended; behind a close_notify nobody reads that far

	look  func(fd uintptr) // made once
	p     []byte
	n     int
	errno syscall.Errno

	// Where in its records what was received ends: of a header of recordHead bytes have
	// come, and then left of its record have not.
	head [recordHead]byte
	have int
	left int
}

// recordHead is how long a TLS record's header is; its last two bytes are how much
// follows (RFC 8446, 5.1).
const recordHead = 5

// follow takes in what was received.
func (u *underTLS) follow(p []byte) {
	for len(p) > 0 {
		if u.have < recordHead {
			n := copy(u.head[u.have:], p)
			p = p[n:]
			if u.have += n; u.have == recordHead {
				u.left = int(u.head[3])<<8 | int(u.head[4])
			}
		} else {
			n := min(u.left, len(p))
			p = p[n:]
			u.left -= n
		}
		if u.have == recordHead && u.left == 0 {
			u.have = 0
		}
	}
}

// midway says whether a record has come in part: crypto/tls keeps that part, and says
// that nothing has come.
func (u *underTLS) midway() bool { return u.have > 0 }

func newUnderTLS(t *net.TCPConn) (*underTLS, error) {
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	u := &underTLS{TCPConn: t, raw: raw}
	u.look = func(fd uintptr) { u.n, u.errno = sock.Recv(int(fd), u.p) }
	return u, nil
}

func (u *underTLS) Read(p []byte) (int, error) {
	if !u.asks {
		n, err := u.TCPConn.Read(p)
		u.follow(p[:n])
		u.cut = u.cut || err == io.EOF
		return n, err
	}
	u.p = p
	err := u.raw.Control(u.look)
	u.p = nil
	switch {
	case err != nil:
		return 0, err
	case u.errno == syscall.EAGAIN:
		return 0, errNothing
	case u.errno != 0:
		return 0, u.errno
	case u.n == 0:
		u.cut = true
		return 0, io.EOF
	}
	u.follow(p[:u.n])
	return u.n, nil
}

// nothing is what a read gives that must not wait: crypto/tls goes on after an error that
// is temporary.
type nothing struct{}

func (nothing) Error() string   { return "upstream: nothing has come" }
func (nothing) Timeout() bool   { return true }
func (nothing) Temporary() bool { return true }

var errNothing net.Error = nothing{}
