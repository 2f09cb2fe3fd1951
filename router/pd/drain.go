package pd

import (
	"sync"
	"time"

	"sluice/router/worker"
)

// migratableStreams are the streams under way that can go on elsewhere, by the worker that they
// are on, so that a worker that is to go can be left. A lock is held for one map
// operation when a stream begins and ends.
type migratableStreams struct {
	mu       sync.Mutex
	byWorker map[*worker.Worker]map[*migrationState]struct{}
}

func (m *migratableStreams) add(c *migrationState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.insert(c)
}

// insert adds a stream to those of its worker. Called with mu.
func (m *migratableStreams) insert(c *migrationState) {
	w := c.stream.rank.Worker
	c.stream.indexedWorker = w
	if m.byWorker == nil {
		m.byWorker = make(map[*worker.Worker]map[*migrationState]struct{})
	}
	if m.byWorker[w] == nil {
		m.byWorker[w] = make(map[*migrationState]struct{})
	}
	m.byWorker[w][c] = struct{}{}
}

// relocate notes that a stream is on another worker.
func (m *migratableStreams) relocate(s *streamState) {
	if s.migration == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delete(s)
	m.insert(s.migration)
}

func (m *migratableStreams) remove(s *streamState) {
	if s.migration == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delete(s)
}

// delete takes a stream out. Called with mu.
func (m *migratableStreams) delete(s *streamState) {
	if list := m.byWorker[s.indexedWorker]; list != nil {
		if delete(list, s.migration); len(list) == 0 {
			delete(m.byWorker, s.indexedWorker)
		}
	}
}

// streamsOf is a copy of a worker's streams.
func (m *migratableStreams) streamsOf(w *worker.Worker) []*migrationState {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*migrationState, 0, len(m.byWorker[w]))
	for c := range m.byWorker[w] {
		all = append(all, c)
	}
	return all
}

const (
	// Streams that leave a worker do so in steps, so that those that take them are
	// not given all prompts at once.
	drainBatch      = 32
	drainBatchPause = 20 * time.Millisecond
	// drainRetry is after how long a stream that found no other worker is asked
	// again.
	drainRetry = time.Second
)

// WorkerChanged takes in a worker's new state: streams of one that drains or has left move
// to others after Migration.DrainAfter, each as soon as it stands where it can; those
// that cannot stay. It returns at once.
func (r *Runner) WorkerChanged(w *worker.Worker, to worker.State) {
	m := &r.options().Migration
	if m.Max == 0 || m.DrainAfter < 0 || to != worker.Draining && to != worker.Gone {
		return
	}
	time.AfterFunc(m.DrainAfter, func() { r.drainStreams(w) })
}

// drainStreams asks a worker's streams to move, again and again while there are any.
func (r *Runner) drainStreams(w *worker.Worker) {
	if state, _ := w.State(); state != worker.Draining && state != worker.Gone {
		return // it was taken back
	}
	streams := r.migratable.streamsOf(w)
	if len(streams) == 0 {
		return
	}
	for i, c := range streams {
		if i > 0 && i%drainBatch == 0 {
			time.Sleep(drainBatchPause)
		}
		c.RequestMigration()
	}
	time.AfterFunc(drainRetry, func() { r.drainStreams(w) })
}
