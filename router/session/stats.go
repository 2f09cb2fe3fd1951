package session

import (
	"slices"
	"strings"
	"time"
)

// Stats is the state of a Table.
type Stats struct {
	Sessions int // in the table
	Active   int // with a turn in progress, or with a place that is held
	Waiting  int // turns that wait
	Limited  int // models whose sessions are limited
	Need     int64
	Limit    int64 // tokens, of the limited models together
	Counts   Counts
}

// Stats returns the state.
func (t *Table) Stats() Stats {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	st := Stats{Sessions: t.ages.Len(), Counts: t.counts}
	for _, p := range t.pools {
		t.releaseIdle(p, now)
		st.Active += len(p.active)
		st.Waiting += p.waiting.n
		st.Need += p.need
		if p.limit > 0 {
			st.Limited++
			st.Limit += p.limit
		}
	}
	return st
}

// View is one session for the admin API. It has no id.
type View struct {
	Key          string    `json:"key"` // a salted hash of tenant and id, which changes with the process
	Tenant       string    `json:"api_key,omitempty"`
	Turns        int       `json:"turns"`
	Running      int       `json:"running"`
	Active       bool      `json:"active"`
	Tokens       int       `json:"tokens"`        // of its last prompt and output
	SharedTokens int       `json:"shared_tokens"` // of these, those that another session has too
	Ranks        []string  `json:"ranks"`
	Seen         time.Time `json:"seen"`
}

// PoolView is the limit of one model for the admin API.
type PoolView struct {
	Model     string   `json:"model"`
	Active    int      `json:"active"`
	Waiting   int      `json:"waiting"`
	Need      int64    `json:"need_tokens"`          // KV of the active sessions that others do not share
	Capacity  int64    `json:"capacity_tokens"`      // 0 unknown
	Occupancy *float64 `json:"occupancy"`            // largest share of used or cached blocks of a rank; null unknown
	Busy      float64  `json:"busy"`                 // recent share of the ranks that had prompts to compute
	Limit     int64    `json:"limit_tokens"`         // 0: not limited
	Kept      *float64 `json:"kept_share,omitempty"` // of the tokens that sessions left, in the current window
}

// Overview is the state of a Table for the admin API.
type Overview struct {
	Sessions int        `json:"sessions"`
	Finished uint64     `json:"finished"`
	Expired  uint64     `json:"expired"`
	Evicted  uint64     `json:"evicted"`
	Models   []PoolView `json:"models"`
	Newest   []View     `json:"newest"` // the most recently used ones
}

// Overview returns the state with the limit most recently used sessions.
func (t *Table) Overview(limit int) Overview {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	o := Overview{Sessions: t.ages.Len(), Finished: t.counts.Finished, Expired: t.counts.Expired, Evicted: t.counts.Evicted, Models: []PoolView{}, Newest: []View{}}
	for name, p := range t.pools {
		t.releaseIdle(p, now)
		v := PoolView{Model: name, Active: len(p.active), Waiting: p.waiting.n, Need: p.need, Capacity: p.capacity.Tokens, Busy: p.busy, Limit: p.limit}
		if c := p.capacity.Occupancy; c >= 0 && !p.measured.IsZero() {
			v.Occupancy = &c
		}
		if p.expected > 0 {
			kept := float64(p.cached) / float64(p.expected)
			v.Kept = &kept
		}
		o.Models = append(o.Models, v)
	}
	slices.SortFunc(o.Models, func(a, b PoolView) int { return strings.Compare(a.Model, b.Model) })
	for e := t.ages.Back(); e != nil && len(o.Newest) < limit; e = e.Prev() {
		s := e.Value.(*Session)
		v := View{Key: s.key.String(), Tenant: s.tenant.name, Turns: s.turns, Running: s.running, Active: s.active, Tokens: s.tokens, SharedTokens: s.shared, Ranks: []string{}, Seen: s.seen}
		for _, r := range s.ranks {
			if r != nil && !slices.Contains(v.Ranks, r.ID.String()) {
				v.Ranks = append(v.Ranks, r.ID.String())
			}
		}
		o.Newest = append(o.Newest, v)
	}
	return o
}
