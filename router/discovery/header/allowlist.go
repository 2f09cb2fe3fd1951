package header

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"sluice/router/networks"
)

// Ports is an inclusive range of ports.
type Ports struct{ From, To uint16 }

// ParseNetworks parses comma-separated CIDRs, such as 10.0.0.0/8,fd00::/8. It ignores empty
// entries and rejects IPv4 networks written as IPv6.
func ParseNetworks(text string) (nets []netip.Prefix, err error) {
	for word := range strings.SplitSeq(text, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		n, err := netip.ParsePrefix(word)
		if err != nil {
			return nil, fmt.Errorf("%q is not a network; want CIDRs such as 10.0.0.0/8,fd00::/8", word)
		}
		if n.Addr().Is4In6() {
			return nil, fmt.Errorf("%q is an IPv4 network in IPv6 notation; want IPv4 notation", word)
		}
		nets = append(nets, n.Masked())
	}
	return nets, nil
}

// ParsePorts parses comma-separated ports and port ranges, such as 8000,8100-8200.
func ParsePorts(text string) (ports []Ports, err error) {
	for word := range strings.SplitSeq(text, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		a, b, isRange := strings.Cut(word, "-")
		if !isRange {
			b = a
		}
		from, errA := strconv.ParseUint(a, 10, 16)
		to, errB := strconv.ParseUint(b, 10, 16)
		if errA != nil || errB != nil || from == 0 || to < from {
			return nil, fmt.Errorf("%q is neither a port nor a range of ports; want 8000,8100-8200", word)
		}
		ports = append(ports, Ports{uint16(from), uint16(to)})
	}
	return ports, nil
}

// allowed returns the reason why the sidecar may not connect to an address, or "" if it may.
func (o *Options) allowed(a netip.Addr, port uint16) string {
	switch {
	case len(o.Networks) == 0:
		return "no network is allowed (--prefill-networks)"
	case !networks.IsUnicastHost(a):
		return "it is not an address of one host"
	case !networks.Contains(o.Networks, a):
		return "it lies outside the networks allowed (--prefill-networks): " + joined(o.Networks)
	case !o.portAllowed(port):
		return fmt.Sprintf("port %d is not allowed (--prefill-ports): want %s", port, o.portList())
	}
	return ""
}

func (o *Options) portAllowed(port uint16) bool {
	return slices.ContainsFunc(o.Ports, func(p Ports) bool { return p.From <= port && port <= p.To })
}

func (o *Options) portList() string {
	var words []string
	for _, p := range o.Ports {
		if p.From == p.To {
			words = append(words, strconv.Itoa(int(p.From)))
		} else {
			words = append(words, fmt.Sprintf("%d-%d", p.From, p.To))
		}
	}
	return strings.Join(words, ", ")
}

func joined(nets []netip.Prefix) string {
	var words []string
	for _, n := range nets {
		words = append(words, n.String())
	}
	return strings.Join(words, ", ")
}
