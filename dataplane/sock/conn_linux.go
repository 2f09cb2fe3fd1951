package sock

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

// Conn is a connection that was accepted by hand. It is a net.Conn and a syscall.Conn, for
// the goroutines that may use those. Its descriptor is in no poller until something had to
// be waited for; from then on it is an os.File's. Go's poller takes 512 bytes for each
// descriptor that it has had at once, and never gives them back: a client whose request
// was there when it was accepted, and whose stream a loop drives then, costs none. Before
// it waits a deadline that is over ends nothing.
//
// Nobody but Conn closes the descriptor, and that once, when nobody uses it: closed
// earlier its number could be another client's. Each use is counted, and none begins after
// Close. What waits in the poller is no use: it ends when the file is closed.
//
// Memory order: uses orders all. waits is stored within a use, under mu, and stays; so who
// closes the descriptor sees whose it is. mu guards the deadlines until then.
type Conn struct {
	fd      int32
	uses    atomic.Uint32 // aUse for each, and wasClosed
	mu      sync.Mutex
	waits   atomic.Pointer[waiting]
	readBy  time.Duration // since epoch, 0 for never
	writeBy time.Duration
}

const (
	wasClosed = 1
	aUse      = 2
)

// waiting is the descriptor in Go's poller.
type waiting struct {
	file *os.File
	raw  syscall.RawConn
}

var epoch = time.Now()

// use begins a use of the descriptor; false when it is closed.
func (c *Conn) use() bool {
	for {
		n := c.uses.Load()
		if n&wasClosed != 0 {
			return false
		}
		if c.uses.CompareAndSwap(n, n+aUse) {
			return true
		}
	}
}

// done ends it.
func (c *Conn) done() {
	if c.uses.Add(^uint32(aUse-1)) == wasClosed {
		c.end()
	}
}

// Close ends what waits, and closes the descriptor once the uses under way are over.
func (c *Conn) Close() error {
	switch c.uses.Or(wasClosed) {
	case 0:
		c.end()
	case wasClosed:
		return net.ErrClosed
	}
	return nil
}

// end closes the descriptor; of Close and done one calls it, once.
func (c *Conn) end() {
	if w := c.waits.Load(); w != nil {
		_ = w.file.Close()
		return
	}
	_ = unix.Close(int(c.fd))
}

// await puts the descriptor into Go's poller, where it is not there.
func (c *Conn) await() (*waiting, error) {
	if w := c.waits.Load(); w != nil {
		return w, nil
	}
	if !c.use() {
		return nil, net.ErrClosed
	}
	defer c.done()
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.waits.Load(); w != nil {
		return w, nil
	}
	w := &waiting{file: os.NewFile(uintptr(c.fd), "client")}
	err := w.begin(c.readBy, c.writeBy)
	c.waits.Store(w) // whatever came of it, the descriptor is the file's
	return w, err
}

func (w *waiting) begin(readBy, writeBy time.Duration) (err error) {
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

// Read is net.Conn's.
func (c *Conn) Read(p []byte) (int, error) {
	if c.waits.Load() == nil && len(p) > 0 {
		if !c.use() {
			return 0, net.ErrClosed
		}
		n, errno := Recv(int(c.fd), p)
		c.done()
		switch {
		case errno == 0 && n == 0:
			return 0, io.EOF
		case errno == 0:
			return n, nil
		case errno != syscall.EAGAIN:
			return 0, os.NewSyscallError("recvfrom", errno)
		}
	}
	w, err := c.await()
	if err != nil {
		return 0, err
	}
	n, err := w.file.Read(p)
	return n, c.failure(err)
}

// Write is net.Conn's.
func (c *Conn) Write(p []byte) (n int, err error) {
	if c.waits.Load() == nil {
		if !c.use() {
			return 0, net.ErrClosed
		}
		var errno syscall.Errno
		n, errno = Send(int(c.fd), p)
		c.done()
		switch errno {
		case 0:
			return n, nil
		case syscall.EAGAIN:
		default:
			return n, os.NewSyscallError("sendto", errno)
		}
	}
	w, err := c.await()
	if err != nil {
		return n, err
	}
	more, err := w.file.Write(p[n:])
	return n + more, c.failure(err)
}

// failure is what a wait failed with: what a file says of its end is no error of os or net.
func (c *Conn) failure(err error) error {
	if err != nil && c.uses.Load()&wasClosed != 0 {
		return net.ErrClosed
	}
	return err
}

// CloseWrite is net.TCPConn's.
func (c *Conn) CloseWrite() (err error) {
	if !c.use() {
		return net.ErrClosed
	}
	defer c.done()
	return os.NewSyscallError("shutdown", unix.Shutdown(int(c.fd), unix.SHUT_WR))
}

// SetDeadline is net.Conn's.
func (c *Conn) SetDeadline(t time.Time) error { return c.setDeadlines(t, true, true) }

// SetReadDeadline is net.Conn's.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadlines(t, true, false) }

// SetWriteDeadline is net.Conn's.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadlines(t, false, true) }

func (c *Conn) setDeadlines(t time.Time, read, write bool) error {
	w := c.waits.Load()
	if w == nil {
		if w = c.note(t, read, write); w == nil {
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

// note keeps deadlines for when something is waited for; unless it is already.
func (c *Conn) note(t time.Time, read, write bool) *waiting {
	by := time.Duration(0)
	if !t.IsZero() {
		by = max(t.Sub(epoch), 1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.waits.Load(); w != nil {
		return w
	}
	if read {
		c.readBy = by
	}
	if write {
		c.writeBy = by
	}
	return nil
}

// LocalAddr is net.Conn's.
func (c *Conn) LocalAddr() net.Addr { return c.name(unix.SYS_GETSOCKNAME) }

// RemoteAddr is net.Conn's.
func (c *Conn) RemoteAddr() net.Addr { return c.name(unix.SYS_GETPEERNAME) }

// name is one of its addresses, no valid one where it has none any more.
func (c *Conn) name(call uintptr) net.Addr {
	var a Address
	if c.use() {
		size := uint32(len(a.raw))
		_, _, _ = syscall.RawSyscall(call, uintptr(c.fd), uintptr(unsafe.Pointer(&a.raw)), uintptr(unsafe.Pointer(&size)))
		c.done()
	}
	return net.TCPAddrFromAddrPort(a.AddrPort())
}

// SyscallConn is syscall.Conn's.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return (*rawConn)(c), nil }

// rawConn is Conn as a syscall.RawConn.
type rawConn Conn

func (r *rawConn) Control(f func(fd uintptr)) error {
	c := (*Conn)(r)
	if !c.use() {
		return net.ErrClosed
	}
	defer c.done()
	f(uintptr(c.fd))
	return nil
}

func (r *rawConn) Read(f func(fd uintptr) bool) error {
	if r.tried(f) {
		return nil
	}
	w, err := (*Conn)(r).await()
	if err != nil {
		return err
	}
	return (*Conn)(r).failure(w.raw.Read(f))
}

func (r *rawConn) Write(f func(fd uintptr) bool) error {
	if r.tried(f) {
		return nil
	}
	w, err := (*Conn)(r).await()
	if err != nil {
		return err
	}
	return (*Conn)(r).failure(w.raw.Write(f))
}

// tried says that f has done what it does without a wait.
func (r *rawConn) tried(f func(fd uintptr) bool) bool {
	c := (*Conn)(r)
	if c.waits.Load() != nil || !c.use() {
		return false
	}
	defer c.done()
	return f(uintptr(c.fd))
}
