package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/liveness"
	"sluice/router/networks"
	"sluice/router/worker"
)

// Options configures a Fleet. Zero values select the defaults in brackets.
type Options struct {
	Log *slog.Logger
	// Own are the router's own listeners. A worker there is refused; nil: none.
	Own      *networks.OwnListeners
	Upstream upstream.Options
	// ProbeInterval is the interval between health probes of a server that has running requests and
	// answers none, that is suspected, or that is one of few [500ms]. In large fleets, servers
	// without requests are probed less often: see DetectIdleWithin.
	ProbeInterval time.Duration
	ProbeTimeout  time.Duration // [1s]
	// HealthPath is the path of health probes [the first that exists of /health, /ping,
	// /v1/models]. A worker's Spec may set another.
	HealthPath string
	// After UnhealthyThreshold consecutive failures (probes, or connection-level failures of traffic) a
	// worker is Unhealthy [2]; one successful probe makes it healthy again. A probe that hangs
	// counts once for every ProbeInterval it took, so a dead engine is removed from the pools at
	// most DetectWithin after it died (1.5s by default).
	UnhealthyThreshold int
	// ScrapeInterval is the interval between readings of /metrics for running, waiting and KV usage
	// [1s]; below 0: never. It grows with the number of servers as ProbeInterval does.
	ScrapeInterval time.Duration
	// After BreakerThreshold consecutive failures of one rank (connection failures, 500, 502, 504)
	// its breaker opens, for BreakerTimeout at first and up to 30 s [5, 1s].
	BreakerThreshold int
	BreakerTimeout   time.Duration
	// Frozen is how long an engine must have shown no sign of life before it counts as frozen and
	// its calls are ended [10s process, 30s core, 10s host]; below 0: never.
	Frozen liveness.Bounds
	// MaxRequests and MaxTokens bound this router's running requests on one rank and their prompt
	// tokens still to be computed. A rank at a bound is AtCapacity until some end; 0: unlimited. A
	// worker's Spec may override them.
	MaxRequests, MaxTokens int64
	// RetryBudgetRatio is the number of retries that a pool may make per request, RetryBudgetMinPerSecond the
	// number per second in addition [0.2, 3]; below 0: none.
	RetryBudgetRatio, RetryBudgetMinPerSecond float64
	// ProbeInference sends one tiny completion to each server of a worker before it is admitted
	// [false]. Otherwise only an engine core that may be frozen is sent a completion of one token;
	// nothing else calls an inference endpoint.
	ProbeInference bool
	// Drained are ids of workers that are drained when they are first added, as in the process that this one
	// replaces. Drain ends it.
	Drained []string
	// OnJoin is called when a worker has answered and is about to be Ready for the first time,
	// again after its engine was replaced (restart: OnLeave, then OnJoin), and again when another
	// of its ranks' servers has answered for the first time. Those ranks get no request before
	// OnJoin has returned, so a feed started there misses nothing. OnLeave is called when the
	// worker was removed or its engine is a new process. Both run on the fleet's goroutines, one at
	// a time per worker id, and must not call Close.
	OnJoin  func(*worker.Worker)
	OnLeave func(*worker.Worker)
	// OnState is called after every change of a worker's state, in order, on the same goroutine as
	// OnJoin and OnLeave of that worker.
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
	if o.UnhealthyThreshold <= 0 {
		o.UnhealthyThreshold = 2
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
	if o.RetryBudgetRatio == 0 {
		o.RetryBudgetRatio = 0.2
	}
	if o.RetryBudgetMinPerSecond == 0 {
		o.RetryBudgetMinPerSecond = 3
	}
	if o.ScrapeInterval == 0 {
		o.ScrapeInterval = time.Second
	}
}

// DetectWithin is the longest time that a dead engine with running requests stays in the pools if
// none of them reports it sooner: it died just after a probe, and the next ones are refused or hang
// until their timeout.
func (o Options) DetectWithin() time.Duration {
	p := o.Settings()
	return p.detectWithin()
}

// DetectIdleWithin is the same for an engine without requests, in a fleet of that many servers: the
// more there are, the less often each is probed.
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
	// A probe that hangs uses up whole intervals; a remaining one needs one more probe, which may
	// hang as long.
	hung := max(int(p.ProbeTimeout/p.ProbeInterval), 1)
	probes := (p.UnhealthyThreshold + hung - 1) / hung
	each := max(p.ProbeTimeout, p.ProbeInterval)
	refused := p.ProbeInterval * time.Duration(p.UnhealthyThreshold)
	return max(refused, p.ProbeInterval+each*time.Duration(probes-1)+p.ProbeTimeout)
}

// Fleet is the membership. It is safe for concurrent use.
//
// Locks: mu serialises membership, state transitions and the creation of a View; it is never held
// during I/O or a callback. Readers take no lock: View and the slot table are atomic pointers, and
// the counters of ReportFailure and ReportStatus are atomics.
type Fleet struct {
	opt           Options
	settings      atomic.Pointer[activeSettings]
	view          atomic.Pointer[View]
	slots         [worker.MaxSlots]atomic.Pointer[rankBreaker]
	servers       atomic.Pointer[[]*server] // of all members; changed with mu held
	recheck       chan struct{}             // see recheckSoon
	halfOpenCount atomic.Int32              // half-open breakers
	hasLimits     atomic.Bool               // a worker has, or had, its own bounds
	retriesDenied atomic.Uint64             // retries
	restarts      [len(RestartSigns)]atomic.Uint64
	freezes       [liveness.NumStates]atomic.Uint64 // verdicts
	frozenCalls   [liveness.NumStates]atomic.Uint64 // calls ended because of them
	ctx           context.Context
	cancel        context.CancelFunc
	wg            sync.WaitGroup

	mu         sync.Mutex
	members    map[string]*member
	transients map[*worker.Worker]*member
	removing   map[string]chan struct{} // ids whose OnLeave has not returned
	freeRanks  []*worker.Rank           // ranks whose slots were released, oldest first
	budgets    map[string]*retryBudget  // of retries, by model
	next       int                      // the first slot that was never assigned
	drained    map[string]bool          // Options.Drained that were not added yet
	closed     bool
}

// New returns an empty Fleet.
func New(opt Options) *Fleet {
	opt.defaults()
	f := &Fleet{opt: opt, drained: map[string]bool{}, members: map[string]*member{}, transients: map[*worker.Worker]*member{}, removing: map[string]chan struct{}{}, budgets: map[string]*retryBudget{}, recheck: make(chan struct{}, 1)}
	for _, id := range opt.Drained {
		f.drained[id] = true
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.Reload(opt.Settings())
	f.view.Store(&View{pools: map[string]*Pool{}, changed: make(chan struct{})})
	f.servers.Store(new([]*server))
	f.wg.Go(f.schedule)
	f.wg.Go(func() { f.detectFrozen(f.ctx) })
	return f
}

// errClosed is the error of Add, Remove and Drain after Close.
var errClosed = errors.New("the fleet is closed")

// Add adds a worker in state Joining and starts to probe it. It fails if the id exists, the URL is
// invalid or there are not enough slots. An empty id becomes role@host:port.
func (f *Fleet) Add(spec worker.Spec) error {
	spec.URL = strings.TrimRight(spec.URL, "/")
	if spec.ID == "" {
		_, host, _ := strings.Cut(spec.URL, "://")
		spec.ID = spec.Role.String() + "@" + host
	}
	if err := f.checkSpec(spec); err != nil {
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
		return fmt.Errorf("fleet: cannot add %q: a worker with this id exists; want another id, or remove the worker first", spec.ID)
	}
	if left := f.slotsLeft(); len(w.Ranks) > left {
		return fmt.Errorf("fleet: cannot add %q: its %d ranks exceed the %d free slots of %d", spec.ID, len(w.Ranks), left, worker.MaxSlots)
	}
	f.assignSlots(m)
	m.setConnLimit(f.settings.Load().Engines) // the current limits
	m.ctx, m.cancel = context.WithCancel(f.ctx)
	m.predecessor = f.removing[spec.ID]
	f.members[spec.ID] = m
	f.publish()
	m.start()
	if f.drained[spec.ID] {
		delete(f.drained, spec.ID)
		f.setDrain(m, true)
	}
	f.watchServers(append(slices.Clone(*f.servers.Load()), m.servers...))
	return nil
}

// CheckAddresses returns an error if a URL of a worker leads to one of the router's own listeners.
func CheckAddresses(own *networks.OwnListeners, spec *worker.Spec) error {
	if err := own.CheckURL("url", spec.URL); err != nil {
		return err
	}
	for i, u := range spec.RankURLs {
		if err := own.CheckURL(fmt.Sprintf("rank_urls[%d]", i), u); err != nil {
			return err
		}
	}
	return nil
}

// watchServers replaces the servers that the schedule checks. Called with mu.
func (f *Fleet) watchServers(list []*server) {
	f.servers.Store(&list)
	f.recheckSoon()
}

func (f *Fleet) checkSpec(spec worker.Spec) error {
	if err := CheckAddresses(f.opt.Own, &spec); err != nil {
		return err
	}
	if len(spec.RankURLs) > 0 && len(spec.RankURLs) != max(len(spec.Ranks), 1) {
		return fmt.Errorf("%d rank URLs for %d ranks; want one for each rank", len(spec.RankURLs), max(len(spec.Ranks), 1))
	}
	seen := map[uint16]bool{}
	for _, r := range spec.Ranks {
		if seen[r] {
			return fmt.Errorf("rank %d is listed twice", r)
		}
		seen[r] = true
	}
	_, err := worker.ParseID(spec.ID)
	if err == nil && strings.Contains(spec.ID, "/") {
		err = fmt.Errorf("worker id %q contains a slash, which separates a worker from a rank", spec.ID)
	}
	return err
}

// acquireSlot prefers the slots that were released longest ago: numbers stay dense, and a stale
// reader is unlikely to meet a new rank. A slot whose previous rank still has running requests is
// not reused: their reservations are counted by slot and must not add to another rank. Called with
// mu.
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

// slotsLeft counts the slots that acquireSlot can assign. Called with mu.
func (f *Fleet) slotsLeft() int {
	n := worker.MaxSlots - f.next
	for _, r := range f.freeRanks {
		if idle(r) {
			n++
		}
	}
	return n
}

// Remove removes a worker: it leaves the pools at once and its probes end. Its slots are reused
// only after OnLeave has returned.
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

// Drain sets a worker to state Draining (on) or back to Joining (off), from which it becomes Ready
// as soon as its engine answers.
func (f *Fleet) Drain(id string, on bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, err := f.member(id, "drain")
	if f.drained[id] && !on { // of a worker that has not come yet
		delete(f.drained, id)
		return nil
	}
	if err != nil {
		return err
	}
	if m.drain != on {
		f.setDrain(m, on)
	}
	return nil
}

// setDrain changes the drain of a member. Called with mu.
func (f *Fleet) setDrain(m *member, on bool) {
	m.drain = on
	if on {
		m.setState(worker.Draining, "drained by request")
	} else {
		m.setState(worker.Joining, "drain ended")
		m.updateState()
	}
	f.publish()
	m.wakeUp()
}

// Drained returns the ids of the drained workers, and those of Options.Drained that have not been added yet.
func (f *Fleet) Drained() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	ids := slices.Collect(maps.Keys(f.drained))
	for id, m := range f.members {
		if m.drain {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// member returns the member with an id. Called with mu.
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

// Endpoint returns the connections of a rank; never nil for a rank of a View. For a rank of a
// worker that has been removed since it returns an endpoint that keeps no connections; a call
// through it still reaches the rank's engine.
func (f *Fleet) Endpoint(r *worker.Rank) *upstream.Endpoint {
	if s := f.server(r); s != nil {
		return s.traffic
	}
	ep, err := upstream.NewEndpoint(r.URL, f.upstream())
	if err != nil {
		return nil // not a rank of any View: Add rejects such a URL
	}
	ep.Close()
	return ep
}

// server returns a rank's server, or nil if its slot belongs to another rank now.
func (f *Fleet) server(r *worker.Rank) *server {
	if t := f.breaker(r); t != nil {
		return t.server
	}
	return nil
}

// breaker returns a rank's breaker, or nil if its slot belongs to another rank now.
func (f *Fleet) breaker(r *worker.Rank) *rankBreaker {
	if int(r.Slot) >= len(f.slots) {
		return nil
	}
	if t := f.slots[r.Slot].Load(); t != nil && t.rank == r {
		return t
	}
	return nil
}

// ReportFailure reports a connection-level failure of traffic to a rank (refused, reset, timed out
// before the response head). It counts against the rank's breaker and its server's health. It is
// cheap and safe on the request path. It ignores legs that the router ended itself, also because
// the engine was found frozen, and legs that found no free connection or descriptor. For legs with
// a response see ReportStatus.
func (f *Fleet) ReportFailure(r *worker.Rank, err error) {
	if errors.Is(err, upstream.ErrCancelled) || errors.Is(err, upstream.ErrFrozen) || errors.Is(err, upstream.ErrTooManyConns) || errors.Is(err, upstream.ErrLocalResources) {
		return
	}
	if t := f.breaker(r); t != nil {
		t.server.trafficFailed(err)
		t.failed(func() string { return short(err) })
	}
}

// Close ends all probes and goroutines and returns when they have ended. OnLeave is not called,
// because no worker was removed. It must not be called from a callback.
func (f *Fleet) Close() {
	f.mu.Lock()
	f.closed = true
	for _, m := range f.transients { // the goroutines of the others close theirs
		m.closeServers()
	}
	f.mu.Unlock()
	f.cancel()
	f.wg.Wait()
}

// releaseSlots releases a member's slots after its OnLeave has returned.
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

// Restarts returns how many new processes were recognised by a sign, one of RestartSigns.
func (f *Fleet) Restarts(sign string) uint64 {
	return f.restarts[slices.Index(RestartSigns[:], sign)].Load()
}

// setUnknownLoad marks a load that the engine does not report, or no longer reports.
func setUnknownLoad(r *worker.Rank) {
	r.Running.Store(-1)
	r.Waiting.Store(-1)
	r.SetKVUsage(-1)
}

func usable(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) && v >= 0 }
