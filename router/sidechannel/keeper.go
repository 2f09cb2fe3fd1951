package sidechannel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/nixl"
	"sluice/router/worker"
)

// Options of a Keeper.
type Options struct {
	Agent   func() *nixl.Agent // the router's agent; nil while there is none
	Release bool               // release abandoned blocks beside renewing leases
	Log     *slog.Logger       // [none]

	renew time.Duration // between two renewals [5s]; for tests
}

const (
	renewEvery = 5 * time.Second // as decode engines do; a lease lasts 30 s
	queue      = 1024            // releases that wait for the keeper's goroutine
	maxHeld    = 65536           // handles between the legs
	maxLine    = 4 << 10         // bytes of one renewal
	callLimit  = 5 * time.Second
)

// job is for the keeper's goroutine: to release a lease's blocks, or only to get to know
// its engine, which takes a moment that the first release should not have to wait for.
type job struct {
	lease
	meet bool
}

// Keeper renews and releases. All methods may be called from any goroutine and
// return at once: what may take long is done by a goroutine of its own. A nil
// Keeper does nothing.
type Keeper struct {
	opt  Options
	zctx *zmq.Context
	jobs chan job
	stop context.CancelFunc
	done chan struct{}

	mu   sync.Mutex
	held map[*Hold]struct{}
	met  map[string]struct{} // engine ids that the keeper's goroutine was made to know

	agent *nixl.Agent             // run's own: the one that peers are loaded into
	peers map[string][]*nixl.Peer // by engine id, one a rank
	rest  map[string]time.Time    // engines not asked before that time, after a failure

	renewed, released, failed, dropped atomic.Int64
}

// Hold is one handle between the legs.
type Hold struct {
	keeper *Keeper
	lease  lease
	since  time.Time

	renewedAt atomic.Int64 // when the last renewal was sent, Unix nanoseconds; 0: none was
}

// Until is when the lease ends that holds now: that of prefill's answer, which ends
// at end, or a later one by the last renewal. A nil Hold was never renewed.
func (h *Hold) Until(end time.Time, lease time.Duration) time.Time {
	if h == nil {
		return end
	}
	// A heartbeat moves the end to two thirds of a lease from when it is read
	// (vLLM 0.22 to 0.33), and never back.
	if at := h.renewedAt.Load(); at != 0 {
		if later := time.Unix(0, at).Add(lease * 2 / 3); later.After(end) {
			return later
		}
	}
	return end
}

// New starts a Keeper.
func New(opt Options) (*Keeper, error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.renew <= 0 {
		opt.renew = renewEvery
	}
	zctx, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("sidechannel: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &Keeper{opt: opt, zctx: zctx, jobs: make(chan job, queue), stop: cancel, done: make(chan struct{}),
		held: map[*Hold]struct{}{}, met: map[string]struct{}{}, peers: map[string][]*nixl.Peer{}, rest: map[string]time.Time{}}
	go k.run(ctx)
	return k, nil
}

// Close ends the goroutine; what it has not released is left to the leases.
func (k *Keeper) Close() {
	if k == nil {
		return
	}
	k.stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		k.zctx.Term() // ends a question under way
	}()
	<-k.done
	<-ended
}

// Hold begins to keep the blocks of a handle that a prefill rank answered. It is
// nil for engines and handles that are not spoken to. End it by Passed, Reclaimed or
// Abandoned.
func (k *Keeper) Hold(rank *worker.Rank, handle []byte) *Hold {
	if k == nil {
		return nil
	}
	l, ok := readHandle(rank, handle)
	if !ok {
		return nil
	}
	h := &Hold{keeper: k, lease: l, since: time.Now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.held) >= maxHeld {
		return nil
	}
	k.held[h] = struct{}{}
	if _, ok := k.met[l.engine]; !ok {
		select {
		case k.jobs <- job{lease: l, meet: true}:
			if len(k.met) >= 4096 {
				clear(k.met)
			}
			k.met[l.engine] = struct{}{}
		default:
		}
	}
	return h
}

// Passed: a decode engine has, or may have, seen the handle; the blocks are its.
func (h *Hold) Passed() { h.end() }

// Releases says whether Abandoned has the blocks released; otherwise it only ends the
// renewals.
func (h *Hold) Releases() bool { return h != nil && h.keeper.opt.Release }

// Abandoned: no decode engine has seen the handle or will; the blocks can go.
func (h *Hold) Abandoned() {
	if !h.end() || !h.keeper.opt.Release {
		return
	}
	h.release()
}

func (h *Hold) release() {
	select {
	case h.keeper.jobs <- job{lease: h.lease}:
	default:
		h.keeper.dropped.Add(1) // the lease ends by itself
	}
}

// reclaimAfter is the head start of an engine that does tell prefill.
const reclaimAfter = 100 * time.Millisecond

// Reclaimed: a decode engine was sent the handle and has dropped its request: it died,
// failed it, or never knew it. Most engines that live tell prefill so themselves; what
// is released then was released before, and prefill counts a notification it does not
// know. Without Options.Release the renewals end.
func (h *Hold) Reclaimed() {
	if !h.end() || !h.keeper.opt.Release {
		return
	}
	time.AfterFunc(reclaimAfter, h.release)
}

// end says whether this was the first call.
func (h *Hold) end() bool {
	if h == nil {
		return false
	}
	k := h.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	_, was := k.held[h]
	delete(k.held, h)
	return was
}

// Counts are requests renewed, released, and messages that could not be sent or
// were dropped.
func (k *Keeper) Counts() (renewed, released, failed int64) {
	if k == nil {
		return 0, 0, 0
	}
	return k.renewed.Load(), k.released.Load(), k.failed.Load() + k.dropped.Load()
}

func (k *Keeper) run(ctx context.Context) {
	defer close(k.done)
	tick := time.NewTicker(k.opt.renew)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-k.jobs:
			l := j.lease
			if j.meet {
				k.meet(ctx, &l)
				continue
			}
			// One consumer that is done: what vLLM counts up to is in the message.
			if k.tell(ctx, &l, l.request+":1") {
				k.released.Add(1)
			}
		case now := <-tick.C:
			k.renew(ctx, now)
		}
	}
}

// renew sends heartbeats for what has been held for a while, engine by engine.
func (k *Keeper) renew(ctx context.Context, now time.Time) {
	type batch struct {
		l     lease
		ids   []string
		holds []*Hold
	}
	byEngine := map[string]*batch{}
	k.mu.Lock()
	for h := range k.held {
		if now.Sub(h.since) < k.opt.renew {
			continue
		}
		b := byEngine[h.lease.engine]
		if b == nil {
			b = &batch{l: h.lease}
			byEngine[h.lease.engine] = b
		}
		b.ids, b.holds = append(b.ids, h.lease.request), append(b.holds, h)
	}
	k.mu.Unlock()
	for _, b := range byEngine {
		for len(b.ids) > 0 {
			n, size := 0, 0
			for n < len(b.ids) && (n == 0 || size+len(b.ids[n]) < maxLine) {
				size += len(b.ids[n]) + 1
				n++
			}
			sent := time.Now() // not later than the engine counts from
			if !k.tell(ctx, &b.l, "HB:"+strings.Join(b.ids[:n], ",")) {
				break
			}
			for _, h := range b.holds[:n] {
				h.renewedAt.Store(sent.UnixNano())
			}
			k.renewed.Add(int64(n))
			b.ids, b.holds = b.ids[n:], b.holds[n:]
		}
	}
}

// meet loads an engine's metadata; a failure is not told: it is met again when there
// is something to say.
func (k *Keeper) meet(ctx context.Context, l *lease) {
	if time.Now().Before(k.rest[l.engine]) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if _, err := k.peersOf(ctx, l); err != nil {
		k.opt.Log.Debug("side channel: a prefill engine could not be met", "engine_id", l.engine, "at", l.endpoint, "err", err)
	}
}

// tell sends a message to every rank of a prefill engine, and loads its metadata
// first where that was not done, or anew where the engine's agents are gone.
func (k *Keeper) tell(ctx context.Context, l *lease, message string) bool {
	if until := k.rest[l.engine]; time.Now().Before(until) {
		k.failed.Add(1)
		return false
	}
	met := k.peers[l.engine] != nil
	err := k.try(ctx, l, message)
	if err != nil && met && ctx.Err() == nil && !errors.Is(err, errOther) {
		delete(k.peers, l.engine)
		err = k.try(ctx, l, message)
	}
	if err == nil {
		return true
	}
	k.failed.Add(1)
	if len(k.rest) > 4096 {
		clear(k.rest)
	}
	k.rest[l.engine] = time.Now().Add(callLimit)
	k.opt.Log.Warn("side channel: a prefill engine was not told", "engine_id", l.engine, "at", l.endpoint, "err", err)
	return false
}

// errOther: the engine was restarted; the blocks are gone with it.
var errOther = errors.New("sidechannel: another engine answers there now")

func (k *Keeper) try(ctx context.Context, l *lease, message string) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	peers, err := k.peersOf(ctx, l)
	if err != nil {
		return err
	}
	for _, p := range peers {
		if err := k.agent.Notify(ctx, p, []byte(message)); err != nil {
			return err
		}
	}
	return nil
}

// peersOf gives the agents of an engine's ranks.
func (k *Keeper) peersOf(ctx context.Context, l *lease) ([]*nixl.Peer, error) {
	agent := k.opt.Agent()
	if agent == nil {
		return nil, errors.New("sidechannel: the router's NIXL agent is not up")
	}
	if agent != k.agent {
		k.agent = agent
		clear(k.peers)
	}
	if peers := k.peers[l.engine]; peers != nil {
		return peers, nil
	}
	var peers []*nixl.Peer
	for pp := range l.pp {
		for tp := range l.tp {
			engine, metadata, err := fetch(k.zctx, l.endpoint, ask(pp, tp, l.withPP))
			if err != nil {
				return nil, err
			}
			if engine != l.engine {
				return nil, fmt.Errorf("%w: %q, the handle is of %q", errOther, engine, l.engine)
			}
			p, err := agent.LoadPeer(ctx, metadata, "")
			if err != nil {
				return nil, err
			}
			peers = append(peers, p)
		}
	}
	if len(k.peers) >= 4096 {
		clear(k.peers)
	}
	k.peers[l.engine] = peers
	return peers, nil
}
