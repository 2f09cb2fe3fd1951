package networks

import (
	"net/netip"
	"slices"
)

// IsUnicastHost says whether an address can be of one host at all: it is not unspecified
// (0.0.0.0, which reaches this very machine), not multicast and not broadcast.
func IsUnicastHost(a netip.Addr) bool {
	a = embeddedIPv4(a)
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// Contains says whether one of the networks means the address, which must be of one host
// and without a zone. A wide network, as 0.0.0.0/0, does not mean loopback and
// link-local addresses, where a machine's own services and a cloud's secrets
// (169.254.169.254) are: only one that lies within those ranges does.
func Contains(networks []netip.Prefix, a netip.Addr) bool {
	a = a.Unmap()
	if in := embeddedIPv4(a); in != a && (in.IsLoopback() || in.IsLinkLocalUnicast()) {
		return IsUnicastHost(a) && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(in) && n.Bits() >= minPrefix(in) })
	}
	return IsUnicastHost(a) && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) && n.Bits() >= minPrefix(a) })
}

// embeddedIPv4 is the IPv4 address that a network translates an IPv6 address to: mapped and
// compatible ones (RFC 4291, 2.5.5), NAT64 (RFC 6052, 64:ff9b::/96) and 6to4 (RFC 3056).
// Others are themselves.
func embeddedIPv4(a netip.Addr) netip.Addr {
	a = a.Unmap()
	if !a.Is6() {
		return a
	}
	b := a.As16()
	for _, k := range [...]struct {
		prefix string
		at     int
	}{{"64:ff9b::/96", 12}, {"2002::/16", 2}, {"::/96", 12}} {
		if netip.MustParsePrefix(k.prefix).Contains(a) && !a.IsLoopback() && !a.IsUnspecified() {
			return netip.AddrFrom4([4]byte(b[k.at : k.at+4]))
		}
	}
	return a
}

// minPrefix is how long a network's prefix must be to mean an address.
func minPrefix(a netip.Addr) int {
	switch {
	case a.IsLoopback() && a.Is4():
		return 8
	case a.IsLoopback():
		return 128
	case a.IsLinkLocalUnicast() && a.Is4():
		return 16
	case a.IsLinkLocalUnicast():
		return 10
	}
	return 0
}
