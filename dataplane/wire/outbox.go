package wire

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
)

// link is the socket below a Conn.
type link interface {
	// write writes what the socket takes at once, or all where it may block;
	// n < len(p) with a nil error: it is full. It is called by one goroutine at
	// a time, not under the outbox's lock.
	write(p []byte) (n int, err error)
	// kick has deliver called for the outbox, here or elsewhere, soon. gathered: what
	// others had to append is there, and this one must not wait for more.
	kick(o *outbox, gathered bool)
	// full hands rest, what write did not take, to whoever waits for room; it
	// calls resume when all of it has left. rest is the link's until then.
	full(rest []byte)
	// close ends the connection; what write took has been sent first.
	close()
}

// outbox is what a connection still has to send. Frames are appended whole
// under mu, by any goroutine; one of them at a time, the deliverer, writes what
// has gathered, so that senders who meet share a system call.
//
// There are two buffers: one is filled while the other is written. Neither is
// allocated again once it has its size.
type outbox struct {
	link link
	most int // bytes that may be pending before senders wait

	mu         sync.Mutex
	queue      []byte
	spare      []byte
	pending    int // appended and not yet taken by the socket
	own        int // of queue: what no credit bounds, all but items
	delivering bool
	closed     bool
	waiters    []*Stream // wait for room
	failure    error     // why it was closed

	streams atomic.Int64 // live ones, a hint of who else may append soon
}

var errClosed = errors.New("wire: the connection is closed")

// appended must be called with mu held, after frames of n bytes were appended
// to queue; it unlocks, and sees to it that they go out.
func (o *outbox) appended(n int) {
	o.pending += n
	if o.delivering {
		o.mu.Unlock()
		return
	}
	o.delivering = true
	o.mu.Unlock()
	o.link.kick(o, false)
}

// post appends a frame of the connection's own, whatever is pending. It is refused where
// too much of that kind waits already: a peer that reads nothing and asks on.
func (o *outbox) post(k Kind, stream uint32, payload []byte) (ok bool) {
	o.mu.Lock()
	if o.closed || o.flooded() && k != Fail {
		defer o.mu.Unlock()
		return o.closed
	}
	o.ownFrame(k, stream, payload)
	return true
}

// ownFrame appends a frame that no credit bounds. Called with mu held, which it unlocks.
func (o *outbox) ownFrame(k Kind, stream uint32, payload []byte) {
	o.queue = appendFrame(o.queue, k, stream, payload)
	o.own += headerSize + len(payload)
	o.appended(headerSize + len(payload))
}

// flooded says whether more of the connection's own frames wait than its streams, with an
// END each, could be the reason of. Called with mu held.
func (o *outbox) flooded() bool { return o.own > max(o.most, leastOwn) }

// leastOwn is what may wait of a connection's own frames, however little items may.
const leastOwn = 1 << 20

// keptQueue is the largest buffer that is kept for the next round.
const keptQueue = 256 << 10

// deliver writes until nothing is left or the socket is full. Only the one who
// set delivering calls it.
func (o *outbox) deliver(gathered bool) {
	if !gathered && o.streams.Load() > 1 {
		runtime.Gosched() // let those who are about to append do so first
	}
	for {
		o.mu.Lock()
		if len(o.queue) == 0 || o.closed {
			o.delivering = false
			o.mu.Unlock()
			return
		}
		buf := o.queue
		o.queue, o.spare, o.own = o.spare[:0], nil, 0
		o.mu.Unlock()
		n, err := o.link.write(buf)
		if err != nil {
			o.shut(err)
			o.link.close()
			return
		}
		if n < len(buf) {
			o.sent(n, nil)
			o.link.full(buf[n:])
			return // resume goes on
		}
		o.sent(n, buf)
	}
}

// resume goes on delivering; n bytes have left meanwhile.
func (o *outbox) resume(n int) {
	o.sent(n, nil)
	o.deliver(false)
}

// sent takes n bytes off what is pending and wakes those who wait for room. buf
// comes back to be filled again.
func (o *outbox) sent(n int, buf []byte) {
	o.mu.Lock()
	o.pending -= n
	if buf != nil && o.spare == nil && cap(buf) <= keptQueue {
		o.spare = buf[:0]
	}
	if len(o.waiters) > 0 && o.pending <= o.most/2 {
		for i, s := range o.waiters {
			s.signal()
			o.waiters[i] = nil
		}
		o.waiters = o.waiters[:0]
	}
	o.mu.Unlock()
}

// shut notes that nothing goes out any more; true the first time.
func (o *outbox) shut(why error) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return false
	}
	o.closed, o.failure = true, why
	o.delivering = false
	for i, s := range o.waiters {
		s.signal()
		o.waiters[i] = nil
	}
	o.waiters = nil
	return true
}
