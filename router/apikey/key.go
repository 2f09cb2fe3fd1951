package apikey

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
)

// prefix begins every key that New makes, so that users and scanners for leaked secrets recognise
// it.
const prefix = "sk-sluice-"

// Hash is the SHA-256 of a key's bytes. A plain hash, without salt or a slow hash function, is
// sufficient, because a key has 256 random bits: reversing the hash is as hard as guessing the
// key.
type Hash [sha256.Size]byte

// HashOf returns the hash of a key.
func HashOf[B []byte | string](key B) Hash { return sha256.Sum256([]byte(key)) }

// ParseHash parses the 64 hexadecimal digits that String returns.
func ParseHash(s string) (h Hash, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(h) {
		return h, fmt.Errorf("apikey: cannot read %q as a key's hash: want the 64 hexadecimal digits of its SHA-256, as `sluice key` prints them", clip(s))
	}
	copy(h[:], b)
	return h, nil
}

// clip shortens a value for an error message: an operator may have written a key where its hash
// belongs.
func clip(s string) string {
	if len(s) > 4 {
		return s[:4] + "…"
	}
	return s
}

// String returns 64 hexadecimal digits.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// New returns a new random key: the prefix and 256 random bits in URL-safe base64.
func New() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error
	return prefix + base64.RawURLEncoding.EncodeToString(b[:])
}

// Spec is the configuration of a key.
type Spec struct {
	Name              string // name in logs and metrics; unique
	Hash              Hash   // unique
	RequestsPerMinute int64  // 0: no limit
	TokensPerMinute   int64  // prompt and output tokens together; 0: no limit
	Models            []string
	Classes           []string // admission classes that requests may ask for, the first by default
	Weight            int      // of the key's tenant in a class; 0: 1
}

// Key is one API key with its limits and its usage, a front.Principal. It is safe for concurrent
// use.
type Key struct {
	spec             Spec
	requests, tokens rate
	*account
}

// account is the usage of a key. It outlives a change of the key's limits, so that requests in
// flight during the change are counted too.
type account struct {
	requestUsage, tokenUsage usage
	admitted, used, limited  atomic.Uint64
}

// Name returns the key's name.
func (k *Key) Name() string { return k.spec.Name }

// Models returns the models that the key may use; none: all.
func (k *Key) Models() []string { return k.spec.Models }

// Limit is one limit of a key and what is left of it now.
type Limit struct {
	What      string  `json:"what"`       // requests or tokens
	PerMinute int64   `json:"per_minute"` // the limit
	Remaining int64   `json:"remaining"`
	ResetS    float64 `json:"reset_s"` // seconds until all is available again
}

// Limits returns the key's limits; it consumes nothing.
func (k *Key) Limits() []Limit {
	now := time.Now()
	var out []Limit
	for _, l := range [...]struct {
		what  string
		limit int64
		rate  rate
		debt  *usage
	}{{"requests", k.spec.RequestsPerMinute, k.requests, &k.requestUsage}, {"tokens", k.spec.TokensPerMinute, k.tokens, &k.tokenUsage}} {
		if l.limit > 0 {
			out = append(out, Limit{l.what, l.limit, l.debt.available(l.rate, now), l.debt.untilReplenished(now).Seconds()})
		}
	}
	return out
}

// Classes returns the admission classes that requests of the key may ask for; the first is that of
// requests that ask for none.
func (k *Key) Classes() []string { return k.spec.Classes }

// Weight returns the weight of the key's tenant among those of a class.
func (k *Key) Weight() int { return max(k.spec.Weight, 1) }

// Allows reports whether the key may use a model; with "", whether it may use every model.
func (k *Key) Allows(model string) bool {
	return len(k.spec.Models) == 0 || slices.Contains(k.spec.Models, model)
}

// Reserve implements front.Principal. It consumes the prompt tokens that a request is about to
// use, or returns why they are not available. If all tokens are replenished, it accepts any
// number.
func (k *Key) Reserve(tokens int) *front.Rejection {
	if k.tokens == 0 || tokens <= 0 {
		return nil
	}
	after := k.tokenUsage.tryConsume(k.tokens, time.Now(), int64(tokens))
	if after <= 0 {
		return nil
	}
	k.limited.Add(1)
	return &front.Rejection{
		Reason: front.KeyLimitReached, RetryAfter: after,
		Message: fmt.Sprintf("what is left of the limit of %d tokens a minute of key %q is less than the %d tokens of this prompt; try again in %s",
			k.spec.TokensPerMinute, k.spec.Name, tokens, after.Round(time.Millisecond)),
	}
}

// Commit implements front.Principal. It replaces a request's reserved tokens by the tokens that
// the request used, once their number is known. If a request used more than the limit, later
// requests wait for it.
func (k *Key) Commit(reserved, spent int) {
	reserved, spent = max(reserved, 0), max(spent, 0)
	k.used.Add(uint64(spent))
	k.replace(reserved, spent)
}

// Adjust implements front.Principal. It corrects an estimate that Commit charged, when the number
// of tokens is known.
func (k *Key) Adjust(charged, spent int) {
	charged, spent = max(charged, 0), max(spent, 0)
	k.used.Add(uint64(spent) - uint64(charged)) // wraps around where the total falls
	k.replace(charged, spent)
}

// replace makes the limit count spent tokens in place of taken ones.
func (k *Key) replace(taken, spent int) {
	switch {
	case k.tokens == 0:
	case spent > taken:
		k.tokenUsage.consume(k.tokens, time.Now(), int64(spent-taken))
	case spent < taken:
		k.tokenUsage.refund(k.tokens, int64(taken-spent))
	}
}

// Counts are a key's totals since the process started.
type Counts struct {
	Admitted uint64 // requests admitted
	Limited  uint64 // requests rejected because of a limit
	Tokens   uint64 // prompt and output tokens used
}

// Counts returns the totals. They are read one after the other, so they are not a snapshot of one
// moment.
func (k *Key) Counts() Counts {
	return Counts{Admitted: k.admitted.Load(), Limited: k.limited.Load(), Tokens: k.used.Load()}
}
