package kvevents

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"sluice/nixl/zmtp"
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

// line is one connection of a feed with a publisher.
type line struct {
	*zmtp.Stream
	lost   bool // its end was told to the feed
	dry    bool // there was nothing more to read
	heard  time.Time
	pinged time.Time
}

// arrivals are connections that were made and that the feed has not taken up yet.
type arrivals struct {
	mu      sync.Mutex
	streams []*zmtp.Stream
	trouble error // why there is none yet
	closed  bool
}

func (f *feed) streamOptions(kind string) zmtp.StreamOptions {
	// MaxFrame is ours to count; twice as much costs the connection, so that no peer can
	// make the process take memory without end.
	return zmtp.StreamOptions{Type: kind, Topic: f.src.Topic, MaxMessage: 2 * f.opt.MaxFrame, Handshake: handshake}
}

// open begins to make or to accept connections.
func (f *feed) open() error {
	if err := zmtp.Check(f.src.Endpoint, f.src.Bind); err != nil {
		return err
	}
	if !f.src.Bind {
		f.dial(0)
		return nil
	}
	acceptor, err := zmtp.Accept(f.src.Endpoint, f.streamOptions("SUB"))
	if err != nil {
		return err
	}
	f.acceptor = acceptor
	f.helpers.Go(func() { acceptor.Run(f.ctx, maxPeers, f.arrive, f.noteTrouble) })
	return nil
}

// dial makes a connection on a goroutine of its own, as often as it takes.
func (f *feed) dial(wait time.Duration) {
	f.helpers.Go(func() {
		for sleep(f.ctx, wait) {
			s, err := zmtp.Connect(f.ctx, f.src.Endpoint, f.streamOptions("SUB"))
			if err == nil {
				f.arrive(s)
				return
			}
			f.noteTrouble(err)
			wait = varied(min(max(2*wait, dialMin), dialMax))
		}
	})
}

// varied is d, more or less.
func varied(d time.Duration) time.Duration { return d/2 + rand.N(d) }

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

// arrive hands a new connection to the feed's goroutine.
func (f *feed) arrive(s *zmtp.Stream) {
	f.came.mu.Lock()
	defer f.came.mu.Unlock()
	if f.came.closed || len(f.came.streams) >= maxPeers {
		s.Close()
		return
	}
	f.came.streams = append(f.came.streams, s)
	f.ring()
}

func (f *feed) noteTrouble(err error) {
	f.came.mu.Lock()
	f.came.trouble = err
	f.came.mu.Unlock()
}

func (f *feed) trouble() error {
	f.came.mu.Lock()
	defer f.came.mu.Unlock()
	return f.came.trouble
}

// ring wakes the feed's goroutine.
func (f *feed) ring() {
	select {
	case f.bell <- struct{}{}:
	default:
	}
}

// close ends all connections; what makes new ones has ended when it returns.
func (f *feed) close() {
	f.cancel()
	if f.acceptor != nil {
		f.acceptor.Close()
	}
	f.came.mu.Lock()
	f.came.closed = true
	for _, s := range f.came.streams {
		s.Close()
	}
	f.came.streams = nil
	f.came.mu.Unlock()
	for _, l := range f.lines {
		l.Close()
	}
	f.lines = nil
	f.helpers.Wait()
}

// connections is how many publishers are connected.
func (f *feed) connections() (n int) {
	for _, l := range f.lines {
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
	for _, l := range f.lines {
		if l.Gone() && !l.lost {
			f.lose(l)
		}
	}
	f.came.mu.Lock()
	came := f.came.streams
	f.came.streams = nil
	f.came.mu.Unlock()
	for _, s := range came {
		f.join(s)
	}
}

// lose notes that a connection has ended. What came before its end is still read.
func (f *feed) lose(l *line) {
	l.lost = true
	f.connected, f.suspect = false, f.known
	if f.src.Bind {
		// Not the engine's, perhaps: whoever comes to a port and leaves again is seen here.
		f.checkAt = time.Now().Add(f.opt.RetryMin)
	} else {
		f.dial(varied(dialMin))
	}
	// The next to answer may be another life, which holds nothing: what is in the
	// index is kept, and not believed until the engine has proven to be the same.
	if s := f.state(); s == worker.FeedLive || s == worker.FeedSyncing && !f.resuming.pending {
		f.setState(worker.FeedBroken)
	}
}

// join takes up a new connection.
func (f *feed) join(s *zmtp.Stream) {
	if f.connections() >= maxPeers {
		s.Close()
		return
	}
	if err := f.poller.Watch(s, f.ready); err != nil {
		f.log.Error("kv events: a connection cannot be watched", "endpoint", f.src.Endpoint, "error", err)
		s.Close()
		if !f.src.Bind {
			f.dial(dialMax)
		}
		return
	}
	now := time.Now()
	f.lines = append(f.lines, &line{Stream: s, heard: now})
	if f.pingAt.IsZero() {
		f.pingAt = now.Add(pingEvery)
	}
	f.connected, f.unheardAt = true, time.Time{}
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
	f.waiting.drop()
	f.leaveLost()
	if f.canAsk() {
		f.catchUp(true, true)
		return
	}
	f.begins("resets")
}

// leaveLost closes the connections that were lost, with what could still be read there.
func (f *feed) leaveLost() {
	kept := f.lines[:0]
	for _, l := range f.lines {
		if l.lost {
			l.Close()
		} else {
			kept = append(kept, l)
		}
	}
	clear(f.lines[len(kept):])
	f.lines = kept
}

// fillFrom reads from a connection. It is false when nothing was there, or it has ended.
// What comes behind the last that was there the poller tells of.
func (f *feed) fillFrom(l *line, buf []byte) bool {
	if l.dry {
		return false
	}
	n, dry, err := l.Fill(buf)
	if l.dry = dry; err != nil {
		f.ended(l, err)
		return false
	}
	if n > 0 {
		l.heard = time.Now()
	}
	return n > 0
}

// nextOf gives the next message that was read from a connection.
func (f *feed) nextOf(l *line) (zmtp.Message, bool) {
	m, ok, err := l.Next()
	if err != nil {
		f.ended(l, err)
	}
	return m, ok
}

// ended notes that nothing more can be read from a connection. It is closed later, by
// drain, as others may still go over the list.
func (f *feed) ended(l *line, err error) {
	if !l.lost {
		f.lose(l)
		f.noteTrouble(err)
	}
	l.Close()
}

// ping asks connections that have been silent for a sign of life. A peer that cannot be
// asked is left to TCP's keep-alive.
func (f *feed) ping() {
	now := time.Now()
	f.pingAt = time.Time{}
	for _, l := range f.lines {
		if l.lost {
			continue
		}
		f.pingAt = now.Add(pingEvery)
		switch {
		case !l.Heartbeats() || now.Sub(l.heard) < pingEvery:
		case l.pinged.After(l.heard) && now.Sub(l.pinged) >= pingWithin:
			f.ended(l, errSilent)
		case !l.pinged.After(l.heard):
			l.pinged = now
			if err := l.Ping(); err != nil {
				f.ended(l, err)
			}
		}
	}
}

// stillThere asks the engine to prove itself after somebody has left a port of ours,
// who may have been anybody. Without an answer all stays as it is.
func (f *feed) stillThere() {
	f.checking = true
	f.catchUp(true, true)
	f.checking = false
	if f.state() == worker.FeedLive { // and so somebody is connected
		f.connected, f.suspect = true, false
	}
}

// unheard says that nobody has answered at the endpoint yet, as behind a firewall that
// lets HTTP through alone: the rank is not one that will be known in a moment.
func (f *feed) unheard() {
	f.unheardAt = time.Time{}
	if f.resuming.pending {
		return // unresumed comes here again
	}
	f.log.Warn("kv events: no connection yet; the rank's overlap is unknown until there is one",
		"endpoint", f.src.Endpoint, "bind", f.src.Bind, "error", f.trouble())
	if f.state() == worker.FeedSyncing {
		f.setState(worker.FeedBroken)
	}
}
