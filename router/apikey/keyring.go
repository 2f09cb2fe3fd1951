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

// Keyring is the set of API keys, a front.Authenticator. It is safe for concurrent use.
// Authenticate takes no lock.
type Keyring struct{ keys atomic.Pointer[table] }

// table finds keys by the first eight bytes of their hashes. The time of the map look-up may
// depend on these bytes, but nobody can make a key whose hash is close to a given one. The whole
// hash is then compared in constant time.
type table struct {
	all      []*Key
	byPrefix map[uint64][]*Key
}

// NewKeyring returns a Keyring. It fails if two keys have the same name or hash.
func NewKeyring(specs []Spec) (*Keyring, error) {
	r := new(Keyring)
	return r, r.Replace(specs)
}

// Replace replaces all keys. A key whose hash stays keeps its usage, even if its limits change.
// Replace must not be called concurrently with itself.
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

// Keys returns the current keys, in the order of the configuration.
func (r *Keyring) Keys() []*Key { return r.keys.Load().all }

// Authenticate implements front.Authenticator. With counts, it also checks the key's limits and
// consumes one request.
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

// CheckLimits implements front.Principal. It consumes nothing.
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

// VisitLimitHeaders calls show with the names and values of OpenAI's rate-limit headers
// (x-ratelimit-limit-requests, …-remaining-…, …-reset-…) for each limit of the key.
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
