package registration

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"sluice/router/networks"
	"sluice/router/worker"
)

// callerScope is the address of a caller and the networks in which the addresses that it announces
// must lie.
type callerScope struct {
	caller   netip.Addr
	networks []netip.Prefix
}

// loopback has the networks that a caller on this machine may announce even if only a wider
// network allows its calls.
var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

// scopeOf returns the scope of a caller whose address the allowed networks contain. For a loopback
// caller it adds the loopback networks if the allowed networks do not name them.
func scopeOf(caller netip.Addr, within []netip.Prefix) callerScope {
	if caller.IsLoopback() && !networks.Contains(within, caller) {
		within = slices.Concat(within, loopback)
	}
	return callerScope{caller: caller, networks: within}
}

// host parses an address and checks it against the networks. For a wildcard or an empty host it
// returns the caller's address.
func (p callerScope) host(field, host string) (string, error) {
	a := p.caller
	switch host {
	case "", "*", "0.0.0.0", "::":
	default:
		var err error
		if a, err = netip.ParseAddr(host); err != nil || a.Zone() != "" {
			return "", fmt.Errorf("%s: the host %q is not an IP address; want an IP address (a name could resolve to another address after the check), or * for the caller's address", field, truncate(host))
		}
	}
	if a = a.Unmap(); !networks.Contains(p.networks, a) {
		why := "is outside registration.networks"
		switch {
		case !networks.IsUnicastHost(a):
			why = "is not an address of one host"
		case a.IsLoopback() || a.IsLinkLocalUnicast():
			why += "; loopback and link-local addresses need a network within their own ranges"
		}
		return "", fmt.Errorf("%s: %s %s", field, a, why)
	}
	return a.String(), nil
}

// url parses the URL of an engine. It returns the URL with its host checked and its port explicit.
func (p callerScope) url(field, raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("%s: %q is not a URL; want http://ADDRESS:PORT or https://ADDRESS:PORT", field, truncate(raw))
	}
	host, err := p.host(field, u.Hostname())
	if err != nil {
		return "", err
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	u.Host = net.JoinHostPort(host, port)
	return u.String(), nil
}

// endpoints parses ZMQ endpoints. It accepts only tcp:// with an address to connect to: no paths
// of this machine, and nothing for the router to bind.
func (p callerScope) endpoints(field string, list []string) ([]string, error) {
	var out []string
	for i, ep := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		if field == "kv_events" && (ep == "auto" || ep == "off") {
			out = append(out, ep)
			continue
		}
		addr, ok := strings.CutPrefix(ep, "tcp://")
		host, port, err := net.SplitHostPort(addr)
		if !ok || err != nil {
			return nil, fmt.Errorf("%s: %q is not an endpoint; want tcp://ADDRESS:PORT", at, truncate(ep))
		}
		if host, err = p.host(at, host); err != nil {
			return nil, err
		}
		out = append(out, "tcp://"+net.JoinHostPort(host, port))
	}
	return out, nil
}

// checkSpec checks the addresses of a worker that another router process has accepted. It returns
// nil if this router would accept them too.
func (p callerScope) checkSpec(spec *worker.Spec) error {
	if _, err := p.url("url", spec.URL); err != nil {
		return err
	}
	for i, u := range spec.RankURLs {
		if _, err := p.url(fmt.Sprintf("rank_urls[%d]", i), u); err != nil {
			return err
		}
	}
	for _, l := range []struct {
		field string
		list  []string
	}{{"kv_events", spec.KVEvents}, {"kv_replay", spec.KVReplay}, {"load_events", spec.LoadEvents}} {
		if _, err := p.endpoints(l.field, l.list); err != nil {
			return err
		}
	}
	for _, key := range []string{"bootstrap_host", "peer_host"} {
		for _, host := range spec.Options[key] {
			if _, err := p.host(key, host); err != nil {
				return err
			}
		}
	}
	return nil
}

// option adds a host and a port to the options of a Spec.
func (p callerScope) option(to map[string][]string, field, host, hostKey string, port int, portKey string) error {
	if port < 1 || port > 65535 {
		return fmt.Errorf("%s.port: %d; want 1 to 65535", field, port)
	}
	to[portKey] = []string{strconv.Itoa(port)}
	if host == "" {
		return nil
	}
	host, err := p.host(field+".host", host)
	if err == nil {
		to[hostKey] = []string{host}
	}
	return err
}

// truncate shortens a caller's input for an error message.
func truncate(s string) string {
	if len(s) > 100 {
		return s[:100] + "…"
	}
	return s
}
