package proxyproto

import (
	"fmt"
	"net/netip"
	"strings"
)

// Networks is a set of trusted addresses. A look-up is a linear search, because there are few.
type Networks []netip.Prefix

// ParseNetworks parses networks (10.0.0.0/8) and single addresses (::1). The error quotes the
// invalid word.
func ParseNetworks(words []string) (Networks, error) {
	var all Networks
	for _, w := range words {
		n, err := ParseNetwork(w)
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	return all, nil
}

// ParseNetwork parses a network or an address. An IPv4 network in IPv6 form
// (::ffff:10.0.0.0/104) becomes the IPv4 network.
func ParseNetwork(word string) (netip.Prefix, error) {
	if !strings.Contains(word, "/") {
		ip, err := netip.ParseAddr(word)
		if err != nil || ip.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("proxyproto: cannot read %q: want a network as 10.0.0.0/8 or an address as 10.0.0.1", word)
		}
		ip = ip.Unmap()
		return netip.PrefixFrom(ip, ip.BitLen()), nil
	}
	n, err := netip.ParsePrefix(word)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("proxyproto: cannot read %q: want a network as 10.0.0.0/8 or an address as 10.0.0.1", word)
	}
	if ip := n.Addr(); ip.Is4In6() && n.Bits() >= 96 {
		n = netip.PrefixFrom(ip.Unmap(), n.Bits()-96)
	}
	return n.Masked(), nil
}

// Contain reports whether ip is in one of the networks.
func (n Networks) Contain(ip netip.Addr) bool {
	for i := range n {
		if n[i].Contains(ip) {
			return true
		}
	}
	return false
}
