package proxyproto

import (
	"bytes"
	"net/netip"
	"unsafe"
)

// ForwardedChain finds the client in the header lines of proxies. Each proxy appends on the
// right, so the client is the rightmost address that is not a trusted proxy's. Entries to
// its left come from untrusted peers and may be anything. If an entry has no address
// ("unknown", an obfuscated name, garbage), the search ends at the trusted proxy that wrote
// it. Lines are added in their order. The zero ForwardedChain trusts no proxy.
type ForwardedChain struct {
	Trusted Networks
	client  netip.Addr
}

// Client returns the client's address. It is invalid if no line had one; then the client is
// the peer of the connection.
func (c *ForwardedChain) Client() netip.Addr { return c.client }

// addHop adds the next address from the left, an invalid one for an entry without address.
func (c *ForwardedChain) addHop(ip netip.Addr) {
	if !ip.IsValid() || !c.client.IsValid() || !c.Trusted.Contain(ip) {
		c.client = ip
	}
}

// AddXForwardedFor adds the value of an X-Forwarded-For line.
func (c *ForwardedChain) AddXForwardedFor(line []byte) {
	for more := true; more; {
		var entry []byte
		entry, line, more = bytes.Cut(line, comma)
		if entry = bytes.Trim(entry, " \t"); len(entry) > 0 {
			c.addHop(parseNode(entry))
		}
	}
}

var comma = []byte{','}

// AddForwarded adds the value of a Forwarded line. It uses the parameter "for" alone. A
// malformed line leaves no address.
func (c *ForwardedChain) AddForwarded(line []byte) {
	for len(line) > 0 {
		ip, rest, hasFor, ok := parseForwardedElement(line)
		if !ok {
			c.client = netip.Addr{}
			return
		}
		if hasFor {
			c.addHop(ip)
		}
		line = rest
	}
}

// parseForwardedElement parses one element of Forwarded, up to its comma: parameters
// NAME=VALUE separated by semicolons, where a value is a token or a quoted string. hasFor is
// false for an empty element.
func parseForwardedElement(b []byte) (ip netip.Addr, rest []byte, hasFor, ok bool) {
	for {
		b = bytes.TrimLeft(b, " \t")
		switch {
		case len(b) == 0:
			return ip, nil, hasFor, true
		case b[0] == ',':
			return ip, b[1:], hasFor, true
		case b[0] == ';':
			b = b[1:]
			continue
		}
		hasFor = true
		equals := bytes.IndexAny(b, "=,; \t\"")
		if equals <= 0 || b[equals] != '=' {
			return ip, nil, hasFor, false
		}
		name := b[:equals]
		value, after, good := parseValue(b[equals+1:])
		if !good {
			return ip, nil, hasFor, false
		}
		if len(name) == 3 && name[0]|0x20 == 'f' && name[1]|0x20 == 'o' && name[2]|0x20 == 'r' {
			if ip.IsValid() {
				return ip, nil, hasFor, false // twice
			}
			ip = parseNode(value)
		}
		b = after
	}
}

// parseValue parses a token or a quoted string. Escapes in a string are accepted but not
// resolved, because no address has one.
func parseValue(b []byte) (value, rest []byte, ok bool) {
	if len(b) == 0 || b[0] != '"' {
		end := bytes.IndexAny(b, ",; \t")
		if end < 0 {
			end = len(b)
		}
		return b[:end], b[end:], end > 0 && bytes.IndexByte(b[:end], '"') < 0
	}
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return b[1:i], b[i+1:], true
		}
	}
	return nil, nil, false
}

// parseNode parses an address with an optional port. An IPv6 address has brackets, which are
// optional without a port. The result is invalid for anything else.
func parseNode(b []byte) netip.Addr {
	switch {
	case len(b) == 0 || len(b) > 64:
		return netip.Addr{}
	case b[0] == '[':
		end := bytes.IndexByte(b, ']')
		if end < 0 || len(b) > end+1 && (b[end+1] != ':' || !isPort(b[end+2:])) {
			return netip.Addr{}
		}
		b = b[1:end]
		if bytes.IndexByte(b, ':') < 0 {
			return netip.Addr{}
		}
	case bytes.Count(b, colon) == 1:
		at := bytes.IndexByte(b, ':')
		if !isPort(b[at+1:]) {
			return netip.Addr{}
		}
		b = b[:at]
	}
	if first := b[:min(len(b), 1)]; len(first) == 0 || !isHex(first[0]) && first[0] != ':' || bytes.IndexByte(b, '%') >= 0 {
		return netip.Addr{} // avoids allocating an error for "unknown" and "_names"; no zones
	}
	ip, err := netip.ParseAddr(unsafe.String(unsafe.SliceData(b), len(b)))
	if err != nil {
		return netip.Addr{}
	}
	return ip.Unmap()
}

var colon = []byte{':'}

// isPort accepts RFC 7239's obfuscated ports (_name) too.
func isPort(b []byte) bool {
	if len(b) > 1 && b[0] == '_' {
		return true
	}
	_, ok := portOf(b)
	return ok
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f' }
