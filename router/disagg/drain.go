package disagg

import (
	"sync"
	"time"

	"sluice/router/worker"
)

// movers are the streams under way that can go on elsewhere, by the worker that they
// are on, so that a worker that is to go can be left. A lock is held for one map
// operation when a stream begins and ends.
type movers struct {
	mu sync.Mutex
	of map[*worker.Worker]map[*carried]struct{}
}

func (m *movers) add(c *carried) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put(c)
}

// put adds a stream to those of its worker. Called with mu.
func (m *movers) put(c *carried) {
	w := c.s.rank.Worker
	c.s.on = w
	if m.of == nil {
		m.of = make(map[*worker.Worker]map[*carried]struct{})
	}
	if m.of[w] == nil {
		m.of[w] = make(map[*carried]struct{})
	}
	m.of[w][c] = struct{}{}
}

// move notes that a stream is on another worker.
func (m *movers) move(s *streamEnd) {
	if s.carried == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drop(s)
	m.put(s.carried)
}

func (m *movers) remove(s *streamEnd) {
	if s.carried == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drop(s)
}

// drop takes a stream out. Called with mu.
func (m *movers) drop(s *streamEnd) {
	if list := m.of[s.on]; list != nil {
		if delete(list, s.carried); len(list) == 0 {
			delete(m.of, s.on)
		}
	}
}

// list is a copy of a worker's streams.
func (m *movers) list(w *worker.Worker) []*carried {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*carried, 0, len(m.of[w]))
	for c := range m.of[w] {
		all = append(all, c)
	}
	return all
}

const (
	// Streams that leave a worker do so in steps, so that those that take them are
	// not given all prompts at once.
	moveAtOnce = 32
	movePause  = 20 * time.Millisecond
	// moveAgain is after how long a stream that found no other worker is asked
	// again.
	moveAgain = time.Second
)

// Changed takes in a worker's new state: streams of one that drains or has left move
// to others after Migration.DrainAfter, each as soon as it stands where it can; those
// that cannot stay. It returns at once.
func (r *Runner) Changed(w *worker.Worker, to worker.State) {
	m := &r.opt().Migration
	if m.Max == 0 || m.DrainAfter < 0 || to != worker.Draining && to != worker.Gone {
		return
	}
	time.AfterFunc(m.DrainAfter, func() { r.leave(w) })
}

// leave asks a worker's streams to move, again and again while there are any.
func (r *Runner) leave(w *worker.Worker) {
	if state, _ := w.State(); state != worker.Draining && state != worker.Gone {
		return // it was taken back
	}
	streams := r.movers.list(w)
	if len(streams) == 0 {
		return
	}
	for i, c := range streams {
		if i > 0 && i%moveAtOnce == 0 {
			time.Sleep(movePause)
		}
		c.AskMove()
	}
	time.AfterFunc(moveAgain, func() { r.leave(w) })
}
