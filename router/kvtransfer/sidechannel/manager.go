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
	OnEngineID func(rank *worker.Rank, engine string, asked time.Time)

	renewInterval time.Duration // between two renewals [5s]; for tests
}

const (
	defaultRenewInterval = 5 * time.Second // as decode engines do; a lease lasts 30 s
	maxQueue             = 256             // messages that wait for one engine
	maxEngines           = 1024            // that are spoken to at a time
	maxLeases            = 65536           // handles between the legs
	maxLine              = 4 << 10         // bytes of one renewal
	callTimeout          = 5 * time.Second
)

// Manager renews and releases. All methods may be called from any goroutine and
// return at once: what may take long is done by goroutines of its own, one for each
// engine that there is something to say to, so that an engine that does not answer
// keeps nothing from the others. A nil Keeper does nothing.
type Manager struct {
	opt     Options
	zctx    *zmq.Context
	stop    context.CancelFunc
	running sync.WaitGroup // run, and every speaker

	mu      sync.Mutex
	ctx     context.Context
	leases  map[*Lease]struct{}
	clients map[string]*engineClient // by engine id

	renewed, released, failed, dropped atomic.Int64
}

// Lease is one handle between the legs.
type Lease struct {
	manager *Manager
	handle  handleInfo
	since   time.Time

	renewedAt atomic.Int64 // when the last renewal was sent, Unix nanoseconds; 0: none was
}

// Until is when the lease ends that holds now: that of prefill's answer, which ends
// at end, or a later one by the last renewal. A nil Hold was never renewed.
func (h *Lease) Until(end time.Time, lease time.Duration) time.Time {
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
func New(opt Options) (*Manager, error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.renewInterval <= 0 {
		opt.renewInterval = defaultRenewInterval
	}
	zctx, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("sidechannel: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &Manager{opt: opt, zctx: zctx, stop: cancel, ctx: ctx, leases: map[*Lease]struct{}{}, clients: map[string]*engineClient{}}
	k.running.Go(k.run)
	return k, nil
}

// Close ends the goroutines; what they have not released is left to the leases.
func (k *Manager) Close() {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.stop() // under the lock: no speaker begins afterwards
	k.mu.Unlock()
	k.running.Wait()
	k.zctx.Term()
}

// Acquire begins to keep the blocks of a handle that a prefill rank answered. It is
// nil for engines and handles that are not spoken to. End it by Passed, Reclaimed or
// Abandoned.
func (k *Manager) Acquire(rank *worker.Rank, handle []byte) *Lease {
	if k == nil {
		return nil
	}
	l, ok := readHandle(rank, handle)
	if !ok {
		return nil
	}
	h := &Lease{manager: k, handle: l, since: time.Now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.leases) >= maxLeases {
		return nil
	}
	k.leases[h] = struct{}{}
	if k.clients[l.engine] == nil {
		k.enqueueLocked(l, job{connect: true})
	}
	return h
}

// Passed: a decode engine has, or may have, seen the handle; the blocks are its.
func (h *Lease) HandOff() { h.close() }

// CanRelease says whether Abandoned has the blocks released; otherwise it only ends the
// renewals.
func (h *Lease) CanRelease() bool { return h != nil && h.manager.opt.Release }

// Abandoned: no decode engine has seen the handle or will; the blocks can go.
func (h *Lease) Abandon() {
	if !h.close() || !h.manager.opt.Release {
		return
	}
	h.release()
}

func (h *Lease) release() {
	k := h.manager
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.enqueueLocked(h.handle, job{request: h.handle.request}) {
		k.dropped.Add(1) // the lease ends by itself
	}
}

// reclaimAfter is the head start of an engine that does tell prefill.
const reclaimAfter = 100 * time.Millisecond

// Reclaimed: a decode engine was sent the handle and has dropped its request: it died,
// failed it, or never knew it. Most engines that live tell prefill so themselves; what
// is released then was released before, and prefill counts a notification it does not
// know. Without Options.Release the renewals end.
func (h *Lease) Reclaim() {
	if !h.close() || !h.manager.opt.Release {
		return
	}
	time.AfterFunc(reclaimAfter, h.release)
}

// close says whether this was the first call.
func (h *Lease) close() bool {
	if h == nil {
		return false
	}
	k := h.manager
	k.mu.Lock()
	defer k.mu.Unlock()
	_, open := k.leases[h]
	delete(k.leases, h)
	return open
}

// Counts are requests renewed, released, and messages that could not be sent or
// were dropped.
func (k *Manager) Counts() (renewed, released, failed int64) {
	if k == nil {
		return 0, 0, 0
	}
	return k.renewed.Load(), k.released.Load(), k.failed.Load() + k.dropped.Load()
}

func (k *Manager) run() {
	tick := time.NewTicker(k.opt.renewInterval)
	defer tick.Stop()
	for {
		select {
		case <-k.ctx.Done():
			return
		case now := <-tick.C:
			k.renewAll(now)
		}
	}
}

// renewAll has heartbeats sent for what has been held for a while, engine by engine.
func (k *Manager) renewAll(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	byEngine := map[string][]*Lease{}
	for h := range k.leases {
		if now.Sub(h.since) >= k.opt.renewInterval {
			byEngine[h.handle.engine] = append(byEngine[h.handle.engine], h)
		}
	}
	for _, leases := range byEngine {
		if !k.enqueueLocked(leases[0].handle, job{renew: leases}) {
			k.dropped.Add(1)
		}
	}
}
