package rawsocket

import (
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Conn is a TCP connection that package net does not know. It implements net.Conn and syscall.Conn;
// its methods may be called from any goroutine. Its descriptor is in no poller until a method must
// wait; from then on an os.File owns it. Go's poller takes 512 bytes for each descriptor that it
// has had at once, and never frees them. A client whose request had arrived at the accept, and
// whose stream an event loop drives, never enters that poller. Until the first wait, a deadline
// that has passed ends nothing.
//
// Only Conn closes the descriptor, once, when nobody uses it. Closed earlier, its number could
// already be another client's. Each use is counted, and none begins after Close. A wait in the
// poller is not a use; it ends when the file is closed.
//
// Memory order: refs orders everything. poller is stored within a use, under mu, and stays, so the
// goroutine that closes the descriptor sees who owns it. mu guards the deadlines until then.
type Conn struct {
	fd            int32
	refs          atomic.Uint32 // oneRef for each use, and closedBit
	mu            sync.Mutex
	poller        atomic.Pointer[pollerFile]
	readDeadline  time.Duration // since epoch; 0: never
	writeDeadline time.Duration
}

const (
	closedBit = 1
	oneRef    = 2
)

// pollerFile is the descriptor in Go's poller.
type pollerFile struct {
	file *os.File
	raw  syscall.RawConn
}

var epoch = time.Now()

// acquire begins a use of the descriptor; false: it is closed.
func (c *Conn) acquire() bool {
	for {
		n := c.refs.Load()
		if n&closedBit != 0 {
			return false
		}
		if c.refs.CompareAndSwap(n, n+oneRef) {
			return true
		}
	}
}

// release ends a use.
func (c *Conn) release() {
	if c.refs.Add(^uint32(oneRef-1)) == closedBit {
		c.closeFD()
	}
}

// Close ends waits and closes the descriptor after the last use.
func (c *Conn) Close() error {
	switch c.refs.Or(closedBit) {
	case 0:
		c.closeFD()
	case closedBit:
		return net.ErrClosed
	}
	return nil
}

// closeFD closes the descriptor. Either Close or release calls it, once.
func (c *Conn) closeFD() {
	if w := c.poller.Load(); w != nil {
		_ = w.file.Close()
		return
	}
	_ = unix.Close(int(c.fd))
}

// ensurePoller puts the descriptor into Go's poller unless it is there.
func (c *Conn) ensurePoller() (*pollerFile, error) {
	if w := c.poller.Load(); w != nil {
		return w, nil
	}
	if !c.acquire() {
		return nil, net.ErrClosed
	}
	defer c.release()
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.poller.Load(); w != nil {
		return w, nil
	}
	w := &pollerFile{file: os.NewFile(uintptr(c.fd), "client")}
	err := w.setDeadlines(c.readDeadline, c.writeDeadline)
	c.poller.Store(w) // from here on the file owns the descriptor, even on error
	return w, err
}

func (w *pollerFile) setDeadlines(readBy, writeBy time.Duration) (err error) {
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return err
	}
	if err = w.file.SetReadDeadline(timeOf(readBy)); err != nil { // Go's poller refused it
		return err
	}
	return w.file.SetWriteDeadline(timeOf(writeBy))
}

func timeOf(d time.Duration) time.Time {
	if d == 0 {
		return time.Time{}
	}
	return epoch.Add(d)
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if c.poller.Load() == nil && len(p) > 0 {
		if !c.acquire() {
			return 0, net.ErrClosed
		}
		n, errno := Recv(int(c.fd), p)
		c.release()
		switch {
		case errno == 0 && n == 0:
			return 0, io.EOF
		case errno == 0:
			return n, nil
		case errno != syscall.EAGAIN:
			return 0, os.NewSyscallError("recvfrom", errno)
		}
	}
	w, err := c.ensurePoller()
	if err != nil {
		return 0, err
	}
	n, err := w.file.Read(p)
	return n, c.mapError(err)
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (n int, err error) {
	if c.poller.Load() == nil {
		if !c.acquire() {
			return 0, net.ErrClosed
		}
		var errno syscall.Errno
		n, errno = Send(int(c.fd), p)
		c.release()
		switch errno {
		case 0:
			return n, nil
		case syscall.EAGAIN:
		default:
			return n, os.NewSyscallError("sendto", errno)
		}
	}
	w, err := c.ensurePoller()
	if err != nil {
		return n, err
	}
	more, err := w.file.Write(p[n:])
	return n + more, c.mapError(err)
}

// mapError maps the error of a wait, which os.File reports in its own terms, to those of net.
func (c *Conn) mapError(err error) error {
	if err != nil && c.refs.Load()&closedBit != 0 {
		return net.ErrClosed
	}
	return err
}

// CloseWrite shuts down the sending direction, as that of net.TCPConn.
func (c *Conn) CloseWrite() (err error) {
	if !c.acquire() {
		return net.ErrClosed
	}
	defer c.release()
	return os.NewSyscallError("shutdown", unix.Shutdown(int(c.fd), unix.SHUT_WR))
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error { return c.setDeadlines(t, true, true) }

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadlines(t, true, false) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadlines(t, false, true) }

func (c *Conn) setDeadlines(t time.Time, read, write bool) error {
	w := c.poller.Load()
	if w == nil {
		if w = c.storeDeadlines(t, read, write); w == nil {
			return nil
		}
	}
	switch {
	case !write:
		return w.file.SetReadDeadline(t)
	case !read:
		return w.file.SetWriteDeadline(t)
	}
	return w.file.SetDeadline(t)
}

// storeDeadlines stores deadlines for the first wait. It returns the pollerFile if there has been
// one.
func (c *Conn) storeDeadlines(t time.Time, read, write bool) *pollerFile {
	by := time.Duration(0)
	if !t.IsZero() {
		by = max(t.Sub(epoch), 1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.poller.Load(); w != nil {
		return w
	}
	if read {
		c.readDeadline = by
	}
	if write {
		c.writeDeadline = by
	}
	return nil
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.sockaddr(unix.SYS_GETSOCKNAME) }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.sockaddr(unix.SYS_GETPEERNAME) }

// sockaddr returns one of the connection's addresses; an invalid one after it has been lost.
func (c *Conn) sockaddr(call uintptr) net.Addr {
	var a Address
	if c.acquire() {
		size := uint32(len(a.raw))
		_, _, _ = syscall.RawSyscall(call, uintptr(c.fd), uintptr(unsafe.Pointer(&a.raw)), uintptr(unsafe.Pointer(&size)))
		c.release()
	}
	return net.TCPAddrFromAddrPort(a.AddrPort())
}

// SyscallConn implements syscall.Conn.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return (*rawConn)(c), nil }

// rawConn is a Conn as a syscall.RawConn.
type rawConn Conn

// Control implements syscall.RawConn.
func (r *rawConn) Control(f func(fd uintptr)) error {
	c := (*Conn)(r)
	if !c.acquire() {
		return net.ErrClosed
	}
	defer c.release()
	f(uintptr(c.fd))
	return nil
}

// Read implements syscall.RawConn. If f is not done at its first call, the descriptor is added to Go's
// poller, which the connection otherwise does without.
func (r *rawConn) Read(f func(fd uintptr) bool) error {
	if r.adapt(f) {
		return nil
	}
	w, err := (*Conn)(r).ensurePoller()
	if err != nil {
		return err
	}
	return (*Conn)(r).mapError(w.raw.Read(f))
}

// Write implements syscall.RawConn; see Read.
func (r *rawConn) Write(f func(fd uintptr) bool) error {
	if r.adapt(f) {
		return nil
	}
	w, err := (*Conn)(r).ensurePoller()
	if err != nil {
		return err
	}
	return (*Conn)(r).mapError(w.raw.Write(f))
}

// adapt calls f with the descriptor and returns its result; false if the descriptor is in Go's
// poller or closed.
func (r *rawConn) adapt(f func(fd uintptr) bool) bool {
	c := (*Conn)(r)
	if c.poller.Load() != nil || !c.acquire() {
		return false
	}
	defer c.release()
	return f(uintptr(c.fd))
}
