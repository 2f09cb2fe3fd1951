package front

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
)

// clientWatch is one connection's part in the watch for clients that leave.
//
// fasthttp does not read while a handler runs, so a close by the client goes
// unseen. The watcher's epoll instance tells of it. A descriptor is added at the
// first OnClientGone of its connection and stays until the connection is closed, so a
// watched request costs no system call in the steady state. Half a close by the
// client counts as leaving: nothing tells it apart from a close.
//
// Memory order: f is guarded by mu, and is called with mu held; so a set that
// returns leaves no call of an older f running. armed says that there is an f, and is
// taken back when its call has ended: a set of nothing where nothing is armed, which
// each request makes at its end, need not ask for mu. armed is stored before left is
// loaded by set, and left before armed is loaded by the watcher: one of the two sees the
// other and fires.
type clientWatch struct {
	mu       sync.Mutex
	handler  goneHandler
	isStream bool // f is a stream, which it ends, and nothing else
	armed    atomic.Bool
	gone     atomic.Bool // the client has gone
	id       uint64      // in the watcher; 0: not added
}

// goneHandler is called when a client leaves.
type goneHandler interface{ onClientGone() }

// goneFunc is a goner of a function.
type goneFunc func()

func (f goneFunc) onClientGone() { f() }

// setFunc makes f the call to make when the client leaves, nil for none. f must not
// call set.
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

// setStream is set of what ends a stream.
func (w *clientWatch) setStream(st *stream) {
	w.setHandler(st)
	w.mu.Lock()
	w.isStream = w.handler != nil
	w.mu.Unlock()
}

// cancelStream ends a stream whose client is there; false where there is none.
func (w *clientWatch) cancelStream() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.isStream || w.handler == nil {
		return false
	}
	w.notifyLocked()
	return true
}

// notify makes the call, if there is one to make.
func (w *clientWatch) notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.handler != nil {
		w.notifyLocked()
	}
}

// notifyLocked makes it, with mu.
func (w *clientWatch) notifyLocked() {
	f := w.handler
	w.handler = nil
	defer w.armed.Store(false)
	f.onClientGone()
}

// markGone notes that the client has gone.
func (w *clientWatch) markGone() {
	w.gone.Store(true)
	if w.armed.Load() {
		go w.notify()
	}
}

// clientWatcher waits on all watched connections with one goroutine.
//
// An id is a place of slots and a serial number, and not used again before four billion
// others were: an event that was on its way when its connection closed finds nothing,
// whatever descriptor number it came from.
type clientWatcher struct {
	poll *poller // nil where the system has none: clients are never seen to leave
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

// add begins to watch c; it is called by the goroutine that serves c. It does
// nothing when c is watched already or has no descriptor.
func (w *clientWatcher) add(c *conn) {
	if c.clientWatch.id != 0 || c.raw == nil || w.poll == nil {
		return
	}
	w.mu.Lock()
	if w.serial++; w.serial == 0 { // 0 is no id's
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

// remove ends the watch over c, which may be watched anew. It is called by the goroutine that
// serves c. The kernel would go on with it for as long as any process has c's socket.
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
