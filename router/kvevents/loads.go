package kvevents

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/router/worker"
)

const (
	// loadSilence is how long nothing may be said of a rank before what was said
	// is forgotten; the next scrape says it anew where there is one.
	loadSilence = 5 * time.Second
	loadPoll    = 200 * time.Millisecond // how soon a subscription ends when stopped
	loadQueue   = 64                     // messages; only the newest matter
	maxLoad     = 1 << 20                // bytes of a message
)

// LoadSource is where load messages of a rank come from: SGLang's load socket
// (frames topic, sequence number, msgpack), or whatever else sends the messages
// that DecodeLoads reads as the last of up to four frames. Several ranks of a
// worker may have one endpoint between them; their messages must then name theirs.
type LoadSource struct {
	Rank     *worker.Rank
	Endpoint string // ZMQ PUB
	Topic    string
}

// Loads subscribes to engines' load messages and stores what they say in the ranks
// they are of: by the rank that the message names, or that the socket is of, never
// by its place in a list. One goroutine an endpoint. Its methods may be called from any goroutine.
type Loads struct {
	log *slog.Logger
	ctx *zmq.Context

	mu     sync.Mutex
	subs   map[string]*loadSub // by endpoint
	closed bool

	applied, garbage, foreign atomic.Uint64
}

type loadSub struct {
	worker   *worker.Worker
	endpoint string
	only     atomic.Pointer[worker.Rank] // whose endpoint it is; nil: it is several ranks'
	stop     chan struct{}
	done     chan struct{}
	heard    []time.Time // by place in worker.Ranks: when of each was last told here; zero: never, or forgotten
	usage    []bool      // likewise: since then its share of KV blocks in use was told as well
}

// NewLoads makes an empty set.
func NewLoads(log *slog.Logger) *Loads {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	l := &Loads{log: log, subs: map[string]*loadSub{}}
	ctx, err := zmq.NewContext()
	if err != nil {
		log.Error("no load messages", "err", err)
		return l
	}
	l.ctx = ctx
	return l
}

// Counts are how many messages were applied, could not be read, and were of ranks
// that the worker does not have here.
func (l *Loads) Counts() (applied, garbage, foreign uint64) {
	return l.applied.Load(), l.garbage.Load(), l.foreign.Load()
}

// Start subscribes; an endpoint that the worker is subscribed to already is left as
// it is.
func (l *Loads) Start(src LoadSource) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if src.Rank == nil {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: the source names no rank", src.Endpoint)
	}
	if l.ctx == nil || l.closed {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: closed", src.Endpoint)
	}
	w := src.Rank.Worker
	if old := l.subs[src.Endpoint]; old != nil && old.worker == w {
		if old.only.Load() != src.Rank {
			old.only.Store(nil)
		}
		return nil
	}
	s, err := l.ctx.NewSocket(zmq.SUB)
	if err != nil {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: %w", src.Endpoint, err)
	}
	err = errors.Join(s.SetLinger(0), s.SetRcvhwm(loadQueue), s.SetMaxmsgsize(maxLoad), s.SetReconnectIvlMax(time.Second), setFamily(s, src.Endpoint),
		s.SetSubscribe(src.Topic), s.Connect(src.Endpoint))
	if err != nil {
		s.Close()
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: %w", src.Endpoint, err)
	}
	sub := &loadSub{worker: w, endpoint: src.Endpoint, stop: make(chan struct{}), done: make(chan struct{}), heard: make([]time.Time, len(w.Ranks)), usage: make([]bool, len(w.Ranks))}
	sub.only.Store(src.Rank)
	if old := l.subs[src.Endpoint]; old != nil {
		close(old.stop)
	}
	l.subs[src.Endpoint] = sub
	go l.run(s, sub)
	return nil
}

// Stop ends the subscriptions of a worker.
func (l *Loads) Stop(w *worker.Worker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for ep, s := range l.subs {
		if s.worker == w {
			close(s.stop)
			delete(l.subs, ep)
		}
	}
}

// Close ends all of them and waits.
func (l *Loads) Close() {
	l.mu.Lock()
	l.closed = true
	subs := l.subs
	l.subs = nil
	l.mu.Unlock()
	for _, s := range subs {
		close(s.stop)
	}
	for _, s := range subs {
		<-s.done
	}
	if l.ctx != nil {
		l.ctx.Term()
	}
}

// run owns the socket.
func (l *Loads) run(s *zmq.Socket, sub *loadSub) {
	defer close(sub.done)
	defer s.Close()
	defer func() { sub.forget(time.Time{}) }()
	p := zmq.NewPoller()
	p.Add(s, zmq.POLLIN)
	var loads []Load
	for {
		select {
		case <-sub.stop:
			return
		default:
		}
		got, err := p.Poll(loadPoll)
		if err != nil {
			l.log.Error("load messages end", "endpoint", sub.endpoint, "err", err)
			return
		}
		sub.forget(time.Now().Add(-loadSilence))
		if len(got) == 0 {
			continue
		}
		frames, err := s.RecvMessageBytes(zmq.DONTWAIT)
		if err != nil {
			continue
		}
		if n := len(frames); n == 0 || n > 4 {
			l.garbage.Add(1)
			continue
		}
		if loads, err = DecodeLoads(loads[:0], frames[len(frames)-1]); err != nil {
			if l.garbage.Add(1) == 1 {
				l.log.Warn("a load message cannot be read; those that follow are counted", "endpoint", sub.endpoint, "err", err)
			}
			continue
		}
		l.store(sub, loads)
	}
}

// store puts each Load into the rank that it is of. Where a message leaves out
// ranks, theirs stay as they were: silence of one is not an answer of another.
func (l *Loads) store(sub *loadSub, loads []Load) {
	now := time.Now()
	for i := range loads {
		ld := &loads[i]
		at := sub.place(ld.Rank, len(loads) == 1)
		if at < 0 {
			l.foreign.Add(1)
			continue
		}
		sub.heard[at] = now
		r := sub.worker.Ranks[at]
		r.Events.Add(1)
		r.Running.Store(int64(ld.Running))
		r.Waiting.Store(int64(ld.Waiting))
		r.QueuedTokens.Store(int64(ld.QueuedTokens))
		if ld.Usage >= 0 {
			r.SetKVUsage(ld.Usage)
			sub.usage[at] = true
		}
		l.applied.Add(1)
	}
}

// place finds where in the worker's Ranks the rank of a message stands, -1 where it
// is none of them. One that names no rank is of the socket's; where that is several
// ranks' nobody knows. An engine alone behind a worker of one rank calls itself 0.
func (s *loadSub) place(rank int, alone bool) int {
	only := s.only.Load()
	for i, r := range s.worker.Ranks {
		if rank < 0 && r == only || int(r.ID.Rank) == rank {
			return i
		}
	}
	if alone && rank == 0 && len(s.worker.Ranks) == 1 {
		return 0
	}
	return -1
}

// forget lets go of what was said of each rank before a time, of all where it is
// zero. Only what could be read and was of that rank keeps it: what an
// engine said before it fell silent, or began to send something else, ages.
func (s *loadSub) forget(before time.Time) {
	for i, at := range s.heard {
		if at.IsZero() || !before.IsZero() && !at.Before(before) {
			continue
		}
		s.heard[i] = time.Time{}
		r := s.worker.Ranks[i]
		r.QueuedTokens.Store(-1)
		r.Running.Store(-1)
		r.Waiting.Store(-1)
		if s.usage[i] { // a rank that once said it was full would else be passed over for good
			r.SetKVUsage(-1)
			s.usage[i] = false
		}
	}
}
