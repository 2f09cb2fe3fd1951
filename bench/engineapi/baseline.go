//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/tinylib/msgp/msgp"
	"golang.org/x/sys/unix"

	"sluice/dataplane/wire"
)

// socketBaseline measures the cost of the sockets alone: one thread and one epoll
// instance that read and write and do not parse. It schedules nothing, limits nothing
// and trusts its input; it is for measurements only.
//
// With frames it accepts the requests of the framed socket and sends the same bytes of
// an item for each event of the engine; everything of one epoll round is sent in one
// write. Without frames it copies bytes between HTTP clients and the engine.
type socketBaseline struct {
	engine  unix.Sockaddr
	frames  bool
	request []byte // sent to the engine instead of what a frame asks for
	event   []byte // the event for which an item is sent

	poll  int
	conns map[int]*endpointConn
	idle  []*endpointConn // connections to the engine
	dirty []*endpointConn // connections with data to write
	buf   [64 << 10]byte
}

// endpointConn is one connection.
type endpointConn struct {
	fd     int
	peer   *endpointConn // destination of its bytes; nil: none
	stream uint32        // stream of the request, on an engine's connection with frames
	in     []byte        // bytes of an incomplete frame
	out    []byte
}

// runSocketBaseline runs until it is killed, or returns an error if it cannot start.
func runSocketBaseline(args []string) error {
	fs := flag.NewFlagSet("floor", flag.ExitOnError)
	listen := fs.String("listen", "127.0.0.1:0", "address, or unix:PATH")
	engine := fs.String("engine", "", "HOST:PORT")
	frames := fs.Bool("frames", false, "speak the framed socket's protocol")
	path := fs.String("path", "/v1/completions", "that the engine is asked by under --frames")
	body := fs.String("body", "", "that it is asked with")
	event := fs.String("event", `"token_ids":[`, "what each event with a token has once")
	_ = fs.Parse(args)
	addr, err := net.ResolveTCPAddr("tcp4", *engine)
	if err != nil {
		return err
	}
	network, at := "tcp", *listen
	if p, ok := strings.CutPrefix(at, "unix:"); ok {
		network, at = "unix", p
	}
	ln, err := net.Listen(network, at)
	if err != nil {
		return err
	}
	f := &socketBaseline{event: []byte(*event), engine: &unix.SockaddrInet4{Port: addr.Port, Addr: [4]byte(addr.IP.To4())}, frames: *frames, conns: map[int]*endpointConn{}}
	f.request = fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: floor\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", *path, len(*body), *body)
	file, err := ln.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	runtime.LockOSThread()
	debug.SetGCPercent(-1) // it allocates nothing
	accept := int(file.Fd())
	if f.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if err := unix.SetNonblock(accept, true); err != nil {
		return err
	}
	f.watch(accept)
	f.run(accept)
	return nil
}

func (f *socketBaseline) run(accept int) {
	var events [256]unix.EpollEvent
	for {
		n, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(f.poll), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), ^uintptr(0), 0, 0)
		if errno != 0 && errno != syscall.EINTR {
			fmt.Fprintln(os.Stderr, "engineapi: epoll:", errno)
			return
		}
		for i := range events[:max(int(n), 0)] {
			fd := int(events[i].Fd)
			if fd == accept {
				f.accept(accept)
			} else if e := f.conns[fd]; e != nil {
				f.read(e)
			}
		}
		for _, e := range f.dirty {
			f.write(e, e.out)
			e.out = e.out[:0]
		}
		f.dirty = f.dirty[:0]
	}
}

func (f *socketBaseline) watch(fd int) {
	if err := unix.EpollCtl(f.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
		panic(err)
	}
}

func (f *socketBaseline) add(fd int) *endpointConn {
	e := &endpointConn{fd: fd}
	f.conns[fd] = e
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // fails on a unix socket
	f.watch(fd)
	return e
}

func (f *socketBaseline) accept(ln int) {
	fd, _, err := unix.Accept4(ln, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		return
	}
	e := f.add(fd)
	if !f.frames {
		e.peer = f.dial()
		e.peer.peer = e
	}
}

func (f *socketBaseline) dial() *endpointConn {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Connect(fd, f.engine)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		panic(err)
	}
	return f.add(fd)
}

func (f *socketBaseline) read(e *endpointConn) {
	n, _, errno := syscall.RawSyscall(unix.SYS_READ, uintptr(e.fd), uintptr(unsafe.Pointer(&f.buf[0])), uintptr(len(f.buf)))
	switch {
	case errno == syscall.EAGAIN || errno == syscall.EINTR:
	case errno != 0 || n == 0:
		f.close(e)
	case !f.frames && e.peer != nil:
		f.write(e.peer, f.buf[:n])
	case e.peer != nil:
		f.forwardItems(e, f.buf[:n])
	case f.frames:
		f.handleFrames(e, f.buf[:n])
	}
}

// write writes all of p; it waits while the socket is full.
func (f *socketBaseline) write(e *endpointConn, p []byte) {
	for len(p) > 0 {
		n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(e.fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), unix.MSG_NOSIGNAL, 0, 0)
		switch errno {
		case 0:
			p = p[n:]
		case syscall.EAGAIN, syscall.EINTR:
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLOUT}}, 1000)
		default:
			return // its read ends the connection
		}
	}
}

func (f *socketBaseline) close(e *endpointConn) {
	delete(f.conns, e.fd)
	_ = unix.Close(e.fd)
	f.idle = slices.DeleteFunc(f.idle, func(i *endpointConn) bool { return i == e })
	for _, o := range f.conns {
		if o.peer == e {
			o.peer, e.peer = nil, nil
			f.close(o)
		}
	}
}

// handleFrames handles the frames of a caller.
func (f *socketBaseline) handleFrames(e *endpointConn, p []byte) {
	e.in = append(e.in, p...)
	for len(e.in) >= 9 {
		size := int(binary.BigEndian.Uint32(e.in))
		if len(e.in) < 9+size {
			return
		}
		kind, stream, payload := wire.Kind(e.in[4]), binary.BigEndian.Uint32(e.in[5:]), e.in[9:9+size]
		switch kind {
		case wire.Hello:
			f.queueFrame(e, wire.Welcome, 0, welcome())
		case wire.Ping:
			f.queueFrame(e, wire.Pong, 0, payload)
		case wire.Request:
			var leg *endpointConn
			if n := len(f.idle); n > 0 {
				leg, f.idle = f.idle[n-1], f.idle[:n-1]
			} else {
				leg = f.dial()
			}
			leg.peer, leg.stream = e, stream
			f.write(leg, f.request)
		}
		e.in = append(e.in[:0], e.in[9+size:]...)
	}
}

var (
	itemFrame     = itemOf(1, false)
	lastItemFrame = itemOf(0, true)
	endFrame      = []byte("0\r\n\r\n")
)

// forwardItems sends an item for each event that an engine has sent. It misses an event
// that the end of a read splits, but engines write an event in one piece.
func (f *socketBaseline) forwardItems(leg *endpointConn, p []byte) {
	to := leg.peer
	for range bytes.Count(p, f.event) {
		f.queueFrame(to, wire.Item, leg.stream, itemFrame)
	}
	if bytes.HasSuffix(p, endFrame) {
		f.queueFrame(to, wire.Item, leg.stream, lastItemFrame)
		f.queueFrame(to, wire.End, leg.stream, nil)
		leg.peer = nil
		f.idle = append(f.idle, leg)
	}
}

// queueFrame appends a frame to what is written at the end of the round.
func (f *socketBaseline) queueFrame(e *endpointConn, k wire.Kind, stream uint32, payload []byte) {
	if len(e.out) == 0 {
		f.dirty = append(f.dirty, e)
	}
	e.out = binary.BigEndian.AppendUint32(e.out, uint32(len(payload)))
	e.out = binary.BigEndian.AppendUint32(append(e.out, byte(k)), stream)
	e.out = append(e.out, payload...)
}

func welcome() []byte {
	b := msgp.AppendMapHeader(nil, 5)
	b = msgp.AppendString(msgp.AppendString(b, "protocol"), "sluice-routed")
	for name, v := range map[string]int{"version": wire.Version, "max_frame": 8 << 20, "max_streams": 1 << 14, "heartbeat_ms": 15000} {
		b = msgp.AppendInt(msgp.AppendString(b, name), v)
	}
	return b
}

func itemOf(tokens int, last bool) []byte {
	b := msgp.AppendMapHeader(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "data"), 3)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(tokens))
	for range tokens {
		b = msgp.AppendUint32(b, 1234)
	}
	if b = msgp.AppendString(b, "finish_reason"); last {
		b = msgp.AppendString(b, "length")
	} else {
		b = msgp.AppendNil(b)
	}
	return msgp.AppendInt(msgp.AppendString(b, "index"), 0)
}
