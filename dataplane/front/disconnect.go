package front

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
)

// clientWatch is the state of one connection in the clientWatcher, which detects clients that
// disconnect.
//
// No goroutine reads from the connection while a Handler runs, so the server would not see
// the client close it. The watcher's epoll instance does. A descriptor is added at the first
// OnClientGone of its connection and stays until the connection is closed, so that a watched
// request needs no system call in the steady state. A half-close by the client counts as a
// disconnect, because it cannot be distinguished from a close.
//
// Memory order: mu guards handler and is held while the handler runs, so that no older handler
// runs after setHandler has returned. armed says that there is a handler, and is cleared when
// its call has ended: setHandler(nil) without a handler, which every request calls at its
// end, does not need mu. setHandler stores armed before it loads gone, and the watcher stores
// gone before it loads armed. Therefore at least one of them sees the other and calls the
// handler.
type clientWatch struct {
	mu       sync.Mutex
	handler  goneHandler
	isStream bool // handler is a stream
	armed    atomic.Bool
	gone     atomic.Bool // the client has gone
	id       uint64      // in the watcher; 0: not watched
}

// goneHandler is called when the client has disconnected.
type goneHandler interface{ onClientGone() }

// goneFunc is a function as goneHandler.
type goneFunc func()

func (f goneFunc) onClientGone() { f() }

// setFunc sets the function to call when the client disconnects, nil for none. f must not call
// setFunc.
func (w *clientWatch) setFunc(f func()) {
	if f == nil {
		w.setHandler(nil)
	} else {
		w.setHandler(goneFunc(f))
	}
}

func (w *clientWatch) setHandler(f goneHandler) {
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

// setStream sets st as handler, whose call ends the stream.
func (w *clientWatch) setStream(st *stream) {
	w.setHandler(st)
	w.mu.Lock()
	w.isStream = w.handler != nil
	w.mu.Unlock()
}

// cancelStream ends the connection's stream. It returns false if there is none.
func (w *clientWatch) cancelStream() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.isStream || w.handler == nil {
		return false
	}
	w.notifyLocked()
	return true
}

// notify calls the handler if there is one.
func (w *clientWatch) notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.handler != nil {
		w.notifyLocked()
	}
}

// notifyLocked calls the handler. The caller holds mu.
func (w *clientWatch) notifyLocked() {
	f := w.handler
	w.handler = nil
	defer w.armed.Store(false)
	f.onClientGone()
}

// markGone records that the client has disconnected.
func (w *clientWatch) markGone() {
	w.gone.Store(true)
	if w.armed.Load() {
		go w.notify()
	}
}

// clientWatcher waits on all watched connections with one goroutine.
//
// An id is an index of slots and a serial number, and is reused only after four billion
// others. Therefore a late event of a closed connection finds no connection, even if its
// descriptor number is in use again.
type clientWatcher struct {
	poll *poller // nil: the system has none, and disconnects are not detected
	done chan struct{}

	mu     sync.Mutex
	slots  []*conn
	free   []uint32
	serial uint32
}

func newClientWatcher() (*clientWatcher, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	w := &clientWatcher{poll: p, done: make(chan struct{})}
	if p == nil {
		close(w.done)
		return w, nil
	}
	go func() {
		defer close(w.done)
		p.run(w.event)
	}()
	return w, nil
}

func (w *clientWatcher) event(id uint64) {
	w.mu.Lock()
	var c *conn
	if slot := uint32(id); int(slot) < len(w.slots) && w.slots[slot] != nil && w.slots[slot].clientWatch.id == id {
		c = w.slots[slot]
	}
	w.mu.Unlock()
	if c != nil {
		c.clientWatch.markGone()
	}
}

// add starts to watch c. The goroutine that serves c calls it. It does nothing if c is watched
// already or has no descriptor.
func (w *clientWatcher) add(c *conn) {
	if c.clientWatch.id != 0 || c.raw == nil || w.poll == nil {
		return
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
	c.clientWatch.id = id
	w.mu.Unlock()
	if err := w.poll.add(c.raw, id); err != nil {
		if errors.Is(err, net.ErrClosed) {
			c.clientWatch.markGone()
			return
		}
		c.srv.initial.Log.Warn("cannot watch a connection", "error", err)
	}
}

func (w *clientWatcher) freeSlot(c *conn) {
	if c.clientWatch.id == 0 {
		return
	}
	w.mu.Lock()
	slot := uint32(c.clientWatch.id)
	w.slots[slot] = nil
	w.free = append(w.free, slot)
	w.mu.Unlock()
}

// remove stops watching c, which may be added again. The goroutine that serves c calls it.
// Without it the kernel would report events for as long as any process has c's socket.
func (w *clientWatcher) remove(c *conn) {
	if c.clientWatch.id == 0 {
		return
	}
	if w.poll != nil {
		_ = c.raw.Control(func(fd uintptr) { w.poll.remove(int(fd)) })
	}
	w.freeSlot(c)
	c.clientWatch.id = 0
}

func (w *clientWatcher) close() {
	if w.poll != nil {
		w.poll.close()
	}
	<-w.done
}
