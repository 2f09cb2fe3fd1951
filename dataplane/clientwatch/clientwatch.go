// Package clientwatch detects clients that disconnect while nobody reads from their connection.
//
// No goroutine reads from a connection while its request is handled, so the server would not see
// the client close it. The epoll instance of a Watcher does. A half-close by the client counts as a
// disconnect, because it cannot be distinguished from a close.
package clientwatch

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"sluice/dataplane/epoll"
)

// Watch is the state of one connection, which embeds it or has it as a field. The zero value
// is not watched and has no handler.
//
// Memory order: mu guards handler and is held while the handler runs, so that no older handler
// runs after SetHandler has returned. armed says that there is a handler, and is cleared when
// its call has ended: SetHandler(nil) without a handler, which every request calls at its
// end, does not need mu. SetHandler stores armed before it loads gone, and the watcher stores
// gone before it loads armed. Therefore at least one of them sees the other and calls the
// handler.
type Watch struct {
	mu       sync.Mutex
	handler  Handler
	isStream bool // handler is a stream
	armed    atomic.Bool
	gone     atomic.Bool // the client has gone
	id       uint64      // in the watcher; 0: not watched
}

// Handler is called when the client has disconnected, once and with the watch locked: it must not
// set another handler.
type Handler interface{ OnClientGone() }

// handlerFunc is a function as Handler.
type handlerFunc func()

func (f handlerFunc) OnClientGone() { f() }

// SetFunc sets the function to call when the client disconnects, nil for none. f must not call
// SetFunc.
func (w *Watch) SetFunc(f func()) {
	if f == nil {
		w.SetHandler(nil)
	} else {
		w.SetHandler(handlerFunc(f))
	}
}

// SetHandler sets the handler to call when the client disconnects, nil for none. If the client has
// gone already, it is called by a new goroutine. When SetHandler returns, the handler before has
// either ended or will not be called.
func (w *Watch) SetHandler(f Handler) {
	if f == nil && !w.armed.Load() {
		return
	}
	w.mu.Lock()
	w.handler, w.isStream = f, false
	w.armed.Store(f != nil)
	w.mu.Unlock()
	if f != nil && w.gone.Load() {
		go w.notify()
	}
}

// SetStream sets a handler whose call ends a stream, for CancelStream.
func (w *Watch) SetStream(f Handler) {
	w.SetHandler(f)
	w.mu.Lock()
	w.isStream = w.handler != nil
	w.mu.Unlock()
}

// CancelStream calls the handler of SetStream. It returns false if there is none.
func (w *Watch) CancelStream() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.isStream || w.handler == nil {
		return false
	}
	w.notifyLocked()
	return true
}

// Gone reports whether the client is known to have disconnected.
func (w *Watch) Gone() bool { return w.gone.Load() }

// Watched reports whether a Watcher watches the connection.
func (w *Watch) Watched() bool { return w.id != 0 }

// MarkGone records that the client has disconnected and has a new goroutine call the handler.
func (w *Watch) MarkGone() {
	w.gone.Store(true)
	if w.armed.Load() {
		go w.notify()
	}
}

// notify calls the handler if there is one.
func (w *Watch) notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.handler != nil {
		w.notifyLocked()
	}
}

// notifyLocked calls the handler. The caller holds mu.
func (w *Watch) notifyLocked() {
	f := w.handler
	w.handler = nil
	defer w.armed.Store(false)
	f.OnClientGone()
}

// Watcher waits on all watched connections with one goroutine.
//
// A descriptor is added at the first need of its connection and stays until the connection is
// closed, so that a watched request needs no system call in the steady state.
//
// An id is an index of slots and a serial number, and is reused only after four billion
// others. Therefore a late event of a closed connection finds no connection, even if its
// descriptor number is in use again.
type Watcher struct {
	poll *epoll.Poller // nil: the system has none, and disconnects are not detected
	done chan struct{}

	mu     sync.Mutex
	slots  []*Watch
	free   []uint32
	serial uint32
}

// NewWatcher starts a Watcher, whose goroutine ends at Close.
func NewWatcher() (*Watcher, error) {
	p, err := epoll.New()
	if err != nil {
		return nil, err
	}
	w := &Watcher{poll: p, done: make(chan struct{})}
	if p == nil {
		close(w.done)
		return w, nil
	}
	go func() {
		defer close(w.done)
		p.Run(w.event)
	}()
	return w, nil
}

func (w *Watcher) event(id uint64) {
	w.mu.Lock()
	var gone *Watch
	if slot := uint32(id); int(slot) < len(w.slots) && w.slots[slot] != nil && w.slots[slot].id == id {
		gone = w.slots[slot]
	}
	w.mu.Unlock()
	if gone != nil {
		gone.MarkGone()
	}
}

// Add starts to watch the connection of c, whose descriptor is conn's. It does nothing if c is
// watched already or conn is nil. The goroutine that serves the connection calls it.
func (w *Watcher) Add(c *Watch, conn syscall.RawConn) error {
	if c.id != 0 || conn == nil || w.poll == nil {
		return nil
	}
	w.mu.Lock()
	if w.serial++; w.serial == 0 { // id 0 means not watched
		w.serial = 1
	}
	slot := uint32(len(w.slots))
	if n := len(w.free); n > 0 {
		slot, w.free = w.free[n-1], w.free[:n-1]
		w.slots[slot] = c
	} else {
		w.slots = append(w.slots, c)
	}
	id := uint64(w.serial)<<32 | uint64(slot)
	c.id = id
	w.mu.Unlock()
	err := w.poll.Add(conn, id)
	if errors.Is(err, net.ErrClosed) {
		c.MarkGone()
		return nil
	}
	return err
}

// Forget stops watching a connection that is being closed.
func (w *Watcher) Forget(c *Watch) {
	if c.id == 0 {
		return
	}
	w.mu.Lock()
	slot := uint32(c.id)
	w.slots[slot] = nil
	w.free = append(w.free, slot)
	w.mu.Unlock()
}

// Remove stops watching c, which may be added again. The goroutine that serves the connection
// calls it. Without it the kernel would report events for as long as any process has the socket.
func (w *Watcher) Remove(c *Watch, conn syscall.RawConn) {
	if c.id == 0 {
		return
	}
	if w.poll != nil {
		_ = conn.Control(func(fd uintptr) { w.poll.Remove(int(fd)) })
	}
	w.Forget(c)
	c.id = 0
}

// Len returns how many connections are watched.
func (w *Watcher) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.slots) - len(w.free)
}

// Close ends the goroutine and waits for it.
func (w *Watcher) Close() {
	if w.poll != nil {
		w.poll.Close()
	}
	<-w.done
}
