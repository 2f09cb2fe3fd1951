package proxyproto

import (
	"fmt"
	"net/netip"
	"strings"
)

// Networks are the addresses that are believed. They are few: a search goes through
// all of them.
type Networks []netip.Prefix

// ParseNetworks reads networks (10.0.0.0/8) and single addresses (::1). The error
// quotes the word at fault.
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

// ParseNetwork reads one. An IPv4 network written as one of IPv6 (::ffff:10.0.0.0/104)
// is that of IPv4.
func ParseNetwork(word string) (netip.Prefix, error) {
	if !strings.Contains(word, "/") {
		ip, err := netip.ParseAddr(word)
		if err != nil || ip.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("proxied: cannot read %q: want a network as 10.0.0.0/8 or an address as 10.0.0.1", word)
		}
		ip = ip.Unmap()
		return netip.PrefixFrom(ip, ip.BitLen()), nil
	}
	n, err := netip.ParsePrefix(word)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("proxied: cannot read %q: want a network as 10.0.0.0/8 or an address as 10.0.0.1", word)
	}
	if ip := n.Addr(); ip.Is4In6() && n.Bits() >= 96 {
		n = netip.PrefixFrom(ip.Unmap(), n.Bits()-96)
	}
	return n.Masked(), nil
}

// Contain says whether ip is in one of them.
func (n Networks) Contain(ip netip.Addr) bool {
	for i := range n {
		if n[i].Contains(ip) {
			return true
		}
	}
	return false
}
