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

// prefix begins every key that New makes, so that scanners for leaked secrets and
// people know what they see.
const prefix = "sk-sluice-"

// Hash is SHA-256 of a key's bytes. A key is 256 random bits, so a plain hash is
// as hard to go back from as the key is to guess: it needs neither salt nor time.
type Hash [sha256.Size]byte

// HashOf hashes a key.
func HashOf[B []byte | string](key B) Hash { return sha256.Sum256([]byte(key)) }

// ParseHash reads the 64 hexadecimal digits that String writes.
func ParseHash(s string) (h Hash, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(h) {
		return h, fmt.Errorf("apikey: cannot read %q as a key's hash: want the 64 hexadecimal digits of its SHA-256, as `sluice key` prints them", clip(s))
	}
	copy(h[:], b)
	return h, nil
}

// clip keeps what may be a key, written where its hash belongs, out of messages.
func clip(s string) string {
	if len(s) > 4 {
		return s[:4] + "…"
	}
	return s
}

func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// New makes a key: prefix and 256 random bits in URL-safe base64.
func New() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return prefix + base64.RawURLEncoding.EncodeToString(b[:])
}

// Spec is what an operator says of a key.
type Spec struct {
	Name              string // in logs and metrics; unique
	Hash              Hash   // unique
	RequestsPerMinute int64  // 0: no limit
	TokensPerMinute   int64  // of prompts and outputs together; 0: no limit
	Models            []string
}

// Key is one key's limits and what was taken of them. Safe for concurrent use.
type Key struct {
	spec             Spec
	requests, tokens rate
	*account
}

// account is what a key has used. It outlives a change of the key's limits, so that
// requests under way at the change are counted too.
type account struct {
	requestUsage, tokenUsage usage
	admitted, used, limited  atomic.Uint64
}

// Name is the key's name.
func (k *Key) Name() string { return k.spec.Name }

// Allows says whether the key is good for a model; for "", whether for every one.
func (k *Key) Allows(model string) bool {
	return len(k.spec.Models) == 0 || slices.Contains(k.spec.Models, model)
}

// Reserve implements front.Pass: it takes tokens of the key's minute that a request is
// about to use, or says why they are not to be had. Where nothing is owed any number is.
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

// Commit implements front.Pass: it is called when a request's tokens are known, which is
// after they were used, and puts them in the place of those that Reserve took. What is
// spent beyond the limit is waited for by the requests that come next.
func (k *Key) Commit(reserved, spent int) {
	reserved, spent = max(reserved, 0), max(spent, 0)
	k.used.Add(uint64(spent))
	switch {
	case k.tokens == 0:
	case spent > reserved:
		k.tokenUsage.consume(k.tokens, time.Now(), int64(spent-reserved))
	case spent < reserved:
		k.tokenUsage.refund(k.tokens, int64(reserved-spent))
	}
}

// Counts are a key's totals since the process began.
type Counts struct {
	Admitted uint64 // requests
	Limited  uint64 // requests refused for a limit
	Tokens   uint64 // spent
}

// Counts reads them; not one moment's, but each true.
func (k *Key) Counts() Counts {
	return Counts{Admitted: k.admitted.Load(), Limited: k.limited.Load(), Tokens: k.used.Load()}
}
