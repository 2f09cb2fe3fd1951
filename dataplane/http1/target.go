package http1

import (
	"bytes"
	"net/netip"
	"strings"

	"sluice/dataplane/ascii"
)

// Error messages about a request target. They are meant for the client.
const (
	targetBytes     = "the request target holds a space, a control character or a byte above 127; percent-encode it"
	targetFragment  = "the request target holds a fragment (#), which clients must not send"
	targetForm      = "the request target must be a path that begins with /, or an absolute http or https URL"
	targetAuthority = "the absolute request target must name a host and no user: http://host[:port]/path"
)

// pathOf returns the path of a request target (RFC 9112, 3.2). It accepts the origin form,
// the absolute form with scheme http or https, * for OPTIONS, and host:port for CONNECT. It
// does not decode or normalise the path, because routes are compared byte by byte. An absolute
// target without a path has the path /. refused is "" if the target is accepted, otherwise an
// error message for the client. path borrows target.
func pathOf(method, target []byte) (path []byte, refused string) {
	if len(target) == 0 {
		return nil, "the request target is empty"
	}
	for _, b := range target {
		if b <= ' ' || b >= 0x7f {
			return nil, targetBytes
		}
	}
	if bytes.IndexByte(target, '#') >= 0 {
		return nil, targetFragment
	}
	switch {
	case target[0] == '/':
		return beforeQuery(target), ""
	case string(target) == "*" && string(method) == "OPTIONS":
		return target, ""
	case string(method) == "CONNECT":
		if !isAuthority(target) {
			return nil, targetForm
		}
		return target, ""
	}
	rest, ok := afterScheme(target)
	if !ok {
		return nil, targetForm
	}
	end := bytes.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	if !isAuthority(rest[:end]) {
		return nil, targetAuthority
	}
	if path = beforeQuery(rest[end:]); len(path) == 0 {
		path = []byte{'/'}
	}
	return path, ""
}

// beforeQuery returns b up to the first question mark.
func beforeQuery(b []byte) []byte {
	path, _, _ := bytes.Cut(b, []byte{'?'})
	return path
}

// afterScheme removes "http://" or "https://" from target, in upper or lower case (RFC 3986,
// 3.1). ok is false if target begins with neither.
func afterScheme(target []byte) (rest []byte, ok bool) {
	for _, scheme := range [...]string{"http://", "https://"} {
		if len(target) >= len(scheme) && ascii.EqualFold(target[:len(scheme)], scheme) {
			return target[len(scheme):], true
		}
	}
	return nil, false
}

// isAuthority reports whether b is host [ ":" port ] of RFC 3986, 3.2, with a host that is not
// empty. It refuses user information (RFC 9110, 4.2.4).
func isAuthority(b []byte) bool {
	host, port := string(b), ""
	if strings.HasPrefix(host, "[") {
		end := strings.IndexByte(host, ']')
		if end < 0 {
			return false
		}
		ip, err := netip.ParseAddr(host[1:end])
		if err != nil || !ip.Is6() || ip.Zone() != "" {
			return false
		}
		host, port = "ip", host[end+1:]
	} else if at := strings.IndexByte(host, ':'); at >= 0 {
		host, port = host[:at], host[at:]
	}
	if port != "" && (port[0] != ':' || strings.Trim(port[1:], "0123456789") != "") {
		return false
	}
	return isRegName(host)
}

// isRegName reports whether s is a reg-name of RFC 3986, 3.2.2, that is not empty. It refuses
// percent-encoding: no DNS name or address needs it, and servers differ on its meaning.
func isRegName(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; strings.IndexByte("%:[]", c) >= 0 || !hostByte[c] {
			return false
		}
	}
	return s != ""
}
