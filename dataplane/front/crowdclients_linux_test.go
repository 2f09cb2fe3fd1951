package front

import (
	"bytes"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// reader says how a client reads its stream.
type reader byte

const (
	swift   reader = iota // at once
	slow                  // a little, now and then
	stopped               // nothing, once the stream has begun
	nobody                // whatever comes, and no stream
)

// crowdClients are many clients of streams on one goroutine, that of the test.
type crowdClients struct {
	t     *testing.T
	to    unix.SockaddrInet4
	poll  int
	by    map[int32]*crowdClient
	slows []*crowdClient
	sip   int           // what a slow client reads at a time
	pause time.Duration // between two of those
	sips  int           // so far, of all slow ones
	since time.Time     // the first

	begun, lost int
	measuring   bool
	lags        []time.Duration // of swift clients' events, while measuring
	buf         []byte
	events      []unix.EpollEvent
}

type crowdClient struct {
	fd    int
	as    reader
	begun bool
	gone  bool
}

func newCrowdClients(t *testing.T, addr string) *crowdClients {
	t.Helper()
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	c := &crowdClients{
		t: t, to: unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, by: make(map[int32]*crowdClient),
		buf: make([]byte, 64<<10), events: make([]unix.EpollEvent, 256),
	}
	if c.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

func (c *crowdClients) close() {
	for _, one := range c.by {
		_ = unix.Close(one.fd)
	}
	clear(c.by)
	_ = unix.Close(c.poll)
}

// dial connects, and leaves the descriptor non-blocking.
func (c *crowdClients) dial(set func(fd int)) int {
	c.t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		c.t.Fatal(err)
	}
	if set != nil {
		set(fd)
	}
	for err = unix.EINTR; err == unix.EINTR; {
		err = unix.Connect(fd, &c.to)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		c.t.Fatalf("client %d: %v", len(c.by), err)
	}
	return fd
}

// join begins a stream.
func (c *crowdClients) join(as reader) {
	c.t.Helper()
	fd := c.dial(func(fd int) {
		if as == slow {
			// A network's segments, not the loopback's of 64 KiB, and little room: a client
			// whose window is shut tells of room only when much of it is free, and looks
			// stopped until then.
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, 1400)
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<10)
		}
	})
	one := &crowdClient{fd: fd, as: as}
	c.by[int32(fd)] = one
	model := "fast"
	if as != swift {
		model = "bulk"
	}
	if _, err := unix.Write(fd, []byte(chatPost(`{"model":"`+model+`","stream":true}`))); err != nil {
		c.t.Fatal(err)
	}
	if err := unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
		c.t.Fatal(err)
	}
	if as == slow {
		if len(c.slows) == 0 {
			c.since = time.Now()
		}
		c.slows = append(c.slows, one)
	}
}

// drive reads for all until ok, or, where ok is nil, for so long.
func (c *crowdClients) drive(limit time.Duration, what string, ok func() bool) {
	c.t.Helper()
	for end := time.Now().Add(limit); ok == nil || !ok(); {
		now := time.Now()
		if now.After(end) {
			if ok != nil {
				c.t.Fatalf("%s: not within %v (%d streams, %d begun, %d lost)", what, limit, len(c.by), c.begun, c.lost)
			}
			return
		}
		n, err := unix.EpollWait(c.poll, c.events, 5)
		if err != nil && err != unix.EINTR {
			c.t.Fatal(err)
		}
		for i := range max(n, 0) {
			if one := c.by[c.events[i].Fd]; one != nil {
				c.read(one, len(c.buf))
			}
		}
		c.readSlowly()
	}
}

// readSlowly has the slow ones whose time has come read a little.
func (c *crowdClients) readSlowly() {
	if len(c.slows) == 0 || c.pause == 0 {
		return
	}
	due := int(float64(len(c.slows)) * time.Since(c.since).Seconds() / c.pause.Seconds())
	for ; c.sips < due; c.sips++ {
		if one := c.slows[c.sips%len(c.slows)]; one.begun && !one.gone {
			c.read(one, c.sip)
		}
	}
}

// read takes at most so much of what has come for one.
func (c *crowdClients) read(one *crowdClient, most int) {
	n, err := unix.Read(one.fd, c.buf[:most])
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return
	case err != nil || n == 0:
		one.gone = true
		if one.as != stopped {
			c.lost++
		}
		_ = unix.EpollCtl(c.poll, unix.EPOLL_CTL_DEL, one.fd, nil)
		return
	}
	if !one.begun {
		if one.as != nobody && !bytes.HasPrefix(c.buf[:n], []byte("HTTP/1.1 200 ")) {
			c.t.Fatalf("stream %d was refused: %q", c.begun, c.buf[:n])
		}
		one.begun = true
		c.begun++
		if one.as == slow || one.as == stopped { // readSlowly does, or nobody
			_ = unix.EpollCtl(c.poll, unix.EPOLL_CTL_DEL, one.fd, nil)
		}
	}
	if one.as != swift || !c.measuring {
		return
	}
	now := time.Now().UnixNano()
	for rest := c.buf[:n]; ; {
		_, after, found := bytes.Cut(rest, []byte("data: "))
		if !found {
			return
		}
		rest = after
		if len(after) < 19 {
			return // told by the next read, which is one of an event cut in two
		}
		if sent, err := strconv.ParseInt(string(after[:19]), 10, 64); err == nil {
			c.lags = append(c.lags, time.Duration(now-sent))
		}
	}
}
