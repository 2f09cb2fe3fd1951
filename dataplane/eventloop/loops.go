package eventloop

import (
	"fmt"
	"sync/atomic"
	"time"

	"sluice/dataplane/membudget"
)

// Options of Start; zero values mean the default in brackets.
type Options struct {
	Loops int // threads [one for each CPU that Go uses]
	// Tick is how often time-outs are looked at: how late they may be, but for tasks'
	// Until [1s].
	Tick time.Duration
	// Budget counts what is held for slow clients; one for whom there is no room left,
	// and who needs more than any client now and then, is cut. nil: nothing is counted.
	Budget *membudget.Budget
	// OnFail is told, once a loop, that its poller has failed; its streams were ended.
	OnFail func(error)
	// OnStarved is told, on the loop's thread, that this was held up for so long (a second
	// and more), because the process was stopped or others had its cores. Tasks' Idle and
	// WriteTimeout do not count that time, their Until does.
	OnStarved func(time.Duration)
}

// Loops are the threads of one process. Safe for concurrent use.
type Loops struct {
	all    []*Loop
	next   atomic.Uint32
	closed atomic.Bool
}

// Start starts the threads. It fails where the kernel refuses them an epoll instance,
// and on systems other than Linux.
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
			return nil, fmt.Errorf("loop: cannot start thread %d of %d: %w", len(s.all)+1, opt.Loops, err)
		}
		s.all = append(s.all, l)
	}
	return s, nil
}

// Attach gives t to the loop that has fewest; Left is called in any case, on another
// goroutine, or on this one after Close. A loop whose poller has failed gets no more.
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

// Threads is how many there are.
func (s *Loops) Threads() int { return len(s.all) }

// Streams is how many tasks the loops hold.
func (s *Loops) Streams() int {
	n := 0
	for _, l := range s.all {
		l.mu.Lock()
		n += l.load
		l.mu.Unlock()
	}
	return n
}

// Close ends all tasks as if cut and waits for the threads.
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
