// Package recent keeps the newest finished requests, with the times of their parts, for the console
// and the admin API.
//
// Ring is a sink of the request log. Failed, slow and migrated requests have a ring of their own,
// so that a busy router's many good ones do not push them out. Ring wants only a bounded number of
// requests a second, because a person cannot look at more: without another sink, the other requests
// cost nothing.
package recent

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/requestlog"
)

// maxPerSecond bounds the requests about which the log collects something for this sink alone.
const maxPerSecond = 100

// Options configures a Ring.
type Options struct {
	Size int           // number of requests of each kind, at least 1
	Slow time.Duration // requests that take this long are slow; 0: none
}

// Ring keeps the newest Options.Size requests, and as many of the newest failed, slow and migrated
// ones. It is safe for concurrent use; Add never blocks for longer than a copy of a pointer.
type Ring struct {
	opt Options

	second, wanted atomic.Int64

	mu      sync.Mutex
	all     ring
	notable ring
}

// ring is a ring of entries, which do not change any more.
type ring struct {
	entries []*requestlog.Entry
	next    int
}

// New returns an empty Ring.
func New(opt Options) *Ring {
	opt.Size = max(opt.Size, 1)
	return &Ring{opt: opt}
}

// Size returns the number of requests of each kind that the ring keeps.
func (r *Ring) Size() int { return r.opt.Size }

// Wants implements requestlog.Limiter: about the first maxPerSecond requests of each second.
func (r *Ring) Wants(now time.Time) bool {
	if s := now.Unix(); r.second.Load() != s {
		r.second.Store(s)
		r.wanted.Store(0)
	}
	if r.wanted.Load() >= maxPerSecond {
		return false
	}
	return r.wanted.Add(1) <= maxPerSecond
}

// Add implements requestlog.Sink.
func (r *Ring) Add(e *requestlog.Entry) {
	notable := e.Status >= 400 || e.Reason != "" || e.Migrations > 0 || r.opt.Slow > 0 && e.Total >= r.opt.Slow
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.add(e, r.opt.Size)
	if notable {
		r.notable.add(e, r.opt.Size)
	}
}

func (g *ring) add(e *requestlog.Entry, size int) {
	if len(g.entries) < size {
		g.entries = append(g.entries, e)
		return
	}
	g.entries[g.next] = e
	g.next = (g.next + 1) % size
}

// newest appends the entries, newest first.
func (g *ring) newest(to []*requestlog.Entry) []*requestlog.Entry {
	for i := range g.entries {
		to = append(to, g.entries[(g.next+len(g.entries)-1-i)%len(g.entries)])
	}
	return to
}

// Entries returns the requests that are kept, in the order of their ends, the newest first. A nil
// Ring has none.
func (r *Ring) Entries() []*requestlog.Entry {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	out := make([]*requestlog.Entry, 0, len(r.all.entries)+len(r.notable.entries))
	out = r.notable.newest(r.all.newest(out))
	n := len(r.all.entries)
	r.mu.Unlock()
	seen := make(map[*requestlog.Entry]bool, n)
	for _, e := range out[:n] {
		seen[e] = true
	}
	older := slices.DeleteFunc(out[n:], func(e *requestlog.Entry) bool { return seen[e] })
	return out[:n+len(older)] // what has left the first ring ended before what is in it
}

// Find returns the newest request with an id; nil if it is not kept.
func (r *Ring) Find(id string) *requestlog.Entry {
	for _, e := range r.Entries() {
		if e.ID == id {
			return e
		}
	}
	return nil
}
