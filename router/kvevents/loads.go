package kvevents

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/zmtp"
	"sluice/router/worker"
)

const (
	// loadTTL is the silence after which a rank's reported load is dropped; the next scrape reports
	// it again if the engine has one.
	loadTTL      = 5 * time.Second
	loadTTLCheck = time.Second // interval of the check for expired loads
	maxLoad      = 1 << 20     // bytes of a message
)

// LoadSource is the source of load messages of a rank: SGLang's load socket (frames topic, sequence
// number, msgpack), or any other publisher of the messages that DecodeLoads reads, as the last of
// up to four frames. Several ranks of a worker may share an endpoint; their messages must then name
// the rank.
type LoadSource struct {
	Rank     *worker.Rank
	Endpoint string // ZMQ PUB
	Topic    string
}

// Loads subscribes to engines' load messages and stores the loads in the ranks. The rank is the one
// that the message names or that the socket implies; the position in a list is never used. There is
// one goroutine per endpoint. The methods may be called from any goroutine.
type Loads struct {
	log    *slog.Logger
	poller *zmtp.Poller

	mu     sync.Mutex
	subs   map[string]*loadSub // by endpoint
	closed bool

	applied, malformed, wrongRank atomic.Uint64
}

type loadSub struct {
	worker    *worker.Worker
	endpoint  string
	rank      atomic.Pointer[worker.Rank] // the endpoint's rank; nil if several ranks share it
	topic     string
	ctx       context.Context
	cancel    context.CancelFunc
	wakeCh    chan struct{}
	done      chan struct{}
	lastHeard []time.Time // by index in worker.Ranks: when the rank was last reported here; zero: never or expired
	usage     []bool      // by index: whether its fraction of KV blocks was reported too since then
}

// NewLoads returns an empty set.
func NewLoads(log *slog.Logger) *Loads {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	l := &Loads{log: log, subs: map[string]*loadSub{}}
	poller, err := zmtp.NewPoller()
	if err != nil {
		log.Error("cannot subscribe to load messages", "error", err)
		return l
	}
	l.poller = poller
	return l
}

// Counts returns how many messages were applied, could not be read, and named ranks that the worker
// does not have here.
func (l *Loads) Counts() (applied, malformed, wrongRank uint64) {
	return l.applied.Load(), l.malformed.Load(), l.wrongRank.Load()
}

// Start subscribes to an endpoint. A subscription of the worker to the same endpoint is kept.
func (l *Loads) Start(src LoadSource) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if src.Rank == nil {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: the source names no rank", src.Endpoint)
	}
	if l.poller == nil || l.closed {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: closed", src.Endpoint)
	}
	w := src.Rank.Worker
	if old := l.subs[src.Endpoint]; old != nil && old.worker == w {
		if old.rank.Load() != src.Rank {
			old.rank.Store(nil)
		}
		return nil
	}
	if err := zmtp.Check(src.Endpoint, false); err != nil {
		return fmt.Errorf("kvevents: cannot subscribe to load messages at %q: %w", src.Endpoint, err)
	}
	sub := &loadSub{worker: w, endpoint: src.Endpoint, topic: src.Topic, wakeCh: make(chan struct{}, 1), done: make(chan struct{}),
		lastHeard: make([]time.Time, len(w.Ranks)), usage: make([]bool, len(w.Ranks))}
	sub.ctx, sub.cancel = context.WithCancel(context.Background())
	sub.rank.Store(src.Rank)
	if old := l.subs[src.Endpoint]; old != nil {
		old.cancel()
	}
	l.subs[src.Endpoint] = sub
	go l.run(sub)
	return nil
}

// Stop ends the subscriptions of a worker.
func (l *Loads) Stop(w *worker.Worker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for ep, s := range l.subs {
		if s.worker == w {
			s.cancel()
			delete(l.subs, ep)
		}
	}
}

// Close ends all subscriptions and waits for their goroutines.
func (l *Loads) Close() {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	subs := l.subs
	l.subs = nil
	l.mu.Unlock()
	for _, s := range subs {
		s.cancel()
	}
	for _, s := range subs {
		<-s.done
	}
	if first && l.poller != nil {
		l.poller.Close()
	}
}

// run keeps a connection and reads messages.
func (l *Loads) run(sub *loadSub) {
	defer close(sub.done)
	defer sub.expire(time.Time{})
	tick := time.NewTicker(loadTTLCheck)
	defer tick.Stop()
	var retry backoff.Backoff
	for wait := time.Duration(0); sub.wait(tick.C, wait); wait = backoff.Jitter(retry.Next(dialMin, dialMax)) {
		s, err := zmtp.Connect(sub.ctx, sub.endpoint, zmtp.StreamOptions{Type: "SUB", Topic: sub.topic, MaxMessage: maxLoad, Handshake: handshake})
		if err != nil {
			continue
		}
		if err = l.poller.Watch(s, sub.wake); err == nil {
			retry.Reset()
			l.read(s, sub, tick.C)
		}
		s.Close()
	}
}

func (s *loadSub) wake() {
	select {
	case s.wakeCh <- struct{}{}:
	default:
	}
}

// wait waits for d and expires loads meanwhile. It returns false when the subscription has ended.
func (s *loadSub) wait(tick <-chan time.Time, d time.Duration) bool {
	over := time.NewTimer(d)
	defer over.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return false
		case <-over.C:
			return true
		case <-tick:
			s.expire(time.Now().Add(-loadTTL))
		}
	}
}

// read applies messages until the connection or the subscription ends.
func (l *Loads) read(s *zmtp.Stream, sub *loadSub, tick <-chan time.Time) {
	var loads []Load
	for {
		select {
		case <-sub.ctx.Done():
			return
		case <-tick:
			sub.expire(time.Now().Add(-loadTTL))
		case <-sub.wakeCh:
		}
		buf := buffers.Get()
		n, _, err := s.Fill(*buf)
		for err == nil && n > 0 {
			m, ok, wrong := s.Next()
			switch {
			case wrong != nil:
				err = wrong
			case ok:
				loads = l.apply(sub, m, loads)
			default:
				n, _, err = s.Fill(*buf)
			}
		}
		buffers.Put(buf) // all complete messages were processed
		if err != nil {
			return
		}
	}
}

// apply stores the loads of a message; loads is reused.
func (l *Loads) apply(sub *loadSub, m zmtp.Message, loads []Load) []Load {
	if len(m) > 4 {
		l.malformed.Add(1)
		return loads
	}
	loads, err := DecodeLoads(loads[:0], m[len(m)-1])
	if err != nil {
		if l.malformed.Add(1) == 1 {
			l.log.Warn("cannot decode a load message; further ones are only counted", "endpoint", sub.endpoint, "error", err)
		}
		return loads
	}
	l.store(sub, loads)
	return loads
}

// store stores each Load in its rank. Ranks that the message omits keep their load.
func (l *Loads) store(sub *loadSub, loads []Load) {
	now := time.Now()
	for i := range loads {
		ld := &loads[i]
		at := sub.place(ld.Rank, len(loads) == 1)
		if at < 0 {
			l.wrongRank.Add(1)
			continue
		}
		sub.lastHeard[at] = now
		r := sub.worker.Ranks[at]
		r.Events.Add(1)
		r.Running.Store(int64(ld.Running))
		r.Waiting.Store(int64(ld.Waiting))
		r.QueuedTokens.Store(int64(ld.QueuedTokens))
		if ld.Usage >= 0 {
			r.SetKVUsage(ld.Usage)
			sub.usage[at] = true
		}
		r.CountReport()
		l.applied.Add(1)
	}
}

// place returns the index in the worker's Ranks of a message's rank, or -1 if it is none of them. A
// message without a rank belongs to the socket's rank; if several ranks share the socket it belongs
// to none. A single engine behind a worker with one rank calls itself 0.
func (s *loadSub) place(rank int, alone bool) int {
	only := s.rank.Load()
	for i, r := range s.worker.Ranks {
		if rank < 0 && r == only || r.EngineRank() == rank {
			return i
		}
	}
	if alone && rank == 0 && len(s.worker.Ranks) == 1 {
		return 0
	}
	return -1
}

// expire drops the loads that were reported before a time, or all if it is zero. Only a readable
// message about the rank renews its load, so the load of an engine that falls silent or sends other
// messages expires.
func (s *loadSub) expire(before time.Time) {
	for i, at := range s.lastHeard {
		if at.IsZero() || !before.IsZero() && !at.Before(before) {
			continue
		}
		s.lastHeard[i] = time.Time{}
		r := s.worker.Ranks[i]
		r.QueuedTokens.Store(-1)
		r.Running.Store(-1)
		r.Waiting.Store(-1)
		if s.usage[i] { // otherwise a rank that once reported itself full would be avoided for good
			r.SetKVUsage(-1)
			s.usage[i] = false
		}
	}
}
