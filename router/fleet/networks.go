package fleet

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"sluice/router/networks"
)

// checkNetwork returns why an event source that an engine reported may not be connected to, or nil
// if it may. Without networks every source is allowed.
func checkNetwork(allowed []netip.Prefix, src EventSource) error {
	if len(allowed) == 0 {
		return nil
	}
	for _, ep := range []string{src.Endpoint, src.Replay} {
		if ep == "" {
			continue
		}
		addr, tcp := strings.CutPrefix(ep, "tcp://")
		host, _, err := net.SplitHostPort(addr)
		ip, notIP := netip.ParseAddr(host)
		if !tcp || err != nil || notIP != nil {
			return fmt.Errorf("the engine reports %q; want tcp:// and an IP address, because the worker registered itself", ep)
		}
		if !networks.Contains(allowed, ip.WithZone("")) {
			return fmt.Errorf("the engine reports %q, which is in none of registration.networks (loopback and link-local addresses need a network within their own ranges)", ep)
		}
	}
	return nil
}
