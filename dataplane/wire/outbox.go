package wire

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
)

// transport is the socket below a Conn.
type transport interface {
	// write writes what the socket takes at once, or all where it may block;
	// n < len(p) with a nil error: it is full. It is called by one goroutine at
	// a time, not under the outbox's lock.
	write(p []byte) (n int, err error)
	// kick has deliver called for the outbox, here or elsewhere, soon. gathered: what
	// others had to append is there, and this one must not wait for more.
	scheduleDelivery(o *outbox, gathered bool)
	// full hands rest, what write did not take, to whoever waits for room; it
	// calls resume when all of it has left. rest is the link's until then.
	waitWritable(rest []byte)
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
	transport  transport
	maxPending int // bytes that may be pending before senders wait

	mu         sync.Mutex
	queue      []byte
	spareBuf   []byte
	pending    int // appended and not yet taken by the socket
	ownBytes   int // of queue: what no credit bounds, all but items
	delivering bool
	closed     bool
	waiters    []*Stream // wait for room
	failure    error     // why it was closed

	streams atomic.Int64 // live ones, a hint of who else may append soon
}

var errClosed = errors.New("wire: the connection is closed")

// flushAppended must be called with mu held, after frames of n bytes were appended
// to queue; it unlocks, and sees to it that they go out.
func (o *outbox) flushAppended(n int) {
	o.pending += n
	if o.delivering {
		o.mu.Unlock()
		return
	}
	o.delivering = true
	o.mu.Unlock()
	o.transport.scheduleDelivery(o, false)
}

// postFrame appends a frame of the connection's own, whatever is pending. It is refused where
// too much of that kind waits already: a peer that reads nothing and asks on.
func (o *outbox) postFrame(k Kind, stream uint32, payload []byte) (ok bool) {
	o.mu.Lock()
	if o.closed || o.overOwnLimit() && k != Fail {
		defer o.mu.Unlock()
		return o.closed
	}
	o.appendOwnFrame(k, stream, payload)
	return true
}

// appendOwnFrame appends a frame that no credit bounds. Called with mu held, which it unlocks.
func (o *outbox) appendOwnFrame(k Kind, stream uint32, payload []byte) {
	o.queue = appendFrame(o.queue, k, stream, payload)
	o.ownBytes += headerSize + len(payload)
	o.flushAppended(headerSize + len(payload))
}

// overOwnLimit says whether more of the connection's own frames wait than its streams, with an
// END each, could be the reason of. Called with mu held.
func (o *outbox) overOwnLimit() bool { return o.ownBytes > max(o.maxPending, minOwnBytes) }

// minOwnBytes is what may wait of a connection's own frames, however little items may.
const minOwnBytes = 1 << 20

// maxRetainedQueue is the largest buffer that is kept for the next round.
const maxRetainedQueue = 256 << 10

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
		o.queue, o.spareBuf, o.ownBytes = o.spareBuf[:0], nil, 0
		o.mu.Unlock()
		n, err := o.transport.write(buf)
		if err != nil {
			o.close(err)
			o.transport.close()
			return
		}
		if n < len(buf) {
			o.onSent(n, nil)
			o.transport.waitWritable(buf[n:])
			return // resume goes on
		}
		o.onSent(n, buf)
	}
}

// resume goes on delivering; n bytes have left meanwhile.
func (o *outbox) resume(n int) {
	o.onSent(n, nil)
	o.deliver(false)
}

// onSent takes n bytes off what is pending and wakes those who wait for room. buf
// comes back to be filled again.
func (o *outbox) onSent(n int, buf []byte) {
	o.mu.Lock()
	o.pending -= n
	if buf != nil && o.spareBuf == nil && cap(buf) <= maxRetainedQueue {
		o.spareBuf = buf[:0]
	}
	if len(o.waiters) > 0 && o.pending <= o.maxPending/2 {
		for i, s := range o.waiters {
			s.signal()
			o.waiters[i] = nil
		}
		o.waiters = o.waiters[:0]
	}
	o.mu.Unlock()
}

// close notes that nothing goes out any more; true the first time.
func (o *outbox) close(why error) bool {
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
