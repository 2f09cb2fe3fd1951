package front

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"sync/atomic"
)

// maxRequestID is the greatest length of a client's X-Request-Id that the server uses, in bytes.
const maxRequestID = 128

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

// validRequestID reports whether the server uses a client's id unchanged. The id must be visible
// ASCII without quotes and backslashes, because it is written to JSON, log lines and header
// lines unescaped. It must not contain what an engine parses as an address (NamesPeer).
func validRequestID(id []byte) bool {
	if len(id) == 0 || len(id) > maxRequestID || NamesPeer(id) {
		return false
	}
	for _, b := range id {
		if b <= ' ' || b > '~' || b == '"' || b == '\'' || b == '`' || b == '\\' {
			return false
		}
	}
	return true
}

// NamesPeer reports whether a request id contains a peer's address for vLLM's engines.
// P2pNcclConnector (vLLM 0.9.2 to 0.23) and MoRIIOConnector (moriio_common.py of 0.32) look
// for ___prefill_addr_…___decode_addr_… in the id and connect to these addresses. They prefer
// them to the parameters from a router. The router must not forward such an id of a client,
// who could make engines connect anywhere.
func NamesPeer(id []byte) bool {
	return bytes.Contains(id, addrMark) && (bytes.Contains(id, prefillAddr) || bytes.Contains(id, decodeAddr))
}

var addrMark, prefillAddr, decodeAddr = []byte("_addr_"), []byte("prefill_addr_"), []byte("decode_addr_")
