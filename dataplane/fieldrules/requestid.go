package fieldrules

import "bytes"

// maxRequestID is the greatest length of a client's X-Request-Id that the server uses, in bytes.
const maxRequestID = 128

// ValidRequestID reports whether the server uses a client's id unchanged. The id must be visible
// ASCII without quotes and backslashes, because it is written to JSON, log lines and header
// lines unescaped. It must not contain what an engine parses as an address (NamesPeer).
func ValidRequestID(id []byte) bool {
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
