package apikey

import (
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
)

// Keyring is the set of keys, a front.Gate. Safe for concurrent use; Enter takes no lock.
type Keyring struct{ keys atomic.Pointer[table] }

// table finds keys by the first eight bytes of their hashes. An index may be
// looked up in a time that depends on what is sought, since nobody can make keys
// whose hashes come near a given one; the whole hash is then compared in constant
// time, so that not even that argument is needed for the last step.
type table struct {
	all      []*Key
	byPrefix map[uint64][]*Key
}

// NewKeyring makes a Ring; it fails on two keys of one name or hash.
func NewKeyring(specs []Spec) (*Keyring, error) {
	r := new(Keyring)
	return r, r.Replace(specs)
}

// Replace puts new keys in the place of the old; a key that stays keeps what it has
// spent. It must not run beside itself.
func (r *Keyring) Replace(specs []Spec) error {
	old := r.keys.Load()
	next := &table{byPrefix: make(map[uint64][]*Key, len(specs))}
	names := make(map[string]bool, len(specs))
	for _, s := range specs {
		if names[s.Name] {
			return fmt.Errorf("apikey: cannot use two keys named %q: want a name for each", s.Name)
		}
		names[s.Name] = true
		if k := next.lookup(s.Hash); k != nil {
			return fmt.Errorf("apikey: cannot use the same key as %q and %q", k.spec.Name, s.Name)
		}
		k := &Key{spec: s, requests: perMinute(s.RequestsPerMinute), tokens: perMinute(s.TokensPerMinute)}
		if was := old.lookup(s.Hash); was != nil {
			k.account = was.account
		} else {
			k.account = new(account)
		}
		next.all = append(next.all, k)
		at := binary.LittleEndian.Uint64(s.Hash[:])
		next.byPrefix[at] = append(next.byPrefix[at], k)
	}
	r.keys.Store(next)
	return nil
}

func (t *table) lookup(h Hash) *Key {
	if t == nil {
		return nil
	}
	for _, k := range t.byPrefix[binary.LittleEndian.Uint64(h[:])] {
		if subtle.ConstantTimeCompare(k.spec.Hash[:], h[:]) == 1 {
			return k
		}
	}
	return nil
}

// Keys are the keys now, in the order of the configuration.
func (r *Keyring) Keys() []*Key { return r.keys.Load().all }

// Authenticate implements front.Gate.
func (r *Keyring) Authenticate(key []byte, counts bool) (front.Principal, *front.Rejection) {
	if len(key) == 0 {
		return nil, &front.Rejection{Reason: front.MissingKey, Message: "the request shows no API key; want the header Authorization: Bearer KEY"}
	}
	k := r.keys.Load().lookup(HashOf(key))
	if k == nil {
		return nil, &front.Rejection{Reason: front.UnknownKey, Message: "the API key is not one of this router's"}
	}
	if !counts {
		return k, nil
	}
	now := time.Now()
	if after := k.tokenUsage.delay(k.tokens, now); after > 0 {
		return k, k.limitReached("tokens", k.spec.TokensPerMinute, after)
	}
	if after := k.requestUsage.tryConsumeOne(k.requests, now); after > 0 {
		return k, k.limitReached("requests", k.spec.RequestsPerMinute, after)
	}
	k.admitted.Add(1)
	return k, nil
}

// CheckLimits implements front.Pass.
func (k *Key) CheckLimits() *front.Rejection {
	now := time.Now()
	if after := k.tokenUsage.delay(k.tokens, now); after > 0 {
		return k.limitReached("tokens", k.spec.TokensPerMinute, after)
	}
	if after := k.requestUsage.delay(k.requests, now); after > 0 {
		return k.limitReached("requests", k.spec.RequestsPerMinute, after)
	}
	return nil
}

func (k *Key) limitReached(what string, limit int64, after time.Duration) *front.Rejection {
	k.limited.Add(1)
	return &front.Rejection{
		Reason: front.KeyLimitReached, RetryAfter: after,
		Message: fmt.Sprintf("the limit of %d %s a minute of key %q is reached; try again in %s", limit, what, k.spec.Name, after.Round(time.Millisecond)),
	}
}

// VisitLimitHeaders tells show what is left of each limit, by the names of OpenAI's header
// lines (x-ratelimit-limit-requests, …-remaining-…, …-reset-…).
func (k *Key) VisitLimitHeaders(show func(name, value string)) {
	now := time.Now()
	for _, l := range [...]struct {
		name  string
		limit int64
		rate  rate
		debt  *usage
	}{{"requests", k.spec.RequestsPerMinute, k.requests, &k.requestUsage}, {"tokens", k.spec.TokensPerMinute, k.tokens, &k.tokenUsage}} {
		if l.limit == 0 {
			continue
		}
		show("x-ratelimit-limit-"+l.name, strconv.FormatInt(l.limit, 10))
		show("x-ratelimit-remaining-"+l.name, strconv.FormatInt(l.debt.available(l.rate, now), 10))
		show("x-ratelimit-reset-"+l.name, l.debt.untilReplenished(now).Round(time.Millisecond).String())
	}
}
