package eventloop

import (
	"fmt"
	"sync/atomic"
	"time"

	"sluice/dataplane/membudget"
)

// Options of Start. A zero value means the default in brackets.
type Options struct {
	Loops int // number of threads [one for each CPU that Go uses]
	// Tick is the interval of timeout checks, and so how late a timeout may be. Task deadlines
	// are more exact [1s].
	Tick time.Duration
	// Budget bounds the memory held for slow clients. When it is exhausted, a client that needs
	// more than the minimum is cut off. nil: no bound.
	Budget *membudget.Budget
	// OnFail is called once for a loop whose poller has failed. The loop's streams have been ended.
	OnFail func(error)
	// OnStarved is called on the loop's thread when it was delayed by a second or more, because the
	// process was stopped or had no CPU. The delay does not count in the tasks' Idle and
	// WriteTimeout, but in their deadlines.
	OnStarved func(time.Duration)
}

// Loops are the threads of one process. All methods are safe for concurrent use.
type Loops struct {
	all    []*Loop
	next   atomic.Uint32
	closed atomic.Bool
}

// Start starts the threads. It fails if the kernel refuses an epoll instance, and on systems other
// than Linux.
func Start(opt Options) (*Loops, error) {
	if opt.Loops <= 0 {
		opt.Loops = procs.base()
	}
	if opt.Tick <= 0 {
		opt.Tick = time.Second
	}
	if opt.OnFail == nil {
		opt.OnFail = func(error) {}
	}
	setTimerSlack()
	s := new(Loops)
	for range opt.Loops {
		l := newLoop(&opt)
		opened := make(chan error, 1)
		go l.run(opened)
		if err := <-opened; err != nil {
			s.Close()
			return nil, fmt.Errorf("eventloop: cannot start thread %d of %d: %w", len(s.all)+1, opt.Loops, err)
		}
		s.all = append(s.all, l)
	}
	return s, nil
}

// Attach passes t to the loop with the fewest tasks. Ended is called in any case, on another
// goroutine, or on this one after Close. A loop whose poller has failed gets no more tasks.
func (s *Loops) Attach(t *Task) {
	first := s.next.Add(1)
	var best *Loop
	minLoad := 0
	for i := range s.all {
		l := s.all[(int(first)+i)%len(s.all)]
		l.mu.Lock()
		load, ended := l.load, l.ended
		l.mu.Unlock()
		if ended {
			continue
		}
		if best == nil || load < minLoad {
			best, minLoad = l, load
		}
		if load == 0 {
			break
		}
	}
	if best == nil || !best.admit(t) {
		t.Handler.Ended(End{Reason: Cancelled})
	}
}

// Threads returns the number of threads.
func (s *Loops) Threads() int { return len(s.all) }

// Streams returns the number of attached tasks.
func (s *Loops) Streams() int {
	n := 0
	for _, l := range s.all {
		l.mu.Lock()
		n += l.load
		l.mu.Unlock()
	}
	return n
}

// Close cancels all tasks and waits for the threads.
func (s *Loops) Close() {
	if s.closed.Swap(true) {
		return
	}
	for _, l := range s.all {
		l.stop()
	}
	for _, l := range s.all {
		<-l.done
	}
}
