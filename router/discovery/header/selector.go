package header

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/router/pd"
	"sluice/router/worker"
)

// Fleet adds and removes transient workers; fleet.Fleet implements it.
type Fleet interface {
	AddTransient(worker.Spec) (*worker.Worker, error)
	RemoveTransient(*worker.Worker)
}

// Resolver returns the addresses of a host; net.Resolver implements it.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Options configures a Selector. A zero value means the default in brackets.
type Options struct {
	Fleet Fleet
	// Networks and Ports contain the addresses that prefill workers may have. If Networks is
	// empty, requests may not name any. Ports [1024-65535].
	Networks []netip.Prefix
	Ports    []Ports
	// Spec holds what all named workers share: models, options of the P/D family.
	Spec worker.Spec
	// Ranks maps the addresses under which other routers know the ranks of the sidecar's own
	// engine to rank numbers.
	Ranks map[string]uint16
	// MaxWorkers bounds the number of transient workers [256]. Selector removes a worker that no
	// request has named for IdleTimeout [2m].
	MaxWorkers  int
	IdleTimeout time.Duration
	// Resolver resolves host names [net.DefaultResolver]. Selector reuses a result for ResolveTTL
	// [30s].
	Resolver   Resolver
	ResolveTTL time.Duration
	// OnAdded is called after a worker is added to the fleet, OnRemoved before one is removed;
	// nil: no call. OnAdded runs with the Selector's lock held and must not call the Selector.
	OnAdded, OnRemoved func(*worker.Worker)
	Log                *slog.Logger
}

const (
	resolveTimeout = 2 * time.Second
	maxResolving   = 16              // concurrent lookups
	minLifetime    = 5 * time.Second // at capacity, a worker named this recently is not replaced
)

// Selector is the pd.WorkerSelector of a sidecar. It is safe for concurrent use.
//
// A map caches the result of each header entry. Readers take no lock: Selector replaces the whole
// map, under mu, when it adds a worker, removes one, or resolves a host name again.
type Selector struct {
	opt    Options
	byText atomic.Pointer[map[string]*entry] // by the text of a header's entry

	mu        sync.Mutex
	workers   map[key]*headerWorker
	closed    bool
	resolving chan struct{}
	stop      chan struct{}
	done      chan struct{}
}

// key identifies a worker: one address may serve several ranks.
type key struct {
	at        netip.AddrPort
	ranked    bool
	rank      uint16
	bootstrap uint16
}

type headerWorker struct {
	key      key
	w        *worker.Worker
	lastUsed atomic.Int64 // last time a request named it, Unix time in nanoseconds
}

// entry is the cached result of a header's entry.
type entry struct {
	worker *headerWorker
	until  time.Time // when the host name must be resolved again; zero for an address: never
}

// New returns a Selector and starts its sweep goroutine, which Close ends.
func New(opt Options) *Selector {
	if len(opt.Ports) == 0 {
		opt.Ports = []Ports{{1024, 65535}}
	}
	if opt.MaxWorkers <= 0 {
		opt.MaxWorkers = 256
	}
	if opt.IdleTimeout <= 0 {
		opt.IdleTimeout = 2 * time.Minute
	}
	if opt.ResolveTTL <= 0 {
		opt.ResolveTTL = 30 * time.Second
	}
	if opt.Resolver == nil {
		opt.Resolver = net.DefaultResolver
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	n := &Selector{opt: opt, workers: map[key]*headerWorker{}, resolving: make(chan struct{}, maxResolving), stop: make(chan struct{}), done: make(chan struct{})}
	n.byText.Store(&map[string]*entry{})
	go n.sweep()
	return n
}

// Select implements pd.WorkerSelector.
func (n *Selector) Select(h pd.Headers) (out pd.Selection, refusal *pd.Refusal) {
	if v := h.Header(HeaderRank); v != nil {
		rank, ok := n.opt.Ranks[string(bytes.TrimSpace(v))]
		if !ok {
			return out, n.badHeader(HeaderRank, v, "it is not the address of a rank of this engine; want one of "+n.rankList())
		}
		out.HasRank, out.Rank = true, rank
	}
	name := HeaderPrefill
	value := h.Header(name)
	if value == nil {
		name = HeaderPrefiller
		value = h.Header(name)
	}
	value = bytes.TrimSpace(value)
	switch {
	case len(value) == 0:
		return out, nil
	case name == HeaderPrefill && string(value) == "none":
		out.NoPrefill = true
		return out, nil
	case len(value) > maxValue:
		return out, n.badHeader(name, value, fmt.Sprintf("it has %d bytes; want at most %d", len(value), maxValue))
	case len(n.opt.Networks) == 0:
		return out, n.badHeader(name, value, "requests may not name prefill workers here; start the sidecar with --prefill-networks, or leave the header out")
	}
	// The cache is shared by both headers, but only X-Sluice-Prefill may have keys. A value with a
	// key in the other header therefore skips the cache, and parseList rejects it.
	if name == HeaderPrefill || bytes.IndexByte(value, ';') < 0 {
		if g := n.lookup(value); g != nil {
			out.Prefill = g.w.Ranks
			return out, nil
		}
	}
	return n.parseList(name, value, out)
}

// parseList parses a header's value that is a list or is not in the cache.
func (n *Selector) parseList(name string, value []byte, out pd.Selection) (pd.Selection, *pd.Refusal) {
	var last error
	count := 0
	for word := range strings.SplitSeq(string(value), ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		if count++; count > maxEntries {
			return out, n.badHeader(name, value, fmt.Sprintf("it names more than %d workers", maxEntries))
		}
		g, err := n.findEntry(word, name == HeaderPrefill)
		switch {
		case errors.Is(err, errNotAllowed):
			last = err // one unresolvable name must not fail the whole list
			continue
		case errors.Is(err, errFull):
			return out, &pd.Refusal{Reason: front.PoolOverloaded, RetryAfter: time.Second,
				Message: fmt.Sprintf("header %s: %q: %v", name, quoteValue(value), err)}
		case err != nil:
			return out, n.badHeader(name, value, err.Error())
		}
		if !slices.Contains(out.Prefill, g.w.Ranks[0]) {
			out.Prefill = append(out.Prefill, g.w.Ranks[0])
		}
	}
	switch {
	case len(out.Prefill) > 0:
	case last != nil:
		return out, &pd.Refusal{Reason: front.NoPrefillWorker, RetryAfter: time.Second, Message: fmt.Sprintf("header %s: %q: %v", name, quoteValue(value), last)}
	default:
		return out, n.badHeader(name, value, "it names no worker; want HOST:PORT, or several separated by commas")
	}
	return out, nil
}

// lookup returns the worker of a cached value, or nil. It takes no lock and does not allocate: it
// runs for almost every request.
func (n *Selector) lookup(text []byte) *headerWorker {
	return markUsed((*n.byText.Load())[string(text)])
}

// markUsed records the use of an entry's worker and returns the worker. It returns nil if e is nil
// or has expired.
func markUsed(e *entry) *headerWorker {
	now := time.Now()
	if e == nil || !e.until.IsZero() && now.After(e.until) {
		return nil
	}
	// At most one write per second: a cache line that every request writes would bounce between
	// cores.
	if at := now.UnixNano(); at-e.worker.lastUsed.Load() > int64(time.Second) {
		e.worker.lastUsed.Store(at)
	}
	return e.worker
}

var (
	errNotAllowed = errors.New("it cannot be resolved")
	errFull       = errors.New("too many prefill workers were named recently")
)

// findEntry returns the worker of one entry, and adds it if it is new.
func (n *Selector) findEntry(text string, keys bool) (*headerWorker, error) {
	t, err := parseEntry(text, keys)
	if err != nil {
		return nil, err
	}
	old := (*n.byText.Load())[text]
	if g := markUsed(old); g != nil {
		return g, nil
	}
	if t.bootstrap != 0 && !n.opt.portAllowed(t.bootstrap) {
		return nil, fmt.Errorf("bootstrap_port %d is not allowed (--prefill-ports): want %s", t.bootstrap, n.opt.portList())
	}
	var until time.Time
	if t.host != "" {
		t.addr, err = n.resolve(t.host, t.port)
		if errors.Is(err, errNotAllowed) && old != nil {
			t.addr, err = old.worker.key.at.Addr(), nil // this address passed the checks before; a name-server outage must not take it away
		}
		if err != nil {
			return nil, err
		}
		until = time.Now().Add(n.opt.ResolveTTL)
	} else if why := n.opt.allowed(t.addr, t.port); why != "" {
		return nil, errors.New(why)
	}
	return n.add(text, key{netip.AddrPortFrom(t.addr, t.port), t.ranked, t.rank, t.bootstrap}, until)
}

// resolve returns one address of a host. It fails unless all addresses of the host are allowed. It
// prefers an address that already has a worker, so that a name with several addresses keeps its
// worker.
func (n *Selector) resolve(host string, port uint16) (none netip.Addr, err error) {
	select {
	case n.resolving <- struct{}{}:
		defer func() { <-n.resolving }()
	default:
		return none, fmt.Errorf("%w: %d names are being looked up already", errNotAllowed, maxResolving)
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	addrs, err := n.opt.Resolver.LookupNetIP(ctx, "ip", host)
	if err != nil || len(addrs) == 0 {
		n.opt.Log.Warn("a prefill worker's name cannot be resolved", "host", host, "error", err)
		return none, fmt.Errorf("%w: no address of %q was found", errNotAllowed, host)
	}
	for i, a := range addrs {
		addrs[i] = a.Unmap().WithZone("")
		if why := n.opt.allowed(addrs[i], port); why != "" {
			return none, fmt.Errorf("%q has the address %s: %s", host, addrs[i], why)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	n.mu.Lock()
	defer n.mu.Unlock()
	for k := range n.workers {
		if k.at.Port() == port && slices.Contains(addrs, k.at.Addr()) {
			return k.at.Addr(), nil
		}
	}
	return addrs[0], nil
}

func (n *Selector) badHeader(header string, value []byte, what string) *pd.Refusal {
	return &pd.Refusal{Reason: front.BadHeader, Message: fmt.Sprintf("header %s: %q: %s", header, quoteValue(value), what)}
}

func quoteValue(value []byte) string {
	const most = 200
	if len(value) > most {
		return string(value[:most]) + "…"
	}
	return string(value)
}

func (n *Selector) rankList() string {
	if len(n.opt.Ranks) == 0 {
		return "none"
	}
	words := make([]string, 0, len(n.opt.Ranks))
	for addr, rank := range n.opt.Ranks {
		words = append(words, fmt.Sprintf("%s (rank %d)", addr, rank))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}
