package transfers

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"sluice/nixl"
	"sluice/nixl/notify"
)

// zmqTier keeps a PULL socket bound for the connector's reports.
type zmqTier struct {
	w        *Watch
	endpoint string
	networks []netip.Prefix
	retry    time.Duration
	stop     context.CancelFunc
	done     chan struct{}

	mu     sync.Mutex
	state  nixl.TierState
	reason string
	bound  string // with the port it was given; "" while it is not up
}

const (
	zmqRetry    = time.Second
	zmqMaxRetry = 30 * time.Second
)

func (w *Watch) startZMQ(opt *Options) *zmqTier {
	ctx, cancel := context.WithCancel(context.Background())
	z := &zmqTier{w: w, endpoint: opt.Endpoint, networks: opt.Networks, retry: opt.retry, stop: cancel, done: make(chan struct{}),
		state: nixl.TierStarting, reason: "its socket is being bound"}
	if z.retry <= 0 {
		z.retry = zmqRetry
	}
	go z.run(ctx)
	return z
}

// run binds, and binds again when that failed or the socket died, after a pause
// that grows.
func (z *zmqTier) run(ctx context.Context) {
	defer close(z.done)
	pause := z.retry
	for {
		board, err := notify.Listen(notify.Options{Endpoint: z.endpoint, Networks: z.networks, Report: z.w.frame, Log: z.w.log})
		if err == nil {
			pause = z.retry
			z.set(nixl.TierUp, board.Endpoint(), "reports are taken at "+board.Endpoint())
			select {
			case <-ctx.Done():
			case <-board.Done():
				err = fmt.Errorf("ZMQ failed at %s", board.Endpoint())
			}
			board.Close()
		}
		if ctx.Err() != nil {
			z.set(nixl.TierOff, "", "closed")
			return
		}
		z.set(nixl.TierDown, "", fmt.Sprintf("%v; tried again in %s", err, pause))
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, zmqMaxRetry)
	}
}

func (z *zmqTier) set(s nixl.TierState, bound, reason string) {
	z.mu.Lock()
	was := z.state
	z.state, z.bound, z.reason = s, bound, reason
	z.mu.Unlock()
	if was != s {
		z.w.changed(nixl.TierZMQ, was, s, reason)
	}
}

// Tier implements nixl.Means.
func (z *zmqTier) Tier() nixl.Tier { return nixl.TierZMQ }

// Status implements nixl.Means.
func (z *zmqTier) Status() (nixl.TierState, string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.state, z.reason
}

// Close implements nixl.Means.
func (z *zmqTier) Close() error {
	z.stop()
	<-z.done
	return nil
}

func (z *zmqTier) at() string {
	if z == nil {
		return ""
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.bound
}
