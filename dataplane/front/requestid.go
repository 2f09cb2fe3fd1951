package front

import (
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"sync/atomic"
)

// requestIDs makes request ids of 32 hexadecimal digits: a random prefix of the process and a
// counter. Thus an id costs one small string, and two processes make different ids. Python's
// uuid.UUID accepts the ids. Servers that use starlette-context, such as llama-cpp-python's,
// need that: they answer 400 to an X-Request-Id that uuid.UUID does not accept.
type requestIDs struct {
	prefix  [20]byte
	counter atomic.Uint64
}

// init chooses the random prefix.
func (r *requestIDs) init() {
	var seed [len(r.prefix) / 2]byte
	_, _ = rand.Read(seed[:])
	hex.Encode(r.prefix[:], seed[:])
}

// next returns a new id. It is safe for concurrent use.
func (r *requestIDs) next() string {
	const digits = "000000000000"
	var buf [len(r.prefix) + 16]byte
	id := append(buf[:0], r.prefix[:]...)
	var num [16]byte
	n := strconv.AppendUint(num[:0], r.counter.Add(1), 16)
	if short := len(digits) - len(n); short > 0 {
		id = append(id, digits[:short]...)
	}
	return string(append(id, n...))
}
