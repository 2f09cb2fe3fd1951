package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/liveness"
	"sluice/router/worker"
)

// Options of a Fleet; zero values mean the default in brackets.
type Options struct {
	Log      *slog.Logger
	Upstream upstream.Options
	// ProbeInterval between health probes of a server that has requests under way and
	// answers none, or that is in doubt, or of which there are few [500ms]. Where there
	// are many, those without requests are probed more seldom: see DetectIdleWithin.
	ProbeInterval time.Duration
	ProbeTimeout  time.Duration // [1s]
	// HealthPath that engines are probed at [/health, /ping, /v1/models: the first that
	// there is]. A worker's Spec may name another.
	HealthPath string
	// FailAfter consecutive failures (probes, or connection-level failures of
	// traffic) a worker is Unhealthy [2]; one success of a probe brings it back.
	// A probe that hangs counts once for every ProbeInterval it took, so a dead
	// engine is out after at most the time DetectWithin gives (1.5s by default).
	FailAfter int
	// ScrapeInterval of /metrics for running, waiting, KV usage [1s]; <0: never. It grows
	// with the number of servers as ProbeInterval does.
	ScrapeInterval time.Duration
	// BreakerThreshold failures in a row of one rank (connection failures, 500, 502,
	// 504) its breaker opens, for BreakerTimeout at first and up to 30 s [5, 1s].
	BreakerThreshold int
	BreakerTimeout   time.Duration
	// Frozen is how long an engine must have shown no sign of life until it counts as
	// frozen and its calls are ended [10s process, 30s core, 10s host]; below 0: never.
	Frozen liveness.Bounds
	// MaxRequests and MaxTokens bound what this router has under way on one
	// rank: requests, and prompt tokens still to be computed. A rank at a bound
	// is Full until some end; 0: no bound. A worker's Spec may say otherwise.
	MaxRequests, MaxTokens int64
	// RetryShare is how many retries a pool is granted for each of its requests,
	// RetryPerSecond how many beside those [0.2, 3]; below 0: none.
	RetryShare, RetryPerSecond float64
	// ProbeInference sends one tiny completion to each server of a worker before
	// it is admitted [false]. Beside it only an engine core that may be frozen is
	// asked for one token; nothing else ever calls an inference endpoint.
	ProbeInference bool
	// OnJoin is called when a worker has answered and is about to be Ready for
	// the first time, or again after its engine changed (restart: OnLeave, then
	// OnJoin), or once more when another of its ranks' servers has answered for
	// the first time. Those ranks take no request before OnJoin returned, so a
	// feed started there misses nothing. OnLeave is called when it was removed or its
	// engine is a new process. Both run on the fleet's own goroutines, one at a
	// time per worker id, and must not call Close.
	OnJoin  func(*worker.Worker)
	OnLeave func(*worker.Worker)
	// OnState is called after every change of a worker's state, in order, on
	// the same goroutine as OnJoin and OnLeave of that worker.
	OnState func(w *worker.Worker, from, to worker.State, reason string)
}

func (o *Options) defaults() {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.ProbeInterval <= 0 {
		o.ProbeInterval = 500 * time.Millisecond
	}
	if o.ProbeTimeout <= 0 {
		o.ProbeTimeout = time.Second
	}
	if o.FailAfter <= 0 {
		o.FailAfter = 2
	}
	if o.BreakerThreshold <= 0 {
		o.BreakerThreshold = 5
	}
	if o.BreakerTimeout <= 0 {
		o.BreakerTimeout = time.Second
	}
	if o.Frozen.Process == 0 {
		o.Frozen.Process = 10 * time.Second
	}
	if o.Frozen.Core == 0 {
		o.Frozen.Core = 30 * time.Second
	}
	if o.Frozen.Host == 0 {
		o.Frozen.Host = 10 * time.Second
	}
	if o.RetryShare == 0 {
		o.RetryShare = 0.2
	}
	if o.RetryPerSecond == 0 {
		o.RetryPerSecond = 3
	}
	if o.ScrapeInterval == 0 {
		o.ScrapeInterval = time.Second
	}
}

// DetectWithin is the longest that a dead engine that has requests under way stays in the
// choice when none of them tells of it sooner: it died just after a probe, and the next
// ones are refused or hang until their time-out.
func (o Options) DetectWithin() time.Duration {
	p := o.Settings()
	return p.detectWithin()
}

// DetectIdleWithin is the same for an engine without requests, in a fleet of so many
// servers: the more there are, the more seldom each is probed.
func (o Options) DetectIdleWithin(servers int) time.Duration {
	p := o.Settings()
	iv := p.intervals(servers)
	within := p.detectWithin() - iv.probe + iv.idleProbe
	if iv.idleProbe > iv.probe {
		within += iv.tick
	}
	return within
}

func (p *Settings) detectWithin() time.Duration {
	// A probe that hangs has used up whole intervals; one left over of them
	// needs one more probe, which may hang as long.
	hung := max(int(p.ProbeTimeout/p.ProbeInterval), 1)
	probes := (p.FailAfter + hung - 1) / hung
	each := max(p.ProbeTimeout, p.ProbeInterval)
	refused := p.ProbeInterval * time.Duration(p.FailAfter)
	return max(refused, p.ProbeInterval+each*time.Duration(probes-1)+p.ProbeTimeout)
}

// Fleet is the membership. Safe for concurrent use.
//
// Locks: mu serialises membership, state transitions and the making of a View;
// it is never held over I/O or a callback. Readers take none: View and the slot
// table are atomic pointers, and the counters of Failed and Succeeded atomics.
type Fleet struct {
	opt           Options
	settings      atomic.Pointer[activeSettings]
	view          atomic.Pointer[View]
	slots         [worker.MaxSlots]atomic.Pointer[rankBreaker]
	servers       atomic.Pointer[[]*server] // of all members; changed with mu held
	recheck       chan struct{}             // see recheckSoon
	halfOpenCount atomic.Int32              // breakers half open
	hasLimits     atomic.Bool               // a worker has, or had, bounds of its own
	retriesDenied atomic.Uint64             // retries
	restarts      [len(RestartSigns)]atomic.Uint64
	freezes       [liveness.NumStates]atomic.Uint64 // verdicts
	frozenCalls   [liveness.NumStates]atomic.Uint64 // calls ended for them
	started       time.Time
	ctx           context.Context
	cancel        context.CancelFunc
	wg            sync.WaitGroup

	mu         sync.Mutex
	members    map[string]*member
	transients map[*worker.Worker]*member
	removing   map[string]chan struct{} // ids whose OnLeave has not returned
	freeRanks  []*worker.Rank           // whose slots were given back, oldest first
	budgets    map[string]*retryBudget  // of retries, by model
	next       int                      // slots never given out begin here
	closed     bool
}

// New makes an empty Fleet.
func New(opt Options) *Fleet {
	opt.defaults()
	f := &Fleet{opt: opt, started: time.Now(), members: map[string]*member{}, transients: map[*worker.Worker]*member{}, removing: map[string]chan struct{}{}, budgets: map[string]*retryBudget{}, recheck: make(chan struct{}, 1)}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.Reload(opt.Settings())
	f.view.Store(&View{pools: map[string]*Pool{}, changed: make(chan struct{})})
	f.servers.Store(new([]*server))
	f.wg.Go(f.schedule)
	f.wg.Go(func() { f.detectFrozen(f.ctx) })
	return f
}

// errClosed is what Add, Remove and Drain return after Close.
var errClosed = errors.New("the fleet is closed")

// Add takes a worker in, in state Joining, and starts to probe it. It fails on
// an id already there, a URL that is none, or when slots have run out. An empty
// id becomes role@host:port.
func (f *Fleet) Add(spec worker.Spec) error {
	spec.URL = strings.TrimRight(spec.URL, "/")
	if spec.ID == "" {
		_, host, _ := strings.Cut(spec.URL, "://")
		spec.ID = spec.Role.String() + "@" + host
	}
	if err := checkSpec(spec); err != nil {
		return fmt.Errorf("fleet: cannot add %q: %w", spec.ID, err)
	}
	w := worker.New(spec)
	m := &member{fleet: f, worker: w, wake: make(chan struct{}, 1), done: make(chan struct{})}
	if err := m.makeServers(); err != nil {
		return fmt.Errorf("fleet: cannot add %q: %w", spec.ID, err)
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return fmt.Errorf("fleet: cannot add %q: %w", spec.ID, errClosed)
	}
	if _, there := f.members[spec.ID]; there {
		return fmt.Errorf("fleet: cannot add %q: a worker of this id is there already; want another id, or remove it first", spec.ID)
	}
	if left := f.slotsLeft(); len(w.Ranks) > left {
		return fmt.Errorf("fleet: cannot add %q: its %d ranks do not fit in the %d slots left of %d", spec.ID, len(w.Ranks), left, worker.MaxSlots)
	}
	f.assignSlots(m)
	m.setConnLimit(f.settings.Load().Engines) // of now
	m.ctx, m.cancel = context.WithCancel(f.ctx)
	m.predecessor = f.removing[spec.ID]
	f.members[spec.ID] = m
	f.publish()
	m.start()
	f.watchServers(append(slices.Clone(*f.servers.Load()), m.servers...))
	return nil
}

// watchServers replaces the servers that the schedule looks at. Called with mu.
func (f *Fleet) watchServers(list []*server) {
	f.servers.Store(&list)
	f.recheckSoon()
}

func checkSpec(spec worker.Spec) error {
	if len(spec.RankURLs) > 0 && len(spec.RankURLs) != max(len(spec.Ranks), 1) {
		return fmt.Errorf("%d rank URLs for %d ranks; want one for each rank", len(spec.RankURLs), max(len(spec.Ranks), 1))
	}
	seen := map[uint16]bool{}
	for _, r := range spec.Ranks {
		if seen[r] {
			return fmt.Errorf("rank %d is named twice", r)
		}
		seen[r] = true
	}
	_, err := worker.ParseID(spec.ID)
	if err == nil && strings.Contains(spec.ID, "/") {
		err = fmt.Errorf("worker id %q holds a slash, which parts it from the rank", spec.ID)
	}
	return err
}

// acquireSlot prefers slots given back longest ago: numbers stay dense, and a
// stale reader is least likely to meet a new holder. A slot whose old rank still
// has requests under way waits: their reservations are booked by slot, and must
// not weigh on another. Called with mu.
func (f *Fleet) acquireSlot() worker.Slot {
	if i := slices.IndexFunc(f.freeRanks, idle); i >= 0 {
		s := f.freeRanks[i].Slot
		f.freeRanks = slices.Delete(f.freeRanks, i, i+1)
		return s
	}
	f.next++
	return worker.Slot(f.next - 1)
}

func idle(r *worker.Rank) bool { return r.Requests.Load() <= 0 }

// slotsLeft counts what acquireSlot can give. Called with mu.
func (f *Fleet) slotsLeft() int {
	n := worker.MaxSlots - f.next
	for _, r := range f.freeRanks {
		if idle(r) {
			n++
		}
	}
	return n
}

// Remove takes a worker out: it leaves the choice at once, its probes end. Its
// slots are given out again only after OnLeave has returned.
func (f *Fleet) Remove(id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, err := f.member(id, "remove")
	if err != nil {
		return err
	}
	delete(f.members, id)
	f.removing[id] = m.done
	m.removed = true
	for _, s := range m.servers {
		for _, t := range s.breakers {
			t.reset()
		}
	}
	m.setState(worker.Gone, "removed")
	f.publish()
	f.watchServers(slices.DeleteFunc(slices.Clone(*f.servers.Load()), func(s *server) bool { return s.member == m }))
	m.cancel()
	return nil
}

// Drain puts a worker in state Draining (on) or back to Joining (off), from
// where it is Ready again as soon as its engine answers.
func (f *Fleet) Drain(id string, on bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, err := f.member(id, "drain")
	if err != nil {
		return err
	}
	if m.drain == on {
		return nil
	}
	m.drain = on
	if on {
		m.setState(worker.Draining, "drained by request")
	} else {
		m.setState(worker.Joining, "drain ended")
		m.updateState()
	}
	f.publish()
	m.wakeUp()
	return nil
}

// member finds one by id. Called with mu.
func (f *Fleet) member(id, verb string) (*member, error) {
	if f.closed {
		return nil, fmt.Errorf("fleet: cannot %s %q: %w", verb, id, errClosed)
	}
	m, ok := f.members[id]
	if !ok {
		return nil, fmt.Errorf("fleet: cannot %s %q: no worker has this id", verb, id)
	}
	return m, nil
}

// Endpoint gives the connections of a rank; never nil for a rank of a View.
// For a rank of a worker that was removed since it is one that keeps no
// connections; a call on it goes to the engine the rank was of.
func (f *Fleet) Endpoint(r *worker.Rank) *upstream.Endpoint {
	if s := f.server(r); s != nil {
		return s.traffic
	}
	ep, err := upstream.NewEndpoint(r.URL, f.upstream())
	if err != nil {
		return nil // not a rank of any View: Add refuses such a URL
	}
	ep.Close()
	return ep
}

// server is that of a rank, nil when its slot has another holder by now.
func (f *Fleet) server(r *worker.Rank) *server {
	if t := f.breaker(r); t != nil {
		return t.server
	}
	return nil
}

// breaker is that of a rank, nil when its slot has another holder by now.
func (f *Fleet) breaker(r *worker.Rank) *rankBreaker {
	if int(r.Slot) >= len(f.slots) {
		return nil
	}
	if t := f.slots[r.Slot].Load(); t != nil && t.rank == r {
		return t
	}
	return nil
}

// ReportFailure reports a connection-level failure of traffic to a rank (refused,
// reset, timed out before the head): it counts against the rank's breaker, and
// against its server's health. Cheap, and safe on the request path. A leg that
// the router cut itself, also because the engine was found frozen, or found no connection or descriptor left for, is ignored. For legs
// that were answered see Answered.
func (f *Fleet) ReportFailure(r *worker.Rank, err error) {
	if errors.Is(err, upstream.ErrCancelled) || errors.Is(err, upstream.ErrFrozen) || errors.Is(err, upstream.ErrTooManyConns) || errors.Is(err, upstream.ErrLocalResources) {
		return
	}
	if t := f.breaker(r); t != nil {
		t.server.trafficFailed(err)
		t.failed(func() string { return short(err) })
	}
}

// Close ends all probes and goroutines and returns when they have ended.
// OnLeave is not called: nobody was removed. Not to be called from a callback.
func (f *Fleet) Close() {
	f.mu.Lock()
	f.closed = true
	for _, m := range f.transients { // the others' goroutines close theirs
		m.closeServers()
	}
	f.mu.Unlock()
	f.cancel()
	f.wg.Wait()
}

// releaseSlots gives a member's slots back once its OnLeave has returned.
func (f *Fleet) releaseSlots(m *member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range m.worker.Ranks {
		f.slots[r.Slot].Store(nil)
		f.freeRanks = append(f.freeRanks, r)
	}
	if f.removing[m.worker.Spec.ID] == m.done {
		delete(f.removing, m.worker.Spec.ID)
	}
}

// Restarts is how many new processes were known by a sign, one of RestartSigns.
func (f *Fleet) Restarts(sign string) uint64 {
	return f.restarts[slices.Index(RestartSigns[:], sign)].Load()
}

// setUnknownLoad marks a load that the engine does not report (any more).
func setUnknownLoad(r *worker.Rank) {
	r.Running.Store(-1)
	r.Waiting.Store(-1)
	r.SetKVUsage(-1)
}

func usable(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) && v >= 0 }
