package named

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
	"sluice/router/disagg"
	"sluice/router/worker"
)

// Fleet takes guests in; fleet.Fleet is one.
type Fleet interface {
	Guest(worker.Spec) (*worker.Worker, error)
	Dismiss(*worker.Worker)
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
	Most int
	Idle time.Duration
	// Resolver of host names [the system's]. An answer counts for Pin [30s].
	Resolver Resolver
	Pin      time.Duration
	// Joined and Left are told of guests.
	Joined, Left func(*worker.Worker)
	Log          *slog.Logger
}

const (
	resolveWithin = 2 * time.Second
	maxResolving  = 16              // lookups under way at once
	freshFor      = 5 * time.Second // a guest named so lately is not dismissed to make room
)

// Namer is the disagg.Namer of a sidecar. Safe for concurrent use.
//
// What a header's value led to is kept in a map that readers take no lock for:
// it is replaced as a whole, under mu, when a worker is met for the first time,
// dismissed, or to be looked up again.
type Namer struct {
	opt   Options
	known atomic.Pointer[map[string]*entry] // by an entry of a header, as written

	mu        sync.Mutex
	guests    map[key]*guest
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

type guest struct {
	key   key
	w     *worker.Worker
	named atomic.Int64 // when last, ns since the epoch
}

// entry is what a text leads to; until bounds it for a host name.
type entry struct {
	g     *guest
	until time.Time // zero: for ever
}

// New makes a Namer. Close ends it.
func New(opt Options) *Namer {
	if len(opt.Ports) == 0 {
		opt.Ports = []Ports{{1024, 65535}}
	}
	if opt.Most <= 0 {
		opt.Most = 256
	}
	if opt.Idle <= 0 {
		opt.Idle = 2 * time.Minute
	}
	if opt.Pin <= 0 {
		opt.Pin = 30 * time.Second
	}
	if opt.Resolver == nil {
		opt.Resolver = net.DefaultResolver
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	n := &Namer{opt: opt, guests: map[key]*guest{}, resolving: make(chan struct{}, maxResolving), stop: make(chan struct{}), done: make(chan struct{})}
	n.known.Store(&map[string]*entry{})
	go n.sweep()
	return n
}

// Name implements disagg.Namer.
func (n *Namer) Name(h disagg.Headers) (out disagg.Named, refusal *disagg.Refusal) {
	if v := h.Header(HeaderRank); v != nil {
		rank, ok := n.opt.Ranks[string(bytes.TrimSpace(v))]
		if !ok {
			return out, n.wrong(HeaderRank, v, "it is no address of a rank of this engine; there are "+n.rankList())
		}
		out.Ranked, out.Rank = true, rank
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
		out.Plain = true
		return out, nil
	case len(value) > maxValue:
		return out, n.wrong(name, value, fmt.Sprintf("it has %d bytes; want at most %d", len(value), maxValue))
	case len(n.opt.Networks) == 0:
		return out, n.wrong(name, value, "requests may not name prefill workers here; start the sidecar with --prefill-networks, or leave the header out")
	}
	// What only X-Sluice-Prefill may say must not come in by the other header.
	if name == HeaderPrefill || bytes.IndexByte(value, ';') < 0 {
		if g := n.lookup(value); g != nil {
			out.Prefill = g.w.Ranks
			return out, nil
		}
	}
	return n.several(name, value, out)
}

// several reads a value that is a list, or holds what was not met before.
func (n *Namer) several(name string, value []byte, out disagg.Named) (disagg.Named, *disagg.Refusal) {
	var last error
	count := 0
	for word := range strings.SplitSeq(string(value), ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		if count++; count > maxNamed {
			return out, n.wrong(name, value, fmt.Sprintf("it names more than %d workers", maxNamed))
		}
		g, err := n.find(word, name == HeaderPrefill)
		switch {
		case errors.Is(err, errElsewhere):
			last = err // a dead name in a list must not spoil the others
			continue
		case errors.Is(err, errFull):
			return out, &disagg.Refusal{Reason: front.PoolOverloaded, RetryAfter: time.Second,
				Message: fmt.Sprintf("header %s: %q: %v", name, shown(value), err)}
		case err != nil:
			return out, n.wrong(name, value, err.Error())
		}
		if !slices.Contains(out.Prefill, g.w.Ranks[0]) {
			out.Prefill = append(out.Prefill, g.w.Ranks[0])
		}
	}
	switch {
	case len(out.Prefill) > 0:
	case last != nil:
		return out, &disagg.Refusal{Reason: front.NoPrefillWorker, RetryAfter: time.Second, Message: fmt.Sprintf("header %s: %q: %v", name, shown(value), last)}
	default:
		return out, n.wrong(name, value, "it names no worker; want HOST:PORT, or several parted by commas")
	}
	return out, nil
}

// lookup is the way of a request whose header was met before: no lock, no
// allocation.
func (n *Namer) lookup(text []byte) *guest {
	return use((*n.known.Load())[string(text)])
}

func use(e *entry) *guest {
	now := time.Now()
	if e == nil || !e.until.IsZero() && now.After(e.until) {
		return nil
	}
	// A line that every request writes is not shared well.
	if at := now.UnixNano(); at-e.g.named.Load() > int64(time.Second) {
		e.g.named.Store(at)
	}
	return e.g
}

var (
	errElsewhere = errors.New("it cannot be resolved")
	errFull      = errors.New("too many prefill workers have been named lately")
)

// find gives the guest of one entry, new if it must be.
func (n *Namer) find(text string, keys bool) (*guest, error) {
	t, err := parseTarget(text, keys)
	if err != nil {
		return nil, err
	}
	old := (*n.known.Load())[text]
	if g := use(old); g != nil {
		return g, nil
	}
	if t.bootstrap != 0 && !n.opt.portAllowed(t.bootstrap) {
		return nil, fmt.Errorf("bootstrap_port %d is not allowed (--prefill-ports): want %s", t.bootstrap, n.opt.portList())
	}
	var until time.Time
	if t.host != "" {
		t.addr, err = n.resolve(t.host, t.port)
		if errors.Is(err, errElsewhere) && old != nil {
			t.addr, err = old.g.key.at.Addr(), nil // checked before; the name server may be back soon
		}
		if err != nil {
			return nil, err
		}
		until = time.Now().Add(n.opt.Pin)
	} else if why := n.opt.allowed(t.addr, t.port); why != "" {
		return nil, errors.New(why)
	}
	return n.invite(text, key{netip.AddrPortFrom(t.addr, t.port), t.ranked, t.rank, t.bootstrap}, until)
}

// resolve gives an address of a host all of whose addresses are allowed. It
// prefers one that has a guest already, so that a name with several stays where
// it is.
func (n *Namer) resolve(host string, port uint16) (none netip.Addr, err error) {
	select {
	case n.resolving <- struct{}{}:
		defer func() { <-n.resolving }()
	default:
		return none, fmt.Errorf("%w: %d names are being looked up already", errElsewhere, maxResolving)
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveWithin)
	defer cancel()
	addrs, err := n.opt.Resolver.LookupNetIP(ctx, "ip", host)
	if err != nil || len(addrs) == 0 {
		n.opt.Log.Warn("a prefill worker's name cannot be resolved", "host", host, "err", err)
		return none, fmt.Errorf("%w: no address of %q was found", errElsewhere, host)
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
	for k := range n.guests {
		if k.at.Port() == port && slices.Contains(addrs, k.at.Addr()) {
			return k.at.Addr(), nil
		}
	}
	return addrs[0], nil
}

func (n *Namer) wrong(header string, value []byte, what string) *disagg.Refusal {
	return &disagg.Refusal{Reason: front.BadHeader, Message: fmt.Sprintf("header %s: %q: %s", header, shown(value), what)}
}

func shown(value []byte) string {
	const most = 200
	if len(value) > most {
		return string(value[:most]) + "…"
	}
	return string(value)
}

func (n *Namer) rankList() string {
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
