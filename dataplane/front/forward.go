package front

import (
	"unsafe"

	"sluice/dataplane/upstream"
)

// ForwardFields appends the client's header lines that an engine may see:
// end-to-end ones only (Authorization, Accept, X-Session-ID, traceparent, …),
// names as the client wrote them. Hop-by-hop ones, Host, Content-Length,
// Content-Encoding, Accept-Encoding (the router reads the answer), Expect,
// X-Request-Id, X-Sluice-*, X-data-parallel-rank, those that name hosts
// (X-Prefiller-Host-Port, X-Data-Parallel-Host-Port), those that tell where a request
// comes from (Forwarded, X-Forwarded-*, X-Real-IP, Origin) are left out; so are the
// client's keys where OwnKeys says that they are none of the engine's. What a Handler
// has said (Say) stands in the place of the client's lines of that name. A missing
// Content-Type becomes application/json, and behind trusted proxies X-Forwarded-For is
// ClientIP. Strings are valid until return.
func (x *Exchange) ForwardFields(dst []upstream.Field) []upstream.Field {
	if x.party != nil {
		return x.detachedFields(dst)
	}
	typed := false
	for i := range x.head.lines {
		l := &x.head.lines[i]
		name := x.head.nameOf(l)
		if withheld(name) || isForwarding(name) || x.head.isOption(name) || x.said(borrow(name)) != nil || x.srv.opt.OwnKeys && isKey(name) {
			continue
		}
		typed = typed || equalFold(name, "Content-Type")
		dst = append(dst, upstream.Field{Name: borrow(name), Value: borrow(x.head.valueOf(l))})
	}
	for i := range x.says {
		if s := &x.says[i]; !withheld([]byte(s.name)) {
			dst = append(dst, upstream.Field{Name: s.name, Value: s.value})
		}
	}
	if !typed {
		dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	}
	if x.ip.IsValid() && len(x.srv.live().Proxies.Trusted) > 0 {
		x.ipText = x.ip.AppendTo(x.ipText[:0])
		dst = append(dst, upstream.Field{Name: "X-Forwarded-For", Value: borrow(x.ipText)})
	}
	return dst
}

// borrow makes a string of b without a copy; it lives as long as b's bytes.
func borrow(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// isKey says whether a header line shows a key.
func isKey(name []byte) bool { return equalFold(name, "Authorization") || equalFold(name, "X-Api-Key") }

// withheld says whether a client's header never reaches an engine. X-Override-* is
// how SGLang lets a router set the forbidden fields of a body without writing it
// (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES): among them hosts to connect to.
func withheld(name []byte) bool {
	for _, prefix := range [...]string{"X-Sluice-", "X-Override-"} {
		if len(name) > len(prefix) && equalFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	var other string
	switch len(name) {
	case len("TE"):
		other = "TE"
	case len("Host"):
		other = "Host"
	case len("Expect"):
		return equalFold(name, "Expect") || equalFold(name, "Origin")
	case len("Trailer"):
		return equalFold(name, "Trailer") || equalFold(name, "Upgrade")
	case len("Connection"):
		return equalFold(name, "Connection") || equalFold(name, "Keep-Alive")
	case len("X-Request-Id"):
		other = "X-Request-Id"
	case len("Content-Length"):
		other = "Content-Length"
	case len("Accept-Encoding"):
		other = "Accept-Encoding"
	case len("Content-Encoding"):
		return equalFold(name, "Content-Encoding") || equalFold(name, "Proxy-Connection")
	case len("Transfer-Encoding"):
		other = "Transfer-Encoding"
	case len("Proxy-Authenticate"):
		other = "Proxy-Authenticate"
	case len("Proxy-Authorization"):
		other = "Proxy-Authorization"
	case len("X-data-parallel-rank"):
		other = "X-data-parallel-rank"
	case len("X-Prefiller-Host-Port"):
		other = "X-Prefiller-Host-Port"
	case len("X-Data-Parallel-Host-Port"):
		other = "X-Data-Parallel-Host-Port"
	default:
		return false
	}
	return equalFold(name, other)
}
