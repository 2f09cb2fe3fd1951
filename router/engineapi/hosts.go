package engineapi

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/networks"
)

// allowedHosts are those that a caller's prefill_result and bootstrap_info may name: an
// engine will connect to them.
type allowedHosts struct {
	nets  []netip.Prefix
	names map[string]bool
	any   bool // one of nets is 0.0.0.0/0 or ::/0
}

// newHosts reads routed.hosts: networks (10.0.0.0/8), addresses, and names, which
// are compared and never looked up.
func newHosts(list []string) (h allowedHosts, err error) {
	h.names = make(map[string]bool)
	for _, w := range list {
		if n, err := netip.ParsePrefix(w); err == nil {
			h.nets, h.any = append(h.nets, n.Masked()), h.any || n.Bits() == 0
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

// allow says whether a host is on the list. An address with a zone is not: what is read
// here as a zone, "fd00::1%@other", others may read as something else.
func (h *allowedHosts) allow(host string) bool {
	if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Zone() == "" && networks.Contains(h.nets, a)
	}
	return h.names[strings.ToLower(host)]
}

// check looks through what a caller hands to an engine for everything that names a
// host.
func (h *allowedHosts) check(r *request) error {
	if r.has(fBootstrap) {
		if err := h.checkHost("bootstrap_info.bootstrap_host", "bootstrap_host", r.vals[fBootstrapHost]); err != nil {
			return err
		}
	}
	return h.checkTree("prefill_result.disaggregated_params", "", r.vals[fResultParams], false)
}

// checkMedia looks at what is handed on to engines as it stands, as the front looks at the
// bodies of HTTP: an engine fetches the URLs, and opens the files, that media members name.
func (e *Engine) checkMedia(r *request) error {
	var hosts front.MediaHosts
	if e.opt.MediaHosts != nil {
		hosts = e.opt.MediaHosts()
	}
	for _, s := range [...]struct {
		members []member
		depth   int
	}{{r.engineFields, 1}, {r.sampling, 2}} {
		for _, m := range s.members {
			below, why, forbidden := front.CheckMember(m.name, m.raw, s.depth, hosts)
			if why == "" {
				continue
			}
			field := m.in + string(m.name)
			if below != "" {
				field += "." + below
			}
			return &FieldError{Field: field, Got: "it " + why, Forbidden: forbidden}
		}
	}
	return nil
}

// checkTree checks every string below a member whose name speaks of a place, and every URL
// wherever it stands. name is the member's own, or of the list that it stands in.
func (h *allowedHosts) checkTree(in, name string, raw []byte, place bool) error {
	if len(raw) == 0 {
		return nil
	}
	switch raw[0] {
	case '"':
		if strings.HasSuffix(name, "opaque_state") && !h.any { // TensorRT-LLM's: addresses are in it, in a form of its release
			return &FieldError{Field: in, Got: "the state of a transceiver, whose hosts cannot be read; it is taken where routed.hosts has 0.0.0.0/0", Forbidden: true}
		}
		if place || bytes.Contains(appendText(nil, raw), []byte("://")) {
			return h.checkHost(in, name, raw)
		}
	case '[':
		i := 0
		for it := jsonscan.Walk(raw); it.Next(); i++ {
			if err := h.checkTree(fmt.Sprintf("%s[%d]", in, i), name, it.Raw(), place); err != nil {
				return err
			}
		}
	case '{':
		for it := jsonscan.Walk(raw); it.Next(); {
			name := string(it.Key(nil))
			if err := h.checkTree(in+"."+name, name, it.Raw(), place || namesHost(name)); err != nil {
				return err
			}
		}
	case 'n', 't', 'f':
	default: // 2130706433 is an address too, once an engine has written it down
		if place && endsIn(name, "host", "addr", "address", "endpoint", "url", "uri", "ip") {
			return &FieldError{Field: in, Got: quoteValue(raw, jsonscan.Number), Want: "a host as text", Forbidden: true}
		}
	}
	return nil
}

// endsIn says whether a member's name ends in one of the words, or in its plural.
func endsIn(name string, words ...string) bool {
	name = strings.TrimSuffix(strings.ToLower(name), "s")
	for _, w := range words {
		if w = strings.TrimSuffix(w, "s"); name == w || strings.HasSuffix(name, "_"+w) || len(w) > 2 && strings.HasSuffix(name, w) {
			return true
		}
	}
	return false
}

// namesHost says whether a member's name tells that its value is a host or holds
// one: remote_host, bootstrap_addr, ctx_info_endpoint, side_channel_url, …
func namesHost(name string) bool {
	name = strings.ToLower(name)
	for _, w := range [...]string{"host", "addr", "endpoint", "url", "uri", "ip"} {
		if name == w || strings.HasSuffix(name, "_"+w) || strings.HasPrefix(name, w+"_") || strings.HasSuffix(name, "_"+w+"s") || w != "ip" && strings.Contains(name, w) {
			return true
		}
	}
	return false
}

// checkHost checks one value: HOST, HOST:PORT or a URL, which a member called host or ip may
// not be, since engines write it into a URL of their own. What stands behind the host is
// looked at as well: "10.0.0.1:x@other" and "10.0.0.1:80;other" begin with one that is
// allowed, and end elsewhere.
func (h *allowedHosts) checkHost(field, name string, raw []byte) error {
	text := string(appendText(nil, raw))
	host, read := text, true
	switch only, port, err := net.SplitHostPort(text); {
	case strings.Contains(text, "://"):
		u, err := url.Parse(text)
		if read = err == nil && !endsIn(name, "host", "hostname", "ip"); read {
			host = u.Hostname()
		}
	case err == nil:
		_, err = strconv.ParseUint(port, 10, 16)
		host, read = only, err == nil
	}
	if !read {
		return &FieldError{Field: field, Got: quoteValue(raw, jsonscan.String), Want: "a host, HOST:PORT, or a URL where no mere host is asked for", Forbidden: true}
	}
	if !h.allow(host) {
		return &FieldError{Field: field, Got: fmt.Sprintf("the host %.100q is not on the allow-list (routed.hosts)", host), Forbidden: true}
	}
	return nil
}
