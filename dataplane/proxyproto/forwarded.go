package proxyproto

import (
	"bytes"
	"net/netip"
	"unsafe"
)

// ForwardedChain finds the client in the lines that proxies have written, each adding to the
// right of the one before: it is the rightmost address that is not a trusted proxy's.
// What stands left of it was written by somebody who is not trusted, and may be
// anything. Where an entry tells no address ("unknown", a made-up name, garbage) the
// search ends at the trusted proxy that wrote it. The zero Chain trusts nobody.
type ForwardedChain struct {
	Trusted Networks
	client  netip.Addr
}

// Client is the client so found; invalid where no line told of one, and then it is
// the other end of the connection.
func (c *ForwardedChain) Client() netip.Addr { return c.client }

// addHop takes the next address from the left; an invalid one where an entry tells none.
func (c *ForwardedChain) addHop(ip netip.Addr) {
	if !ip.IsValid() || !c.client.IsValid() || !c.Trusted.Contain(ip) {
		c.client = ip
	}
}

// AddXForwardedFor takes a line's value; of several lines the first comes first.
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

// AddForwarded takes a line's value, as AddXForwardedFor does. Of an entry's parameters only
// "for" is looked at. A line that breaks the grammar tells nothing.
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

// parseForwardedElement reads one entry of Forwarded, up to its comma: parameters NAME=VALUE parted
// by semicolons, a value being a token or a quoted string. said is false of an entry
// that is empty.
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

// parseValue reads a token or a quoted string. One that escapes a character is good, but
// no address has one: it is given as it stands.
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

// parseNode reads an address with or without a port, one of IPv6 with brackets or, where
// there is no port, without; invalid for anything else.
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
		return netip.Addr{} // spares the error's making for "unknown" and "_names"; no zones
	}
	ip, err := netip.ParseAddr(unsafe.String(unsafe.SliceData(b), len(b)))
	if err != nil {
		return netip.Addr{}
	}
	return ip.Unmap()
}

var colon = []byte{':'}

// isPort takes RFC 7239's made-up ports (_name) too.
func isPort(b []byte) bool {
	if len(b) > 1 && b[0] == '_' {
		return true
	}
	_, ok := portOf(b)
	return ok
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f' }
