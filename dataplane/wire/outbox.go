package wire

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
)

// transport is the socket below a Conn.
type transport interface {
	// write writes what the socket accepts at once, or everything if it may block. n < len(p) with
	// a nil error means that the socket is full. It is called by one goroutine at a time, without
	// the outbox's lock.
	write(p []byte) (n int, err error)
	// scheduleDelivery calls deliver for the outbox soon, here or elsewhere. gathered: other
	// senders have appended already, so deliver must not wait for more.
	scheduleDelivery(o *outbox, gathered bool)
	// waitWritable passes rest, which write did not accept, to the owner of the socket, who calls
	// resume when all of it has been sent. rest belongs to the transport until then.
	waitWritable(rest []byte)
	// close closes the connection after sending what write has accepted.
	close()
}

// outbox is what a connection still has to send. Any goroutine appends whole frames under mu. One
// at a time, the deliverer, writes what has gathered, so that concurrent senders share a system
// call.
//
// There are two buffers: one is filled while the other is written. They are reused once they have
// their size.
type outbox struct {
	transport  transport
	maxPending int // bytes that may be pending before senders wait

	mu         sync.Mutex
	queue      []byte
	spareBuf   []byte
	pending    int // appended and not yet accepted by the socket
	ownBytes   int // bytes of queue not bounded by credit: everything but items
	delivering bool
	closed     bool
	waiters    []*Stream // waiting for space
	failure    error     // why the outbox was closed

	streams atomic.Int64 // live streams, a hint of who else may append soon
}

var errClosed = errors.New("wire: the connection is closed")

// flushAppended must be called with mu held, after frames of n bytes were appended to queue. It
// unlocks mu and schedules the delivery.
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

// postFrame appends a frame of the connection's own, regardless of what is pending. It returns
// false if too many such frames wait already, for a peer that reads nothing but sends requests.
func (o *outbox) postFrame(k Kind, stream uint32, payload []byte) (ok bool) {
	o.mu.Lock()
	if o.closed || o.overOwnLimit() && k != Fail {
		defer o.mu.Unlock()
		return o.closed
	}
	o.appendOwnFrame(k, stream, payload)
	return true
}

// appendOwnFrame appends a frame that is not bounded by credit. mu must be held; it is unlocked.
func (o *outbox) appendOwnFrame(k Kind, stream uint32, payload []byte) {
	o.queue = appendFrame(o.queue, k, stream, payload)
	o.ownBytes += headerSize + len(payload)
	o.flushAppended(headerSize + len(payload))
}

// overOwnLimit reports whether more of the connection's own frames wait than its streams, with an
// END each, can explain. mu must be held.
func (o *outbox) overOwnLimit() bool { return o.ownBytes > max(o.maxPending, minOwnBytes) }

// minOwnBytes is what a connection's own frames may always take.
const minOwnBytes = 1 << 20

// maxRetainedQueue is the largest buffer that is reused.
const maxRetainedQueue = 256 << 10

// deliver writes until nothing is left or the socket is full. Only the goroutine that set
// delivering calls it.
func (o *outbox) deliver(gathered bool) {
	if !gathered && o.streams.Load() > 1 {
		runtime.Gosched() // lets other senders append first
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
			return // resume continues
		}
		o.onSent(n, buf)
	}
}

// resume continues the delivery after n bytes have been sent.
func (o *outbox) resume(n int) {
	o.onSent(n, nil)
	o.deliver(false)
}

// onSent subtracts n sent bytes and wakes goroutines that wait for space. buf is reused.
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

// close records that nothing is sent any more; true the first time.
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
