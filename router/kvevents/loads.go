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
	// loadSilence is how long an engine may say nothing before what it said of its
	// queue is forgotten; the rest is corrected by the next scrape.
	loadSilence = 5 * time.Second
	loadPoll    = 200 * time.Millisecond // how soon a subscription ends when stopped
	loadQueue   = 64                     // messages; only the newest matter
	maxLoad     = 1 << 20                // bytes of a message
)

// LoadSource is where a worker's load messages come from: SGLang's load socket
// (frames topic, sequence number, msgpack), or whatever else sends the messages
// that DecodeLoads reads as the last of up to four frames.
type LoadSource struct {
	Worker   *worker.Worker
	Endpoint string // ZMQ PUB
	Topic    string
}

// Loads subscribes to engines' load messages and stores what they say in the ranks
// they are of: by the dp_rank of the message, never by its place in a list. One
// goroutine a source. Its methods may be called from any goroutine.
type Loads struct {
	log *slog.Logger
	ctx *zmq.Context

	mu     sync.Mutex
	subs   map[string]*loadSub // by endpoint
	closed bool

	applied, garbage, foreign atomic.Uint64
}

type loadSub struct {
	src  LoadSource
	stop chan struct{}
	done chan struct{}
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

// Start subscribes; a source that is subscribed to already is left as it is.
func (l *Loads) Start(src LoadSource) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx == nil || l.closed {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: closed", src.Endpoint)
	}
	if old := l.subs[src.Endpoint]; old != nil && old.src.Worker == src.Worker {
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
	sub := &loadSub{src: src, stop: make(chan struct{}), done: make(chan struct{})}
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
		if s.src.Worker == w {
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
	p := zmq.NewPoller()
	p.Add(s, zmq.POLLIN)
	var loads []Load
	heard, quiet := time.Now(), false
	for {
		select {
		case <-sub.stop:
			forgetQueues(sub.src.Worker)
			return
		default:
		}
		got, err := p.Poll(loadPoll)
		if err != nil {
			l.log.Error("load messages end", "endpoint", sub.src.Endpoint, "err", err)
			forgetQueues(sub.src.Worker)
			return
		}
		// Only what could be read is a sign of life: what an engine said before it
		// began to send something else ages like that of a silent one.
		if !quiet && time.Since(heard) > loadSilence {
			quiet = true
			forgetQueues(sub.src.Worker)
		}
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
				l.log.Warn("a load message cannot be read; those that follow are counted", "endpoint", sub.src.Endpoint, "err", err)
			}
			continue
		}
		heard, quiet = time.Now(), false
		l.store(sub.src.Worker, loads)
	}
}

// store puts each Load into the rank that it is of. Where a message leaves out
// ranks, theirs stay as they were: silence of one is not an answer of another.
func (l *Loads) store(w *worker.Worker, loads []Load) {
	for i := range loads {
		ld := &loads[i]
		r := rankOf(w, ld.Rank, len(loads) == 1)
		if r == nil {
			l.foreign.Add(1)
			continue
		}
		r.Running.Store(int64(ld.Running))
		r.Waiting.Store(int64(ld.Waiting))
		r.QueuedTokens.Store(int64(ld.QueuedTokens))
		if ld.Usage >= 0 {
			r.SetKVUsage(ld.Usage)
		}
		l.applied.Add(1)
	}
}

// rankOf finds the rank by its number. A worker of one rank whose messages name
// none (0) is meant by them.
func rankOf(w *worker.Worker, rank int, alone bool) *worker.Rank {
	for _, r := range w.Ranks {
		if int(r.ID.Rank) == rank {
			return r
		}
	}
	if alone && rank == 0 && len(w.Ranks) == 1 {
		return w.Ranks[0]
	}
	return nil
}

func forgetQueues(w *worker.Worker) {
	for _, r := range w.Ranks {
		r.QueuedTokens.Store(-1)
	}
}
