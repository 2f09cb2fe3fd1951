package transfers

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"sluice/nixl"
	"sluice/nixl/zmtp"
)

// zmqTier keeps a PULL socket bound for the connector's reports.
type zmqTier struct {
	w        *Watch
	endpoint string
	networks []netip.Prefix
	passed   net.Listener // see Options.Bound
	retry    time.Duration
	stop     context.CancelFunc
	done     chan struct{}
	left     chan struct{} // closed by leave
	leaving  sync.Once

	mu     sync.Mutex
	state  nixl.TierState
	reason string
	bound  string     // with the port it was given; "" while it is not up
	pull   *zmtp.Pull // nil likewise
	before zmtp.Stats // of the sockets that were closed
}

const (
	zmqRetry    = time.Second
	zmqMaxRetry = 30 * time.Second
)

func (w *Watch) startZMQ(opt *Options) *zmqTier {
	ctx, cancel := context.WithCancel(context.Background())
	networks := opt.ZMQNetworks
	if len(networks) == 0 {
		networks = opt.Networks
	}
	z := &zmqTier{w: w, endpoint: opt.Endpoint, networks: networks, passed: opt.Bound, retry: opt.retry, stop: cancel, done: make(chan struct{}), left: make(chan struct{}),
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
	listener := z.opened(ctx)
	for {
		pull, err := zmtp.Listen(zmtp.Options{Endpoint: z.endpoint, Listener: listener, Networks: z.networks, Message: func(m []byte) { z.w.frame(m) }, Log: z.w.log})
		listener = nil
		if err == nil {
			pause = z.retry
			z.use(pull)
			z.set(nixl.TierUp, pull.Endpoint(), "reports are taken at "+pull.Endpoint())
			select {
			case <-ctx.Done():
			case <-z.left:
				pull.Leave()
				<-ctx.Done()
			case <-pull.Done():
				err = fmt.Errorf("the socket failed at %s", pull.Endpoint())
			}
			pull.Close()
			z.use(nil)
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

// opened waits until the listener that was passed may accept; nil where there is none.
func (z *zmqTier) opened(ctx context.Context) *net.TCPListener {
	if z.passed == nil {
		return nil
	}
	stop := context.AfterFunc(ctx, func() { z.passed.Close() })
	defer stop()
	ln := z.passed
	if held, ok := ln.(interface{ Opened() (net.Listener, error) }); ok {
		var err error
		if ln, err = held.Opened(); err != nil {
			return nil
		}
	}
	tcp, _ := ln.(*net.TCPListener)
	return tcp
}

// listener is what is passed to the next process; nil while nothing is bound.
func (z *zmqTier) listener() net.Listener {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.pull == nil {
		return nil
	}
	return z.pull.Listener()
}

// leave ends accepting for good.
func (z *zmqTier) leave() { z.leaving.Do(func() { close(z.left) }) }

// use makes pull the socket whose counters are shown beside those of the ones before.
func (z *zmqTier) use(pull *zmtp.Pull) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.pull != nil {
		z.before = z.pull.Stats().Plus(z.before)
	}
	z.pull = pull
}

// stats counts over all sockets of the tier.
func (z *zmqTier) stats() zmtp.Stats {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.pull == nil {
		return z.before
	}
	return z.pull.Stats().Plus(z.before)
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
