package engineapi

import (
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"sync/atomic"
)

// requestIDs makes request ids for callers that give none: a random prefix of the
// process and a counter.
type requestIDs struct {
	prefix string
	next   atomic.Uint64
}

func (r *requestIDs) init() {
	var seed [6]byte
	_, _ = rand.Read(seed[:])
	r.prefix = "r" + hex.EncodeToString(seed[:]) + "-"
}

func (r *requestIDs) make() string { return r.prefix + strconv.FormatUint(r.next.Add(1), 16) }
