package routed

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"

	"sluice/dataplane/jsonscan"
	"sluice/router/networks"
)

// hosts are those that a caller's prefill_result and bootstrap_info may name: an
// engine will connect to them.
type hosts struct {
	nets  []netip.Prefix
	names map[string]bool
}

// newHosts reads routed.hosts: networks (10.0.0.0/8), addresses, and names, which
// are compared and never looked up.
func newHosts(list []string) (h hosts, err error) {
	h.names = make(map[string]bool)
	for _, w := range list {
		if n, err := netip.ParsePrefix(w); err == nil {
			h.nets = append(h.nets, n.Masked())
			continue
		}
		if a, err := netip.ParseAddr(w); err == nil {
			h.nets = append(h.nets, netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()))
			continue
		}
		if w == "" || strings.ContainsAny(w, "/:* ") {
			return h, fmt.Errorf("routed: cannot read the host %q: want a network (10.0.0.0/8), an address or a name", w)
		}
		h.names[strings.ToLower(w)] = true
	}
	return h, nil
}

func (h *hosts) allow(host string) bool {
	if a, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return networks.Allow(h.nets, a.WithZone(""))
	}
	return h.names[strings.ToLower(host)]
}

// check looks through what a caller hands to an engine for everything that names a
// host.
func (h *hosts) check(r *request) error {
	if r.has(fBootstrap) {
		if err := h.one("bootstrap_info.bootstrap_host", r.vals[fBootstrapHost]); err != nil {
			return err
		}
	}
	return h.within("prefill_result.disaggregated_params", r.vals[fResultParams], false)
}

// within checks every string below a member whose name speaks of a place.
func (h *hosts) within(in string, raw []byte, place bool) error {
	if len(raw) == 0 {
		return nil
	}
	switch raw[0] {
	case '"':
		if place {
			return h.one(in, raw)
		}
	case '[':
		i := 0
		for it := jsonscan.Walk(raw); it.Next(); i++ {
			if err := h.within(fmt.Sprintf("%s[%d]", in, i), it.Raw(), place); err != nil {
				return err
			}
		}
	case '{':
		for it := jsonscan.Walk(raw); it.Next(); {
			name := string(it.Key(nil))
			if err := h.within(in+"."+name, it.Raw(), place || isPlace(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// isPlace says whether a member's name tells that its value is a host or holds
// one: remote_host, bootstrap_addr, ctx_info_endpoint, side_channel_url, …
func isPlace(name string) bool {
	name = strings.ToLower(name)
	for _, w := range [...]string{"host", "addr", "endpoint", "url", "uri", "ip"} {
		if name == w || strings.HasSuffix(name, "_"+w) || strings.HasPrefix(name, w+"_") || strings.HasSuffix(name, "_"+w+"s") || w != "ip" && strings.Contains(name, w) {
			return true
		}
	}
	return false
}

// one checks one value: HOST, HOST:PORT or a URL.
func (h *hosts) one(field string, raw []byte) error {
	text := string(appendText(nil, raw))
	host := text
	if strings.Contains(text, "://") {
		u, err := url.Parse(text)
		if err != nil {
			return &FieldError{Field: field, Got: shown(raw, jsonscan.String), Want: "a host, HOST:PORT or a URL", Forbidden: true}
		}
		host = u.Hostname()
	} else if only, _, err := net.SplitHostPort(text); err == nil {
		host = only
	}
	if !h.allow(host) {
		return &FieldError{Field: field, Got: fmt.Sprintf("the host %q is not on the allow-list (routed.hosts)", host), Forbidden: true}
	}
	return nil
}
