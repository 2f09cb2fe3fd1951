package kvtransfer

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/zmtp"
	"sluice/nixl"
)

// zmqTier keeps a PULL socket bound that receives the connector's reports.
type zmqTier struct {
	watcher  *Watcher
	endpoint string
	networks []netip.Prefix
	passed   net.Listener // Options.Bound
	retry    time.Duration
	stop     context.CancelFunc
	done     chan struct{}
	closing  chan struct{} // closed by stopAccepting
	stopOnce sync.Once

	mu          sync.Mutex
	state       nixl.TierState
	reason      string
	bound       string     // endpoint with the actual port; "" while the tier is not up
	pull        *zmtp.Pull // nil while the tier is not up
	closedStats zmtp.Stats // sum over the sockets that were closed
}

const (
	zmqRetry    = time.Second
	zmqMaxRetry = 30 * time.Second
)

func (w *Watcher) startZMQ(opt *Options) *zmqTier {
	ctx, cancel := context.WithCancel(context.Background())
	networks := opt.ZMQNetworks
	if len(networks) == 0 {
		networks = opt.Networks
	}
	z := &zmqTier{watcher: w, endpoint: opt.Endpoint, networks: networks, passed: opt.Bound, retry: opt.retry, stop: cancel, done: make(chan struct{}), closing: make(chan struct{}),
		state: nixl.TierStarting, reason: "its socket is being bound"}
	if z.retry <= 0 {
		z.retry = zmqRetry
	}
	go z.run(ctx)
	return z
}

// run binds the socket. When binding fails or the socket dies, it binds again after a pause
// that grows.
func (z *zmqTier) run(ctx context.Context) {
	defer close(z.done)
	var retry backoff.Backoff
	listener := z.opened(ctx)
	for {
		pull, err := zmtp.Listen(zmtp.Options{Endpoint: z.endpoint, Listener: listener, Networks: z.networks, Message: func(m []byte) { z.watcher.handleMessage(m) }, Log: z.watcher.log})
		listener = nil
		if err == nil {
			retry.Reset()
			z.setSocket(pull)
			z.setState(nixl.TierUp, pull.Endpoint(), "receives reports at "+pull.Endpoint())
			select {
			case <-ctx.Done():
			case <-z.closing:
				pull.StopAccepting()
				<-ctx.Done()
			case <-pull.Done():
				err = fmt.Errorf("the socket at %s failed", pull.Endpoint())
			}
			pull.Close()
			z.setSocket(nil)
		}
		if ctx.Err() != nil {
			z.setState(nixl.TierOff, "", "closed")
			return
		}
		pause := retry.Next(z.retry, zmqMaxRetry)
		z.setState(nixl.TierDown, "", fmt.Sprintf("%v; retrying in %s", err, pause))
		backoff.Sleep(ctx, pause)
	}
}

// opened waits until the inherited listener may accept connections and returns it; nil when
// there is none.
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

// listener returns the listener to pass to the child process; nil while nothing is bound.
func (z *zmqTier) listener() net.Listener {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.pull == nil {
		return nil
	}
	return z.pull.Listener()
}

// stopAccepting stops accepting connections permanently.
func (z *zmqTier) stopAccepting() { z.stopOnce.Do(func() { close(z.closing) }) }

// setSocket makes pull the current socket and adds the counters of the previous one to
// closedStats.
func (z *zmqTier) setSocket(pull *zmtp.Pull) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.pull != nil {
		z.closedStats = z.pull.Stats().Add(z.closedStats)
	}
	z.pull = pull
}

// stats sums the counters of all sockets that the tier has had.
func (z *zmqTier) stats() zmtp.Stats {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.pull == nil {
		return z.closedStats
	}
	return z.pull.Stats().Add(z.closedStats)
}

func (z *zmqTier) setState(s nixl.TierState, bound, reason string) {
	z.mu.Lock()
	previous := z.state
	z.state, z.bound, z.reason = s, bound, reason
	z.mu.Unlock()
	if previous != s {
		z.watcher.tierChanged(nixl.TierZMQ, previous, s, reason)
	}
}

// Tier implements nixl.TierService.
func (z *zmqTier) Tier() nixl.Tier { return nixl.TierZMQ }

// Status implements nixl.TierService.
func (z *zmqTier) Status() (nixl.TierState, string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.state, z.reason
}

// Close implements nixl.TierService.
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
