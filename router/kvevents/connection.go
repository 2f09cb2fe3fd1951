package kvevents

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"sluice/dataplane/zmtp"
	"sluice/router/worker"
)

const (
	// A connection that is lost is made again after about dialMin, and ever later, up to
	// dialMax, while nobody answers. The waits vary, so that engines that restarted
	// together are not all called at the same moment.
	dialMin = 100 * time.Millisecond
	dialMax = time.Second
	// handshake is for a connection to be made and its peer to introduce itself.
	handshake = 5 * time.Second
	// pingEvery is how long a connection may be silent before its peer is asked for a sign
	// of life, and pingWithin how long that may take.
	pingEvery  = 10 * time.Second
	pingWithin = 30 * time.Second
	// maxPeers bounds the connections at an endpoint that the feed binds.
	maxPeers = 8
	// readBytes is the buffer that a feed borrows while it reads.
	readBytes = 64 << 10
)

// publisherConn is one connection of a feed with a publisher.
type publisherConn struct {
	*zmtp.Stream
	lost      bool // its end was told to the feed
	drained   bool // there was nothing more to read
	lastHeard time.Time
	pinged    time.Time
}

// newConns are connections that were made and that the feed has not taken up yet.
type newConns struct {
	mu      sync.Mutex
	streams []*zmtp.Stream
	err     error // why there is none yet
	closed  bool
}

func (f *feed) streamOptions(kind string) zmtp.StreamOptions {
	// MaxFrame is ours to count; twice as much costs the connection, so that no peer can
	// make the process take memory without end.
	return zmtp.StreamOptions{Type: kind, Topic: f.source.Topic, MaxMessage: 2 * f.options.MaxFrame, Handshake: handshake}
}

// open begins to make or to accept connections.
func (f *feed) open() error {
	if err := zmtp.Check(f.source.Endpoint, f.source.Bind); err != nil {
		return err
	}
	if !f.source.Bind {
		f.dial(0)
		return nil
	}
	f.helpers.Go(f.listen)
	return nil
}

// listen binds the endpoint and accepts connections until the feed ends. A bind that fails is
// tried again with back-off: during a hot restart the previous process has the port until it
// releases its feeds.
func (f *feed) listen() {
	for wait := time.Duration(0); sleep(f.ctx, wait); wait = jittered(min(max(2*wait, dialMin), dialMax)) {
		acceptor, err := zmtp.Accept(f.source.Endpoint, f.streamOptions("SUB"))
		if err != nil {
			if wait == 0 {
				f.log.Warn("kv events: cannot bind the endpoint; retrying", "endpoint", f.source.Endpoint, "error", err)
			}
			f.setConnError(err)
			continue
		}
		stop := context.AfterFunc(f.ctx, acceptor.Close)
		acceptor.Run(f.ctx, maxPeers, f.addConn, f.setConnError)
		stop()
		acceptor.Close()
	}
}

// dial makes a connection on a goroutine of its own, as often as it takes.
func (f *feed) dial(wait time.Duration) {
	f.helpers.Go(func() {
		for sleep(f.ctx, wait) {
			s, err := zmtp.Connect(f.ctx, f.source.Endpoint, f.streamOptions("SUB"))
			if err == nil {
				f.addConn(s)
				return
			}
			f.setConnError(err)
			wait = jittered(min(max(2*wait, dialMin), dialMax))
		}
	})
}

// jittered is d, more or less.
func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d) }

// sleep is false when the context ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// addConn hands a new connection to the feed's goroutine.
func (f *feed) addConn(s *zmtp.Stream) {
	f.arrivals.mu.Lock()
	defer f.arrivals.mu.Unlock()
	if f.arrivals.closed || len(f.arrivals.streams) >= maxPeers {
		s.Close()
		return
	}
	f.arrivals.streams = append(f.arrivals.streams, s)
	f.wake()
}

func (f *feed) setConnError(err error) {
	f.arrivals.mu.Lock()
	f.arrivals.err = err
	f.arrivals.mu.Unlock()
}

func (f *feed) connError() error {
	f.arrivals.mu.Lock()
	defer f.arrivals.mu.Unlock()
	return f.arrivals.err
}

// wake wakes the feed's goroutine.
func (f *feed) wake() {
	select {
	case f.wakeCh <- struct{}{}:
	default:
	}
}

// close ends all connections; what makes new ones has ended when it returns.
func (f *feed) close() {
	f.cancel()
	f.arrivals.mu.Lock()
	f.arrivals.closed = true
	for _, s := range f.arrivals.streams {
		s.Close()
	}
	f.arrivals.streams = nil
	f.arrivals.mu.Unlock()
	for _, l := range f.conns {
		l.Close()
	}
	f.conns = nil
	f.helpers.Wait()
}

// connections is how many publishers are connected.
func (f *feed) connections() (n int) {
	for _, l := range f.conns {
		if !l.lost {
			n++
		}
	}
	return n
}

// watchConnection takes up what happened to connections. One that was lost and is
// back may lead to a new life of the engine whose numbers have already passed
// the one waited for, which the numbers alone would never tell.
func (f *feed) watchConnection() {
	for _, l := range f.conns {
		if l.Gone() && !l.lost {
			f.markLost(l)
		}
	}
	f.arrivals.mu.Lock()
	came := f.arrivals.streams
	f.arrivals.streams = nil
	f.arrivals.mu.Unlock()
	for _, s := range came {
		f.adoptConn(s)
	}
}

// markLost notes that a connection has ended. What came before its end is still read.
func (f *feed) markLost(l *publisherConn) {
	l.lost = true
	f.connected, f.suspect = false, f.known
	if f.source.Bind {
		// Not the engine's, perhaps: whoever comes to a port and leaves again is seen here.
		f.checkAt = time.Now().Add(f.options.RetryMin)
	} else {
		f.dial(jittered(dialMin))
	}
	// The next to answer may be another life, which holds nothing: what is in the
	// index is kept, and not believed until the engine has proven to be the same.
	if s := f.state(); s == worker.FeedLive || s == worker.FeedSyncing && !f.resume.pending {
		f.setState(worker.FeedBroken)
	}
}

// adoptConn takes up a new connection.
func (f *feed) adoptConn(s *zmtp.Stream) {
	if f.connections() >= maxPeers {
		s.Close()
		return
	}
	if err := f.poller.Watch(s, f.ready); err != nil {
		f.log.Error("kv events: a connection cannot be watched", "endpoint", f.source.Endpoint, "error", err)
		s.Close()
		if !f.source.Bind {
			f.dial(dialMax)
		}
		return
	}
	now := time.Now()
	f.conns = append(f.conns, &publisherConn{Stream: s, lastHeard: now})
	if f.pingAt.IsZero() {
		f.pingAt = now.Add(pingEvery)
	}
	f.connected, f.noConnectionAt = true, time.Time{}
	// Not the first: something may have been published in between, to nobody. That
	// the one before was lost need not have been told: at a port of ours an engine
	// may be back before it is known.
	if f.suspect || f.known {
		f.reconnected()
	}
}

// reconnected finds out whether the engine behind a new connection is the one
// behind the old. With replay it is asked for the last batch applied, which no
// other life can have made. Without, nothing can tell: the rank is cleared.
// What the old connection left behind may be of either life, so it is thrown away first:
// a replay asked for after that has what is of the new one.
func (f *feed) reconnected() {
	f.suspect = false
	f.inbox.clear()
	f.closeLost()
	if f.hasReplay() {
		f.catchUp(true, true)
		return
	}
	f.resetTrust("resets")
}

// closeLost closes the connections that were lost, with what could still be read there.
func (f *feed) closeLost() {
	open := f.conns[:0]
	for _, l := range f.conns {
		if l.lost {
			l.Close()
		} else {
			open = append(open, l)
		}
	}
	clear(f.conns[len(open):])
	f.conns = open
}

// fillFrom reads from a connection. It is false when nothing was there, or it has ended.
// What comes behind the last that was there the poller tells of.
func (f *feed) fillFrom(l *publisherConn, buf []byte) bool {
	if l.drained {
		return false
	}
	n, dry, err := l.Fill(buf)
	if l.drained = dry; err != nil {
		f.markEnded(l, err)
		return false
	}
	if n > 0 {
		l.lastHeard = time.Now()
	}
	return n > 0
}

// nextFrom gives the next message that was read from a connection.
func (f *feed) nextFrom(l *publisherConn) (zmtp.Message, bool) {
	m, ok, err := l.Next()
	if err != nil {
		f.markEnded(l, err)
	}
	return m, ok
}

// markEnded notes that nothing more can be read from a connection. It is closed later, by
// drain, as others may still go over the list.
func (f *feed) markEnded(l *publisherConn, err error) {
	if !l.lost {
		f.markLost(l)
		f.setConnError(err)
	}
	l.Close()
}

// ping asks connections that have been silent for a sign of life. A peer that cannot be
// asked is left to TCP's keep-alive.
func (f *feed) ping() {
	now := time.Now()
	f.pingAt = time.Time{}
	for _, l := range f.conns {
		if l.lost {
			continue
		}
		f.pingAt = now.Add(pingEvery)
		switch {
		case !l.Heartbeats() || now.Sub(l.lastHeard) < pingEvery:
		case l.pinged.After(l.lastHeard) && now.Sub(l.pinged) >= pingWithin:
			f.markEnded(l, errNoAnswer)
		case !l.pinged.After(l.lastHeard):
			l.pinged = now
			if err := l.Ping(); err != nil {
				f.markEnded(l, err)
			}
		}
	}
}

// verifyEngine asks the engine to prove itself after somebody has left a port of ours,
// who may have been anybody. Without an answer all stays as it is.
func (f *feed) verifyEngine() {
	f.checking = true
	f.catchUp(true, true)
	f.checking = false
	if f.state() == worker.FeedLive { // and so somebody is connected
		f.connected, f.suspect = true, false
	}
}

// warnNoConnection says that nobody has answered at the endpoint yet, as behind a firewall that
// lets HTTP through alone: the rank is not one that will be known in a moment.
func (f *feed) warnNoConnection() {
	f.noConnectionAt = time.Time{}
	if f.resume.pending {
		return // unresumed comes here again
	}
	f.log.Warn("kv events: no connection yet; the rank's overlap is unknown until there is one",
		"endpoint", f.source.Endpoint, "bind", f.source.Bind, "error", f.connError())
	if f.state() == worker.FeedSyncing {
		f.setState(worker.FeedBroken)
	}
}
