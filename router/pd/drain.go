package pd

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
	"sluice/router/worker"
)

// migratableStreams indexes the streams that another engine could continue by their current worker,
// so that they can leave a worker that drains. It takes its lock for one map operation at the
// beginning and the end of a stream.
type migratableStreams struct {
	mu       sync.Mutex
	byWorker map[*worker.Worker]map[*streamState]*preemptible // nil for streams that are never suspended
	// preemptible is the number of streams with a preemptible.
	preemptible atomic.Int64
}

func (m *migratableStreams) add(s *streamState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.insert(s)
}

// insert adds a stream to the index of its worker. The caller holds mu.
func (m *migratableStreams) insert(s *streamState) {
	w := s.rank.Worker
	s.indexedWorker = w
	if m.byWorker == nil {
		m.byWorker = make(map[*worker.Worker]map[*streamState]*preemptible)
	}
	if m.byWorker[w] == nil {
		m.byWorker[w] = make(map[*streamState]*preemptible)
	}
	p := s.preemptible()
	if m.byWorker[w][s] = p; p != nil {
		p.rank, p.since, p.ask = s.rank, monotime.Of(time.Now()), nil
		m.preemptible.Add(1)
	}
}

// relocate updates the index after a stream has moved to another worker.
func (m *migratableStreams) relocate(s *streamState) {
	if s.migration == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delete(s)
	m.insert(s)
}

func (m *migratableStreams) remove(s *streamState) {
	if s.migration == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delete(s)
}

// delete removes a stream from the index. The caller holds mu.
func (m *migratableStreams) delete(s *streamState) {
	if list := m.byWorker[s.indexedWorker]; list != nil {
		if list[s] != nil {
			m.preemptible.Add(-1)
		}
		if delete(list, s); len(list) == 0 {
			delete(m.byWorker, s.indexedWorker)
		}
	}
}

// streamsOf returns the streams of a worker as a new slice.
func (m *migratableStreams) streamsOf(w *worker.Worker) []*streamState {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*streamState, 0, len(m.byWorker[w]))
	for s := range m.byWorker[w] {
		all = append(all, s)
	}
	return all
}

const (
	// drainStreams asks drainBatch streams at a time to migrate and then pauses, so that the other
	// workers do not receive all resume prompts at once.
	drainBatch      = 32
	drainBatchPause = 20 * time.Millisecond
	// drainRetry is the time after which a stream that found no other worker is asked again.
	drainRetry = time.Second
)

// WorkerChanged handles a state change of a worker. If the worker drains or has been removed, its
// migratable streams move to other workers after Migration.DrainDelay, each at its next splice
// point. Streams that cannot move stay until they end. WorkerChanged does not block.
func (r *Runner) WorkerChanged(w *worker.Worker, to worker.State) {
	m := &r.options().Migration
	if m.MaxAttempts == 0 || m.DrainDelay < 0 || to != worker.Draining && to != worker.Gone {
		return
	}
	time.AfterFunc(m.DrainDelay, func() { r.drainStreams(w) })
}

// drainStreams asks the streams of a worker to migrate. It repeats this every drainRetry until the
// worker has no streams.
func (r *Runner) drainStreams(w *worker.Worker) {
	if state, _ := w.State(); state != worker.Draining && state != worker.Gone {
		return // the drain was cancelled
	}
	streams := r.migratable.streamsOf(w)
	if len(streams) == 0 {
		return
	}
	for i, s := range streams {
		if i > 0 && i%drainBatch == 0 {
			time.Sleep(drainBatchPause)
		}
		s.migration.RequestMigration()
	}
	time.AfterFunc(drainRetry, func() { r.drainStreams(w) })
}
