//go:build !linux

package zmtp

import (
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"
)

func duplicate(fd int) (int, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := syscall.Dup(fd)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	return fd, err
}

// Poller reports all Streams at each tick. With epoll it knows which are readable.
type Poller struct {
	stop chan struct{}
	done chan struct{}

	mu      sync.Mutex
	watched map[int]func()
}

const tick = 10 * time.Millisecond

// NewPoller creates a Poller that reports once each tick.
func NewPoller() (*Poller, error) {
	p := &Poller{stop: make(chan struct{}), done: make(chan struct{}), watched: make(map[int]func())}
	go p.run()
	return p, nil
}

// Watch calls ready whenever s may have something to read, until it is closed. ready is called on
// the Poller's goroutine, one at a time, may be called once more after Close, and must return soon.
func (p *Poller) Watch(s *Stream, ready func()) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.poller = p
	p.watched[s.fd] = ready
	return nil
}

func (p *Poller) remove(fd int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.watched, fd)
}

func (p *Poller) run() {
	defer close(p.done)
	for {
		select {
		case <-p.stop:
			return
		case <-time.After(tick):
		}
		p.mu.Lock()
		all := slices.Collect(maps.Values(p.watched))
		p.mu.Unlock()
		for _, ready := range all {
			ready()
		}
	}
}

// Close stops the Poller. The caller closes its Streams before.
func (p *Poller) Close() {
	close(p.stop)
	<-p.done
}
