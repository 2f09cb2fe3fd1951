package sidechannel

import (
	"context"
	"fmt"
	"log/slog"
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
	// Met, where set, is told what the engine calls itself that answered at a rank's own
	// host, and when it was asked. It is called by the engine's goroutine.
	Met func(rank *worker.Rank, engine string, asked time.Time)

	renew time.Duration // between two renewals [5s]; for tests
}

const (
	renewEvery = 5 * time.Second // as decode engines do; a lease lasts 30 s
	queue      = 256             // messages that wait for one engine
	maxEngines = 1024            // that are spoken to at a time
	maxHeld    = 65536           // handles between the legs
	maxLine    = 4 << 10         // bytes of one renewal
	callLimit  = 5 * time.Second
)

// Keeper renews and releases. All methods may be called from any goroutine and
// return at once: what may take long is done by goroutines of its own, one for each
// engine that there is something to say to, so that an engine that does not answer
// keeps nothing from the others. A nil Keeper does nothing.
type Keeper struct {
	opt     Options
	zctx    *zmq.Context
	stop    context.CancelFunc
	running sync.WaitGroup // run, and every speaker

	mu       sync.Mutex
	ctx      context.Context
	held     map[*Hold]struct{}
	speakers map[string]*speaker // by engine id

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
	k := &Keeper{opt: opt, zctx: zctx, stop: cancel, ctx: ctx, held: map[*Hold]struct{}{}, speakers: map[string]*speaker{}}
	k.running.Go(k.run)
	return k, nil
}

// Close ends the goroutines; what they have not released is left to the leases.
func (k *Keeper) Close() {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.stop() // under the lock: no speaker begins afterwards
	k.mu.Unlock()
	k.running.Wait()
	k.zctx.Term()
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
	if k.speakers[l.engine] == nil {
		k.sayLocked(l, job{meet: true})
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
	k := h.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.sayLocked(h.lease, job{request: h.lease.request}) {
		k.dropped.Add(1) // the lease ends by itself
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

func (k *Keeper) run() {
	tick := time.NewTicker(k.opt.renew)
	defer tick.Stop()
	for {
		select {
		case <-k.ctx.Done():
			return
		case now := <-tick.C:
			k.renew(now)
		}
	}
}

// renew has heartbeats sent for what has been held for a while, engine by engine.
func (k *Keeper) renew(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	byEngine := map[string][]*Hold{}
	for h := range k.held {
		if now.Sub(h.since) >= k.opt.renew {
			byEngine[h.lease.engine] = append(byEngine[h.lease.engine], h)
		}
	}
	for _, holds := range byEngine {
		if !k.sayLocked(holds[0].lease, job{renew: holds}) {
			k.dropped.Add(1)
		}
	}
}
