package kvevents

import (
	"context"
	"sync"
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/zmtp"
	"sluice/router/worker"
)

const (
	// A lost connection is retried after about dialMin, with back-off up to dialMax. The delays are
	// jittered, so that engines that restart together are not dialled at the same moment.
	dialMin = 100 * time.Millisecond
	dialMax = time.Second
	// handshake is the time limit for a connection and its ZMTP handshake.
	handshake = 5 * time.Second
	// pingEvery is the silence after which a peer is pinged, and pingWithin the time limit for its
	// answer.
	pingEvery  = 10 * time.Second
	pingWithin = 30 * time.Second
	// maxPeers bounds the connections at an endpoint that the feed binds.
	maxPeers = 8
	// readBytes is the size of the buffer that a feed borrows to read.
	readBytes = 64 << 10
)

// publisherConn is one connection of a feed to a publisher.
type publisherConn struct {
	*zmtp.Stream
	lost      bool // markLost was called
	drained   bool // the last read returned no data
	lastHeard time.Time
	pinged    time.Time
}

// newConns are established connections that the feed's goroutine has not adopted yet.
type newConns struct {
	mu      sync.Mutex
	streams []*zmtp.Stream
	err     error // why there is no connection
	closed  bool
}

func (f *feed) streamOptions(kind string) zmtp.StreamOptions {
	// The feed counts messages above MaxFrame. Twice that size ends the connection, so that no peer
	// can make the process allocate without bound.
	return zmtp.StreamOptions{Type: kind, Topic: f.source.Topic, MaxMessage: 2 * f.options.MaxFrame, Handshake: handshake}
}

// open starts to dial or to listen.
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
	var retry backoff.Backoff
	for wait := time.Duration(0); backoff.Sleep(f.ctx, wait); wait = backoff.Jitter(retry.Next(dialMin, dialMax)) {
		acceptor, err := zmtp.Accept(f.source.Endpoint, f.streamOptions("SUB"))
		if err != nil {
			if wait == 0 {
				f.log.Warn("kv events: cannot bind the endpoint; retrying", "endpoint", f.source.Endpoint, "error", err)
			}
			f.setConnError(err)
			continue
		}
		retry.Reset()
		stop := context.AfterFunc(f.ctx, acceptor.Close)
		acceptor.Run(f.ctx, maxPeers, f.addConn, f.setConnError)
		stop()
		acceptor.Close()
	}
}

// dial connects on a goroutine of its own and retries until it succeeds or the feed ends.
func (f *feed) dial(wait time.Duration) {
	f.helpers.Go(func() {
		var retry backoff.Backoff
		for backoff.Sleep(f.ctx, wait) {
			s, err := zmtp.Connect(f.ctx, f.source.Endpoint, f.streamOptions("SUB"))
			if err == nil {
				f.addConn(s)
				return
			}
			f.setConnError(err)
			wait = backoff.Jitter(retry.Next(dialMin, dialMax))
		}
	})
}

// addConn passes a new connection to the feed's goroutine.
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

// close closes all connections and returns when no goroutine makes new ones.
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

// connections returns the number of connected publishers.
func (f *feed) connections() (n int) {
	for _, l := range f.conns {
		if !l.lost {
			n++
		}
	}
	return n
}

// watchConnection handles lost and new connections. A connection that was lost and is back may lead
// to another incarnation of the engine whose sequence numbers have already passed the expected one,
// which the numbers alone would not show.
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

// markLost records that a connection has ended. Data that arrived before is still read.
func (f *feed) markLost(l *publisherConn) {
	l.lost = true
	f.connected, f.suspect = false, f.known
	if f.source.Bind {
		// The connection may not have been the engine's: any client that connects to the port and
		// leaves is seen here.
		f.checkAt = time.Now().Add(f.options.RetryMin)
	} else {
		f.dial(backoff.Jitter(dialMin))
	}
	// The next peer may be another incarnation, with an empty cache. The index keeps the rank's
	// blocks but does not use them until the engine has proven that it is the same incarnation.
	if s := f.state(); s == worker.FeedLive || s == worker.FeedSyncing && !f.resume.pending {
		f.setState(worker.FeedBroken)
	}
}

// adoptConn makes a new connection one of the feed's.
func (f *feed) adoptConn(s *zmtp.Stream) {
	if f.connections() >= maxPeers {
		s.Close()
		return
	}
	if err := f.poller.Watch(s, f.ready); err != nil {
		f.log.Error("kv events: cannot watch a connection", "endpoint", f.source.Endpoint, "error", err)
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
	// This is not the first connection: messages may have been published while there was none. The
	// loss of the previous one may not have been noticed yet: at a bound port an engine can
	// reconnect before that.
	if f.suspect || f.known {
		f.reconnected()
	}
}

// reconnected determines whether the engine behind a new connection is the same incarnation as
// before. With a replay endpoint it requests the last applied batch, which no other incarnation can
// have published. Without one this is unknown, so the rank is cleared. Unread data of the old
// connection may belong to either incarnation, so it is discarded first; a replay requested
// afterwards contains what belongs to the new one.
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

// closeLost closes the lost connections and discards their unread data.
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

// fillFrom reads from a connection. It returns false if there was no data or the connection has
// ended. The poller reports data that arrives later.
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

// nextFrom returns the next message that was read from a connection.
func (f *feed) nextFrom(l *publisherConn) (zmtp.Message, bool) {
	m, ok, err := l.Next()
	if err != nil {
		f.markEnded(l, err)
	}
	return m, ok
}

// markEnded records that nothing more can be read from a connection. drain closes it later, because
// callers may be iterating over the list.
func (f *feed) markEnded(l *publisherConn, err error) {
	if !l.lost {
		f.markLost(l)
		f.setConnError(err)
	}
	l.Close()
}

// ping pings connections that have been silent. A peer without ZMTP heartbeats is left to TCP
// keep-alive.
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

// verifyEngine makes the engine prove its identity after a peer, which may have been any client,
// has left a bound port. Without an answer nothing changes.
func (f *feed) verifyEngine() {
	f.checking = true
	f.catchUp(true, true)
	f.checking = false
	if f.state() == worker.FeedLive { // a publisher is connected
		f.connected, f.suspect = true, false
	}
}

// warnNoConnection logs that nothing has answered at the endpoint yet, for example because a
// firewall lets only HTTP through. The rank then counts as broken instead of about to sync.
func (f *feed) warnNoConnection() {
	f.noConnectionAt = time.Time{}
	if f.resume.pending {
		return // dropUnverified calls this method again
	}
	f.log.Warn("kv events: no connection yet; the rank's overlap is unknown until there is one",
		"endpoint", f.source.Endpoint, "bind", f.source.Bind, "error", f.connError())
	if f.state() == worker.FeedSyncing {
		f.setState(worker.FeedBroken)
	}
}
