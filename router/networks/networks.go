package networks

import (
	"net/netip"
	"slices"
)

// IsUnicastHost reports whether an address can belong to one host: it is not unspecified (0.0.0.0,
// which reaches this machine), multicast or broadcast.
func IsUnicastHost(a netip.Addr) bool {
	a = embeddedIPv4(a)
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// Contains reports whether one of the networks covers the address, which must be a unicast host
// address without a zone. A wide network such as 0.0.0.0/0 does not cover loopback and link-local
// addresses, where a machine's own services and a cloud's secrets (169.254.169.254) are: only a
// network within those ranges does.
func Contains(networks []netip.Prefix, a netip.Addr) bool {
	a = a.Unmap()
	if in := embeddedIPv4(a); in != a && (in.IsLoopback() || in.IsLinkLocalUnicast()) {
		return IsUnicastHost(a) && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(in) && n.Bits() >= minPrefix(in) })
	}
	return IsUnicastHost(a) && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) && n.Bits() >= minPrefix(a) })
}

// embeddedIPv4 returns the IPv4 address to which a network translates an IPv6 address: IPv4-mapped
// and compatible ones (RFC 4291, 2.5.5), NAT64 (RFC 6052, 64:ff9b::/96) and 6to4 (RFC 3056). Other
// addresses are returned unchanged.
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

// minPrefix is the shortest prefix with which a network covers an address.
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
