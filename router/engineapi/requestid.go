package engineapi

import (
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"sync/atomic"
)

// requestIDs generates request ids for callers that send none: a random prefix per process and
// a counter.
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
