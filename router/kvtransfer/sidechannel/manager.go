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

// Options configures a Manager.
type Options struct {
	Agent   func() *nixl.Agent // returns the router's agent; nil while there is none
	Release bool               // release abandoned blocks in addition to renewing leases
	Log     *slog.Logger       // [none]
	// OnEngineID, if set, receives the engine id that a side channel on the rank's own host
	// reported, and the time of the query. The engine's goroutine calls it.
	OnEngineID func(rank *worker.Rank, engine string, asked time.Time)

	renewInterval time.Duration // interval between renewals [5s]; for tests
}

const (
	defaultRenewInterval = 5 * time.Second // as decode engines do; a lease lasts 30 s
	maxQueue             = 256             // messages queued for one engine
	maxEngines           = 1024            // engines with a goroutine
	maxLeases            = 65536           // open leases
	maxLine              = 4 << 10         // bytes of one renewal message
	callTimeout          = 5 * time.Second
)

// Manager renews leases and releases blocks. All methods but Close may be called from any
// goroutine and return at once. Each engine has a goroutine for operations that may block, so
// an engine that does not answer does not delay the others. A nil Manager does nothing.
type Manager struct {
	opt     Options
	zctx    *zmq.Context
	stop    context.CancelFunc
	running sync.WaitGroup // run and the engines' goroutines

	mu      sync.Mutex
	ctx     context.Context
	leases  map[*Lease]struct{}
	clients map[string]*engineClient // by engine id

	renewed, released, failed, dropped atomic.Int64
}

// Lease is one handle between the prefill and the decode leg.
type Lease struct {
	manager *Manager
	handle  handleInfo
	since   time.Time

	renewedAt atomic.Int64 // time of the last renewal, Unix nanoseconds; 0: none yet
}

// Until returns when the blocks' lease ends: at end, which the prefill answer implies, or later
// after a renewal of the given lease duration. A nil Lease was never renewed.
func (h *Lease) Until(end time.Time, lease time.Duration) time.Time {
	if h == nil {
		return end
	}
	// On a heartbeat the engine sets the end to two thirds of a lease from now (vLLM 0.22 to
	// 0.33) unless it is already later.
	if at := h.renewedAt.Load(); at != 0 {
		if later := time.Unix(0, at).Add(lease * 2 / 3); later.After(end) {
			return later
		}
	}
	return end
}

// New starts a Manager.
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

// Close stops the goroutines and waits for them. Blocks not yet released are freed when their
// leases end.
func (k *Manager) Close() {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.stop() // under the lock, so that no engine goroutine starts afterwards
	k.mu.Unlock()
	k.running.Wait()
	k.zctx.Term()
}

// Acquire starts to renew the lease of a handle that a prefill rank returned. It returns nil
// when the engine or the handle is unsupported, or at maxLeases. The caller ends the Lease by
// StopRenewal, Reclaim or Abandon.
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

// StopRenewal ends the renewals because a decode engine has received, or may have received, the
// handle and now owns the blocks.
func (h *Lease) StopRenewal() { h.close() }

// CanRelease returns whether Abandon releases the blocks. Otherwise Abandon only ends the
// renewals.
func (h *Lease) CanRelease() bool { return h != nil && h.manager.opt.Release }

// Abandon ends the renewals and releases the blocks. Call it only when no decode engine has
// received the handle or will.
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
		k.dropped.Add(1) // the blocks are freed when the lease ends
	}
}

// reclaimAfter lets a decode engine that is alive notify the prefill engine first.
const reclaimAfter = 100 * time.Millisecond

// Reclaim ends the renewals and releases the blocks after reclaimAfter. Call it when a decode
// engine was sent the handle and has dropped the request: it died, failed the request, or never
// received it. Most live engines notify the prefill engine themselves; the release is then
// redundant, and the prefill engine only counts a notification that it does not know. Without
// Options.Release, Reclaim only ends the renewals.
func (h *Lease) Reclaim() {
	if !h.close() || !h.manager.opt.Release {
		return
	}
	time.AfterFunc(reclaimAfter, h.release)
}

// close ends the renewals; it returns true for the first call.
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

// Counts returns the number of leases renewed, of requests released, and of messages that
// failed or were dropped.
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

// renewAll queues heartbeats, one job per engine, for leases older than renewInterval.
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
