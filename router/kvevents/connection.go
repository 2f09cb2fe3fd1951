package kvevents

import (
	"errors"
	"strings"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/router/worker"
)

// redialAfter is how long ZMQ has to make a lost connection again. It never
// tries when it has cut the connection itself, as for a message too large.
const redialAfter = 3 * time.Second

// socket makes a socket with the limits that hold for all of a feed's.
func (f *feed) socket(kind zmq.Type) (*zmq.Socket, error) {
	s, err := f.ctx.NewSocket(kind)
	if err != nil {
		return nil, err
	}
	// MaxFrame is ours to count; ZMQ's own limit, which costs the connection, is
	// there so that no peer can make the process take memory without end.
	err = errors.Join(s.SetLinger(f.opt.Linger), s.SetRcvhwm(f.opt.HWM), s.SetMaxmsgsize(2*int64(f.opt.MaxFrame)),
		s.SetReconnectIvl(100*time.Millisecond), s.SetReconnectIvlMax(time.Second),
		s.SetHeartbeatIvl(10*time.Second), s.SetHeartbeatTimeout(30*time.Second))
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// setFamily lets a socket speak IPv6 where the address is one. It is not on for
// names: ZMQ then tries a name's IPv6 address and no other, and engines told to
// listen at "*" do so on IPv4 alone.
func setFamily(s *zmq.Socket, endpoint string) error {
	return s.SetIpv6(strings.Contains(endpoint, "://["))
}

func closeSocket(s *zmq.Socket) {
	if s != nil {
		s.Close()
	}
}

func (f *feed) close() {
	if f.sub != nil {
		// An event with nobody left to read it would stop ZMQ's own thread, and
		// with it every feed: closing a socket does not end its events at once.
		f.sub.Monitor("", 0)
	}
	for _, s := range []*zmq.Socket{f.sub, f.monitor, f.wake} {
		closeSocket(s)
	}
}

// watchConnection reads what the monitor says. A connection that was lost and is
// back may lead to a new life of the engine whose numbers have already passed
// the one waited for, which the numbers alone would never tell. It says whether
// it has brought the position up to date for that reason.
func (f *feed) watchConnection() (caughtUp bool) {
	for {
		event, _, descriptor, err := f.monitor.RecvEvent(zmq.DONTWAIT)
		if err != nil {
			return caughtUp
		}
		switch event {
		case zmq.EVENT_ACCEPTED:
			f.peers[descriptor] = struct{}{}
		case zmq.EVENT_DISCONNECTED:
			delete(f.peers, descriptor)
			f.connected, f.suspect = false, f.known
			if f.src.Bind {
				// Not the engine's, perhaps: whoever comes to a port and leaves again is seen here.
				f.checkAt = time.Now().Add(f.opt.RetryMin)
			} else {
				f.redialAt = time.Now().Add(redialAfter)
			}
			// The next to answer may be another life, which holds nothing: what is in the
			// index is kept, and not believed until the engine has proven to be the same.
			if s := f.state(); s == worker.FeedLive || s == worker.FeedSyncing && !f.resuming.pending {
				f.setState(worker.FeedBroken)
			}
		case zmq.EVENT_HANDSHAKE_SUCCEEDED:
			f.connected, f.redialAt, f.unheardAt = true, time.Time{}, time.Time{}
			// Not the first: something may have been published in between, to nobody. That
			// the one before was lost need not have been told: at a port of ours an engine
			// may be back before it is known, and redial may have met ZMQ's own.
			if f.suspect || f.known {
				f.reconnected()
				caughtUp = true
			}
		}
	}
}

// reconnected finds out whether the engine behind a new connection is the one
// behind the old. With replay it is asked for the last batch applied, which no
// other life can have made. Without, nothing can tell: the rank is cleared.
// Messages waiting now may be of either life, so they are thrown away first: a
// replay asked for after that has those of the new one.
func (f *feed) reconnected() {
	f.suspect = false
	f.waiting.drop()
	for range maxBurst {
		if _, err := f.sub.RecvMessageBytes(zmq.DONTWAIT); err != nil {
			break
		}
	}
	if f.canAsk() {
		f.catchUp(true, true)
		return
	}
	f.begins("resets")
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
	f.log.Warn("kv events: no connection yet; the rank's overlap is unknown until there is one", "endpoint", f.src.Endpoint, "bind", f.src.Bind)
	if f.state() == worker.FeedSyncing {
		f.setState(worker.FeedBroken)
	}
}

// redial begins a connection that ZMQ may have given up.
func (f *feed) redial() {
	f.redialAt = time.Now().Add(redialAfter)
	f.sub.Disconnect(f.src.Endpoint)
	if err := f.sub.Connect(f.src.Endpoint); err != nil {
		f.log.Warn("kv events: cannot connect again", "endpoint", f.src.Endpoint, "error", err)
	}
}
