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

// Fleet takes guests in; fleet.Fleet is one.
type Fleet interface {
	AddTransient(worker.Spec) (*worker.Worker, error)
	RemoveTransient(*worker.Worker)
}

// Resolver gives a host's addresses; net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Options of a Namer; zero values mean the default in brackets.
type Options struct {
	Fleet Fleet
	// Networks and Ports are where prefill workers may lie; without Networks
	// none may be named. Ports [1024-65535].
	Networks []netip.Prefix
	Ports    []Ports
	// Spec is what is true of every worker named: models, options of the family.
	Spec worker.Spec
	// Ranks leads from the addresses by which other routers know the ranks of
	// the own engine to their numbers.
	Ranks map[string]uint16
	// Most is how many workers are kept at once [256]; one that has not been
	// named for Idle is dismissed [2m].
	MaxWorkers  int
	IdleTimeout time.Duration
	// Resolver of host names [the system's]. An answer counts for Pin [30s].
	Resolver   Resolver
	ResolveTTL time.Duration
	// Joined and Left are told of guests.
	OnAdded, OnRemoved func(*worker.Worker)
	Log                *slog.Logger
}

const (
	resolveTimeout = 2 * time.Second
	maxResolving   = 16              // lookups under way at once
	minLifetime    = 5 * time.Second // a guest named so lately is not dismissed to make room
)

// Selector is the disagg.Namer of a sidecar. Safe for concurrent use.
//
// What a header's value led to is kept in a map that readers take no lock for:
// it is replaced as a whole, under mu, when a worker is met for the first time,
// dismissed, or to be looked up again.
type Selector struct {
	opt    Options
	byText atomic.Pointer[map[string]*entry] // by an entry of a header, as written

	mu        sync.Mutex
	workers   map[key]*headerWorker
	closed    bool
	resolving chan struct{}
	stop      chan struct{}
	done      chan struct{}
}

// key tells guests apart: one address may have several ranks.
type key struct {
	at        netip.AddrPort
	ranked    bool
	rank      uint16
	bootstrap uint16
}

type headerWorker struct {
	key      key
	w        *worker.Worker
	lastUsed atomic.Int64 // when last, ns since the epoch
}

// entry is what a text leads to; until bounds it for a host name.
type entry struct {
	worker *headerWorker
	until  time.Time // zero: for ever
}

// New makes a Namer. Close ends it.
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

// Select implements disagg.Namer.
func (n *Selector) Select(h pd.Headers) (out pd.Selection, refusal *pd.Refusal) {
	if v := h.Header(HeaderRank); v != nil {
		rank, ok := n.opt.Ranks[string(bytes.TrimSpace(v))]
		if !ok {
			return out, n.badHeader(HeaderRank, v, "it is no address of a rank of this engine; there are "+n.rankList())
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
	// What only X-Sluice-Prefill may say must not come in by the other header.
	if name == HeaderPrefill || bytes.IndexByte(value, ';') < 0 {
		if g := n.lookup(value); g != nil {
			out.Prefill = g.w.Ranks
			return out, nil
		}
	}
	return n.parseList(name, value, out)
}

// parseList reads a value that is a list, or holds what was not met before.
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
			last = err // a dead name in a list must not spoil the others
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
		return out, n.badHeader(name, value, "it names no worker; want HOST:PORT, or several parted by commas")
	}
	return out, nil
}

// lookup is the way of a request whose header was met before: no lock, no
// allocation.
func (n *Selector) lookup(text []byte) *headerWorker {
	return markUsed((*n.byText.Load())[string(text)])
}

func markUsed(e *entry) *headerWorker {
	now := time.Now()
	if e == nil || !e.until.IsZero() && now.After(e.until) {
		return nil
	}
	// A line that every request writes is not shared well.
	if at := now.UnixNano(); at-e.worker.lastUsed.Load() > int64(time.Second) {
		e.worker.lastUsed.Store(at)
	}
	return e.worker
}

var (
	errNotAllowed = errors.New("it cannot be resolved")
	errFull       = errors.New("too many prefill workers have been named lately")
)

// findEntry gives the guest of one entry, new if it must be.
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
			t.addr, err = old.worker.key.at.Addr(), nil // checked before; the name server may be back soon
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

// resolve gives an address of a host all of whose addresses are allowed. It
// prefers one that has a guest already, so that a name with several stays where
// it is.
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
		n.opt.Log.Warn("a prefill worker's name cannot be resolved", "host", host, "err", err)
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
