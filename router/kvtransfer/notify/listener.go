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

// Options configures a Listener. Zero values select the defaults.
type Options struct {
	// Endpoint is the address to bind, tcp://HOST:PORT; port * selects a free one. Required.
	Endpoint string
	Networks []netip.Prefix // networks whose connections are accepted [any]
	TTL      time.Duration  // how long an unmatched notification is kept [300s]
	Sweep    time.Duration  // interval between removals of expired notifications [60s]
	Capacity int            // maximum number of unmatched ids; further ones are dropped [65536]
	// Report receives every frame that is not msgpack: the reports of the sluice connector
	// arrive at the same socket. Report returns whether the frame is a report. It borrows the
	// frame, must not block, and is called by several goroutines at a time. [such frames are
	// malformed]
	Report func(frame []byte) bool
	Log    *slog.Logger // [none]
}

// Stats are a listener's counters since it was opened.
type Stats struct {
	Received  int64 // notifications received
	Early     int64 // of these, received while no Expectation of their id was open
	Unmatched int64 // ids kept now for which no Expectation is open
	Expired   int64 // ids dropped after TTL
	Dropped   int64 // notifications dropped because Capacity was reached
	OtherType int64 // LMCache messages that are not notifications
	Malformed int64 // messages that cannot be parsed or have more than one frame
	Socket    zmtp.Stats
}

// Errors that callers distinguish with errors.Is.
var (
	ErrClosed    = errors.New("the listener is closed")
	ErrDuplicate = errors.New("another request waits for this id")
)

const (
	// maxFrame is ample for a notification, which is 27 bytes and the id. The listener closes
	// the connection of a peer that sends more.
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

	received, early, unmatched, expired, dropped, otherType, malformed atomic.Int64
}

// shard is a part of the table with its own lock. Notifications and requests come from many
// goroutines, and each holds the lock for one map operation.
type shard struct {
	mu      sync.Mutex
	entries map[string]*entry
	_       [48]byte // one cache line each
}

// Listen binds the socket and starts to receive.
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

// Endpoint returns the bound address with the actual port.
func (b *Listener) Endpoint() string { return b.pull.Endpoint() }

// Expect registers an Expectation of n notifications for one request. Notifications that have
// already arrived count. Expect fails with ErrDuplicate while another Expectation of the id is
// open, and with ErrClosed after Close. The caller must Close the Expectation.
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
		b.unmatched.Add(-1)
	}
	e.expectation = t
	if e.received >= n {
		close(t.done)
	}
	return t, nil
}

// Done is closed when the listener no longer accepts connections: after Close, or when its
// socket failed.
func (b *Listener) Done() <-chan struct{} { return b.pull.Done() }

// Stats returns the counters.
func (b *Listener) Stats() Stats {
	socket := b.pull.Stats()
	return Stats{
		Received: b.received.Load(), Early: b.early.Load(), Unmatched: b.unmatched.Load(), Expired: b.expired.Load(),
		Dropped: b.dropped.Load(), OtherType: b.otherType.Load(), Malformed: b.malformed.Load() + socket.Multipart, Socket: socket,
	}
}

// Close closes the socket and ends every wait. It may be called more than once.
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
