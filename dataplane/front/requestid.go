package front

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"sync/atomic"
)

// maxRequestID is the longest X-Request-Id taken from a client, in bytes.
const maxRequestID = 128

// requestIDs makes request ids of 32 hexadecimal digits: a random prefix of the process and
// a counter, so that an id costs one small string and two processes do not share any.
// Python's uuid.UUID accepts them: servers on starlette-context, such as llama-cpp-python's,
// answer 400 to an X-Request-Id that it does not accept.
type requestIDs struct {
	prefix  [20]byte
	counter atomic.Uint64
}

func (r *requestIDs) init() {
	var seed [len(r.prefix) / 2]byte
	_, _ = rand.Read(seed[:])
	hex.Encode(r.prefix[:], seed[:])
}

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

// validRequestID says whether a client's id may be used as it is: visible
// ASCII without quotes and backslashes, because it goes into JSON, log lines
// and header lines unescaped, and nothing in which an engine reads an address.
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

// NamesPeer says whether a request id tells vLLM's engines where their peer is, which they
// then connect to: P2pNcclConnector (vLLM 0.9.2 to 0.23) and MoRIIOConnector
// (moriio_common.py of 0.32) look for ___prefill_addr_…___decode_addr_… in it, before
// anything that a router tells them. No client may say that.
func NamesPeer(id []byte) bool {
	return bytes.Contains(id, addrMark) && (bytes.Contains(id, prefillAddr) || bytes.Contains(id, decodeAddr))
}

var addrMark, prefillAddr, decodeAddr = []byte("_addr_"), []byte("prefill_addr_"), []byte("decode_addr_")
