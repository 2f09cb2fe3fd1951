package notify

import (
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/zmtp"
)

// Options of a Board. Zero values take the defaults.
type Options struct {
	// Endpoint to bind, tcp://HOST:PORT; port * takes a free one. Required.
	Endpoint string
	Networks []netip.Prefix // whose connections are taken [any]
	TTL      time.Duration  // an arrival nobody asks for is kept this long [300s]
	Sweep    time.Duration  // between two looks for such [60s]
	Capacity int            // ids kept that nobody has asked for; further ones are dropped [65536]
	// Report is given every frame that is not msgpack: the reports of the
	// router's own connector, which come over the same socket. It borrows the
	// frame, says whether it was one, must not block, and is called by several
	// goroutines at a time. [none are taken]
	Report func(frame []byte) bool
	Log    *slog.Logger // [none]
}

// Stats are a board's counters since it was opened.
type Stats struct {
	Received  int64 // notifications taken in
	Early     int64 // of these, for an id nobody waited for at that time
	Unclaimed int64 // ids held now that nobody waits for
	Expired   int64 // ids dropped after TTL
	Dropped   int64 // notifications dropped for lack of room
	Foreign   int64 // messages that are no notification
	Malformed int64 // messages that could not be read, or of more than one frame
	Socket    zmtp.Stats
}

// Errors that callers tell apart.
var (
	ErrClosed    = errors.New("the notification board is closed")
	ErrDuplicate = errors.New("the request id is already waited for")
)

const (
	// maxFrame is ample for a notification, 27 bytes and the id. A peer that sends
	// more loses its connection.
	maxFrame = 4 << 10
	shards   = 16
)

// Listener receives notifications. All methods may be called from any goroutine.
type Listener struct {
	opt       Options
	pull      *zmtp.Pull
	seed      maphash.Seed
	table     [shards]shard
	sweepDone chan struct{} // run has returned
	closed    chan struct{} // Close has begun
	closing   sync.Once

	received, early, unclaimed, expired, dropped, foreign, malformed atomic.Int64
}

// shard is a part of the table with a lock of its own: requests come from many
// goroutines, and each holds it for one map operation.
type shard struct {
	mu      sync.Mutex
	entries map[string]*entry
	_       [48]byte // one cache line each
}

// Listen binds the socket and begins to receive.
func Listen(opt Options) (*Listener, error) {
	if opt.TTL <= 0 {
		opt.TTL = 300 * time.Second
	}
	if opt.Sweep <= 0 {
		opt.Sweep = 60 * time.Second
	}
	if opt.Capacity <= 0 {
		opt.Capacity = 65536
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	b := &Listener{opt: opt, seed: maphash.MakeSeed(), sweepDone: make(chan struct{}), closed: make(chan struct{})}
	for i := range b.table {
		b.table[i].entries = make(map[string]*entry)
	}
	var err error
	if b.pull, err = zmtp.Listen(zmtp.Options{Endpoint: opt.Endpoint, Networks: opt.Networks, Message: b.handleFrame, MaxFrame: maxFrame, Log: opt.Log}); err != nil {
		return nil, fmt.Errorf("notify: %w", err)
	}
	go b.run()
	return b, nil
}

// Endpoint is where the board is bound, with the port it was given.
func (b *Listener) Endpoint() string { return b.pull.Endpoint() }

// Expect registers the wait for n notifications of one request; those that have
// come already count. It fails with ErrDuplicate while another ticket of the id
// is open, and with ErrClosed. Close the ticket.
func (b *Listener) Expect(id string, n int) (*Expectation, error) {
	select {
	case <-b.closed:
		return nil, fmt.Errorf("notify: cannot wait for request %q: %w", id, ErrClosed)
	default:
	}
	if n < 1 {
		return nil, fmt.Errorf("notify: cannot wait for %d notifications of request %q; want 1 or more", n, id)
	}
	t := &Expectation{listener: b, id: id, need: n, done: make(chan struct{}), open: true}
	s := b.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[id]
	switch {
	case e == nil:
		e = &t.own
		s.entries[id] = e
	case e.expectation != nil:
		return nil, fmt.Errorf("notify: cannot wait for request %q: %w", id, ErrDuplicate)
	default:
		b.unclaimed.Add(-1)
	}
	e.expectation = t
	if e.received >= n {
		close(t.done)
	}
	return t, nil
}

// Done is closed when nobody can connect to the board any more: after Close, or when
// its socket failed under it.
func (b *Listener) Done() <-chan struct{} { return b.pull.Done() }

// Stats gives the counters.
func (b *Listener) Stats() Stats {
	socket := b.pull.Stats()
	return Stats{
		Received: b.received.Load(), Early: b.early.Load(), Unclaimed: b.unclaimed.Load(), Expired: b.expired.Load(),
		Dropped: b.dropped.Load(), Foreign: b.foreign.Load(), Malformed: b.malformed.Load() + socket.Multipart, Socket: socket,
	}
}

// Close ends the board and every wait. It may be called more than once.
func (b *Listener) Close() {
	b.closing.Do(func() {
		close(b.closed)
		b.pull.Close()
		<-b.sweepDone
	})
}

func (b *Listener) shard(id string) *shard {
	return &b.table[maphash.String(b.seed, id)%shards]
}
