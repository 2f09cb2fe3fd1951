package front

import (
	"bytes"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// readPace says how a client reads its stream.
type readPace byte

const (
	readFast  readPace = iota // at once
	readSlow                  // a little, now and then
	readNever                 // nothing, once the stream has begun
	readPage                  // a page, not a stream
)

// manyClients are many clients of streams, which all run on the test's goroutine.
type manyClients struct {
	t            *testing.T
	to           unix.SockaddrInet4
	poll         int
	byFD         map[int32]*manyClient
	slowOnes     []*manyClient
	slowReadSize int           // what a slow client reads at a time
	pause        time.Duration // between two of those
	slowReads    int           // so far, of all slow ones
	startedAt    time.Time     // the first

	begun, lost int
	measuring   bool
	lags        []time.Duration // of swift clients' events, while measuring
	buf         []byte
	events      []unix.EpollEvent
}

type manyClient struct {
	fd     int
	pace   readPace
	begun  bool
	closed bool
}

func newManyClients(t *testing.T, addr string) *manyClients {
	t.Helper()
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	c := &manyClients{
		t: t, to: unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, byFD: make(map[int32]*manyClient),
		buf: make([]byte, 64<<10), events: make([]unix.EpollEvent, 256),
	}
	if c.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

func (c *manyClients) close() {
	for _, one := range c.byFD {
		_ = unix.Close(one.fd)
	}
	clear(c.byFD)
	_ = unix.Close(c.poll)
}

// dial connects and returns a non-blocking descriptor.
func (c *manyClients) dial(set func(fd int)) int {
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
		c.t.Fatalf("client %d: %v", len(c.byFD), err)
	}
	return fd
}

// connect connects one client that reads at the given pace, and requests a stream.
func (c *manyClients) connect(as readPace) {
	c.t.Helper()
	fd := c.dial(func(fd int) {
		if as == readSlow {
			// Segments of a network instead of the loopback's 64 KiB, and a small buffer: a
			// client with a closed window announces room only when much of its buffer is
			// free, and looks stopped until then.
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, 1400)
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<10)
		}
	})
	one := &manyClient{fd: fd, pace: as}
	c.byFD[int32(fd)] = one
	model := "fast"
	if as != readFast {
		model = "bulk"
	}
	if _, err := unix.Write(fd, []byte(chatPost(`{"model":"`+model+`","stream":true}`))); err != nil {
		c.t.Fatal(err)
	}
	if err := unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
		c.t.Fatal(err)
	}
	if as == readSlow {
		if len(c.slowOnes) == 0 {
			c.startedAt = time.Now()
		}
		c.slowOnes = append(c.slowOnes, one)
	}
}

// drive reads for all clients until ok returns true or, if ok is nil, for the given time.
func (c *manyClients) drive(limit time.Duration, what string, ok func() bool) {
	c.t.Helper()
	for end := time.Now().Add(limit); ok == nil || !ok(); {
		now := time.Now()
		if now.After(end) {
			if ok != nil {
				c.t.Fatalf("%s: not within %v (%d streams, %d begun, %d lost)", what, limit, len(c.byFD), c.begun, c.lost)
			}
			return
		}
		n, err := unix.EpollWait(c.poll, c.events, 5)
		if err != nil && err != unix.EINTR {
			c.t.Fatal(err)
		}
		for i := range max(n, 0) {
			if one := c.byFD[c.events[i].Fd]; one != nil {
				c.read(one, len(c.buf))
			}
		}
		c.readSlowly()
	}
}

// readSlowly reads a little for each slow client that is due.
func (c *manyClients) readSlowly() {
	if len(c.slowOnes) == 0 || c.pause == 0 {
		return
	}
	due := int(float64(len(c.slowOnes)) * time.Since(c.startedAt).Seconds() / c.pause.Seconds())
	for ; c.slowReads < due; c.slowReads++ {
		if one := c.slowOnes[c.slowReads%len(c.slowOnes)]; one.begun && !one.closed {
			c.read(one, c.slowReadSize)
		}
	}
}

// read reads at most a given number of bytes for one client.
func (c *manyClients) read(one *manyClient, most int) {
	n, err := unix.Read(one.fd, c.buf[:most])
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return
	case err != nil || n == 0:
		one.closed = true
		if one.pace != readNever {
			c.lost++
		}
		_ = unix.EpollCtl(c.poll, unix.EPOLL_CTL_DEL, one.fd, nil)
		return
	}
	if !one.begun {
		if one.pace != readPage && !bytes.HasPrefix(c.buf[:n], []byte("HTTP/1.1 200 ")) {
			c.t.Fatalf("stream %d was refused: %q", c.begun, c.buf[:n])
		}
		one.begun = true
		c.begun++
		if one.pace == readSlow || one.pace == readNever { // readSlowly reads for slow clients, nobody for the others
			_ = unix.EpollCtl(c.poll, unix.EPOLL_CTL_DEL, one.fd, nil)
		}
	}
	if one.pace != readFast || !c.measuring {
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
			return // an incomplete event, which the next read completes
		}
		if sent, err := strconv.ParseInt(string(after[:19]), 10, 64); err == nil {
			c.lags = append(c.lags, time.Duration(now-sent))
		}
	}
}
