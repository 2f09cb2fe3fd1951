package engineapi

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"sluice/dataplane/fieldrules"
	"sluice/dataplane/jsonscan"
	"sluice/router/networks"
)

// allowedHosts are the hosts that a caller's prefill_result and bootstrap_info may name. They
// are restricted because an engine will connect to them.
type allowedHosts struct {
	nets  []netip.Prefix
	names map[string]bool
	any   bool // one of nets is 0.0.0.0/0 or ::/0
}

// newHosts parses engine_api.allowed_hosts: networks (10.0.0.0/8), addresses, and names, which
// are compared as text and never resolved.
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
			return h, fmt.Errorf("engineapi: cannot read the host %q: want a network (10.0.0.0/8), an address or a name", w)
		}
		h.names[strings.ToLower(w)] = true
	}
	return h, nil
}

// allow returns whether a host is on the list. An address with a zone never is, because another
// parser may not read "fd00::1%@other" as an address with a zone.
func (h *allowedHosts) allow(host string) bool {
	if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Zone() == "" && networks.Contains(h.nets, a)
	}
	return h.names[strings.ToLower(host)]
}

// check checks every host that a caller's request passes to an engine.
func (h *allowedHosts) check(r *request) error {
	if r.has(fBootstrap) {
		if err := h.checkHost(placeOf("bootstrap_host", true), r.vals[fBootstrapHost]); err != nil {
			return prefixField("bootstrap_info.bootstrap_host", err)
		}
	}
	return prefixField("prefill_result.disaggregated_params", h.checkTree(place{}, r.vals[fResultParams]))
}

// checkMedia checks the members that are passed to engines unchanged, as the front checks HTTP
// bodies: an engine fetches the URLs and opens the files that media members name.
func (e *Engine) checkMedia(r *request) error {
	hosts := e.opt.Live().MediaHosts
	for _, s := range [...]struct {
		members []member
		depth   int
	}{{r.engineFields, 1}, {r.sampling, 2}} {
		for _, m := range s.members {
			below, why, forbidden := fieldrules.CheckMember(m.name, m.raw, s.depth, hosts)
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

// place is what a member's name implies about its value. The elements of a list inherit the
// list's place, so that a name, which may be as long as the body, is analysed only once.
type place struct {
	host    bool // the value is or contains a host; its members inherit this
	bare    bool // the value is a host, never a URL
	numeric bool // a number is an address, too: engines write 2130706433 into a URL
	opaque  bool // the state of TensorRT-LLM's transceiver, whose addresses the router cannot read
}

// placeOf analyses the name of a member. inHost means that the enclosing member is a host.
func placeOf(name string, inHost bool) place {
	return place{
		host:    inHost || namesHost(name),
		bare:    endsIn(name, "host", "hostname", "ip"),
		numeric: endsIn(name, "host", "addr", "address", "endpoint", "url", "uri", "ip"),
		opaque:  strings.HasSuffix(name, "opaque_state"),
	}
}

// maxFieldPath bounds the path of a FieldError, because the caller chooses the names in it.
const maxFieldPath = 400

// prefixField prepends part to the path of a FieldError. The path is built only after an error:
// building it for each element would take time quadratic in the body's length.
func prefixField(part string, err error) error {
	var f *FieldError
	if errors.As(err, &f) {
		f.Field = truncate(truncate(part, maxFieldPath/2)+f.Field, maxFieldPath)
	}
	return err
}

// checkTree checks every string below a member whose name implies a host, and every URL below
// any member. at belongs to raw's member, or to the list of which raw is an element. The Field
// of an error is the path below raw.
func (h *allowedHosts) checkTree(at place, raw []byte) error {
	if len(raw) == 0 {
		return nil
	}
	switch raw[0] {
	case '"':
		if at.opaque && !h.any {
			return &FieldError{Got: "the state of a transceiver, whose hosts cannot be read; it is accepted if engine_api.allowed_hosts contains 0.0.0.0/0", Forbidden: true}
		}
		if at.host || bytes.Contains(appendText(nil, raw), []byte("://")) {
			return h.checkHost(at, raw)
		}
	case '[':
		i := 0
		for it := jsonscan.Walk(raw); it.Next(); i++ {
			if err := h.checkTree(at, it.Raw()); err != nil {
				return prefixField("["+strconv.Itoa(i)+"]", err)
			}
		}
	case '{':
		for it := jsonscan.Walk(raw); it.Next(); {
			name := string(it.Key(nil))
			if err := h.checkTree(placeOf(name, at.host), it.Raw()); err != nil {
				return prefixField("."+name, err)
			}
		}
	case 'n', 't', 'f':
	default:
		if at.host && at.numeric {
			return &FieldError{Got: quoteValue(raw, jsonscan.Number), Want: "a host as text", Forbidden: true}
		}
	}
	return nil
}

// endsIn returns whether a member's name ends in one of the words or its plural.
func endsIn(name string, words ...string) bool {
	name = strings.TrimSuffix(strings.ToLower(name), "s")
	for _, w := range words {
		if w = strings.TrimSuffix(w, "s"); name == w || strings.HasSuffix(name, "_"+w) || len(w) > 2 && strings.HasSuffix(name, w) {
			return true
		}
	}
	return false
}

// namesHost returns whether a member's name implies that its value is or contains a host:
// remote_host, bootstrap_addr, ctx_info_endpoint, side_channel_url, …
func namesHost(name string) bool {
	name = strings.ToLower(name)
	for _, w := range [...]string{"host", "addr", "endpoint", "url", "uri", "ip"} {
		if name == w || strings.HasSuffix(name, "_"+w) || strings.HasPrefix(name, w+"_") || strings.HasSuffix(name, "_"+w+"s") || w != "ip" && strings.Contains(name, w) {
			return true
		}
	}
	return false
}

// checkHost checks one value: HOST, HOST:PORT or a URL. The value of a member named host or ip
// may not be a URL, because engines write it into a URL of their own. checkHost also checks the
// text after the host: "10.0.0.1:x@other" and "10.0.0.1:80;other" begin with an allowed host
// and lead to another.
func (h *allowedHosts) checkHost(at place, raw []byte) error {
	text := string(appendText(nil, raw))
	host, read := text, true
	switch only, port, err := net.SplitHostPort(text); {
	case strings.Contains(text, "://"):
		u, err := url.Parse(text)
		if read = err == nil && !at.bare; read {
			host = u.Hostname()
		}
	case err == nil:
		_, err = strconv.ParseUint(port, 10, 16)
		host, read = only, err == nil
	}
	if !read {
		return &FieldError{Got: quoteValue(raw, jsonscan.String), Want: "a host, HOST:PORT, or a URL where the member accepts one", Forbidden: true}
	}
	if !h.allow(host) {
		return &FieldError{Got: fmt.Sprintf("the host %.100q is not on the allow-list (engine_api.allowed_hosts)", host), Forbidden: true}
	}
	return nil
}
