package front

import (
	"bytes"
	"fmt"
	"net"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	manyEngineTick = 10 * time.Millisecond
	// smallEvent has one token of a chat. A burst is a chunk of many events, which fills the
	// sockets of a slow client.
	smallEvent, burst = 200, 640
)

// manyEngine answers each request with an endless stream of events at fixed intervals. One
// goroutine serves all streams and spreads their events evenly over the interval. Ten thousand
// streams cost it little, so that the delays that a test measures come from the router.
type manyEngine struct {
	poll, ln int
	turns    [][]*manyStream
	next     int // turn for the next stream
	byFD     map[int32]*manyStream
	burst    []byte // a burst
	event    []byte
	buf      []byte
}

type manyStream struct {
	fd     int
	small  bool
	unsent []byte // of an event that did not fit
	begun  bool
}

// runEngine serves until the test ends.
func runEngine(every string) error {
	pause, err := time.ParseDuration(every)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	file, err := ln.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer file.Close() // keeps the descriptor open until the end
	fmt.Println(ln.Addr())
	exitWithParent()
	e := &manyEngine{ln: int(file.Fd()), turns: make([][]*manyStream, pause/manyEngineTick), byFD: make(map[int32]*manyStream), buf: make([]byte, 16<<10)}
	one := append(append([]byte("data: "), bytes.Repeat([]byte{'x'}, smallEvent-len("data: ")-2)...), "\n\n"...)
	e.burst = append(append(fmt.Appendf(nil, "%x\r\n", burst*smallEvent), bytes.Repeat(one, burst)...), "\r\n"...)
	if err := unix.SetNonblock(e.ln, true); err != nil {
		return err
	}
	if e.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if err := e.watch(e.ln); err != nil {
		return err
	}
	return e.run()
}

func (e *manyEngine) watch(fd int) error {
	return unix.EpollCtl(e.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

func (e *manyEngine) run() error {
	events := make([]unix.EpollEvent, 256)
	due, turn := time.Now(), 0
	for {
		n, err := unix.EpollWait(e.poll, events, int(max(time.Until(due), 0)/time.Millisecond))
		if err != nil && err != unix.EINTR {
			return err
		}
		for i := range max(n, 0) {
			if fd := events[i].Fd; int(fd) == e.ln {
				e.accept()
			} else if s := e.byFD[fd]; s != nil {
				e.read(s)
			}
		}
		for ; !time.Now().Before(due); due = due.Add(manyEngineTick) {
			turn = (turn + 1) % len(e.turns)
			e.write(turn)
		}
	}
}

func (e *manyEngine) accept() {
	for {
		fd, _, err := unix.Accept4(e.ln, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		if e.watch(fd) != nil {
			_ = unix.Close(fd)
			continue
		}
		e.byFD[int32(fd)] = &manyStream{fd: fd}
	}
}

// read reads a request or the end of a connection. The router sends a request in one write.
func (e *manyEngine) read(s *manyStream) {
	n, err := unix.Read(s.fd, e.buf)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
	case err != nil || n == 0 || s.begun:
		delete(e.byFD, int32(s.fd))
		_ = unix.Close(s.fd)
		s.fd = -1
	case bytes.Contains(e.buf[:n], []byte("}")):
		s.begun, s.small = true, bytes.Contains(e.buf[:n], []byte(`"fast"`))
		s.unsent = []byte(streamHead)
		e.send(s)
		e.turns[e.next] = append(e.turns[e.next], s)
		e.next = (e.next + 1) % len(e.turns)
	}
}

// write sends an event on each stream of a turn.
func (e *manyEngine) write(turn int) {
	live := e.turns[turn][:0]
	for _, s := range e.turns[turn] {
		if s.fd < 0 {
			continue
		}
		live = append(live, s)
		if len(s.unsent) == 0 {
			s.unsent = e.burst
			if s.small {
				s.unsent = e.timestamped()
			}
		}
		e.send(s)
	}
	clear(e.turns[turn][len(live):])
	e.turns[turn] = live
}

// timestamped returns a small event with the current time.
func (e *manyEngine) timestamped() []byte {
	e.event = strconv.AppendInt(append(fmt.Appendf(e.event[:0], "%x\r\n", smallEvent), "data: "...), time.Now().UnixNano(), 10)
	for have := len(e.event) - len("c8\r\n"); have < smallEvent-2; have++ {
		e.event = append(e.event, ' ')
	}
	return append(e.event, "\n\n\r\n"...)
}

func (e *manyEngine) send(s *manyStream) {
	n, err := unix.SendmsgN(s.fd, s.unsent, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
	case err != nil:
		s.unsent = nil // read reports the end of the connection
		return
	default:
		s.unsent = s.unsent[n:]
	}
	if len(s.unsent) > 0 && s.small {
		s.unsent = bytes.Clone(s.unsent) // event is the next one's
	}
}

// raiseFDLimit raises the soft limit of descriptors to the hard limit.
func raiseFDLimit() int {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) != nil {
		return 1024
	}
	for _, most := range []uint64{60_000, lim.Max} {
		want := unix.Rlimit{Cur: most, Max: max(most, lim.Max)}
		if unix.Setrlimit(unix.RLIMIT_NOFILE, &want) == nil {
			return int(most)
		}
	}
	return int(lim.Cur)
}
