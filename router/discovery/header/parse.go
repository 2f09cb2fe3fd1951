package header

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Names of the headers, and bounds of their values.
const (
	HeaderPrefill   = "X-Sluice-Prefill"
	HeaderPrefiller = "X-Prefiller-Host-Port"
	HeaderRank      = "X-Data-Parallel-Host-Port"

	maxEntries = 8   // workers in one header
	maxValue   = 512 // bytes of a header's value
)

// headerEntry is one parsed entry of a header.
type headerEntry struct {
	host      string     // host name; "" if addr is valid
	addr      netip.Addr // IPv4 or IPv6 address, unmapped
	port      uint16
	ranked    bool
	rank      uint16
	bootstrap uint16 // 0: absent
}

// parseEntry parses HOST:PORT. With keys, it also accepts HOST:PORT;rank=N;bootstrap_port=P.
func parseEntry(text string, keys bool) (t headerEntry, err error) {
	at, rest, more := strings.Cut(text, ";")
	if more && !keys {
		return t, fmt.Errorf("%q has keys; want HOST:PORT", text)
	}
	if t, err = parseHostPort(strings.TrimSpace(at)); err != nil {
		return t, err
	}
	for more {
		var part string
		part, rest, more = strings.Cut(rest, ";")
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		n, err := strconv.ParseUint(value, 10, 16)
		switch {
		case name == "rank" && err == nil:
			t.ranked, t.rank = true, uint16(n)
		case name == "bootstrap_port" && err == nil && n > 0:
			t.bootstrap = uint16(n)
		default:
			return t, fmt.Errorf("%q is not a key; want rank=0…65535 or bootstrap_port=1…65535", strings.TrimSpace(part))
		}
	}
	return t, nil
}

// parseHostPort parses 10.0.0.1:8000, [fd00::1]:8000 or host.name:8000. It rejects every other
// notation that some resolver accepts as an address: decimal, octal, hexadecimal, shortened, with
// a zone, with user information.
func parseHostPort(text string) (t headerEntry, err error) {
	colon := strings.LastIndexByte(text, ':')
	if colon < 0 {
		return t, fmt.Errorf("%q has no port; want HOST:PORT", text)
	}
	host, port := text[:colon], text[colon+1:]
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '0' || port[0] == '+' {
		return t, fmt.Errorf("%q has no port from 1 to 65535 after its last colon; want HOST:PORT", text)
	}
	t.port = uint16(n)
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, closed := strings.CutSuffix(inner, "]")
		a, err := netip.ParseAddr(inner)
		if !closed || err != nil || !a.Is6() {
			return t, fmt.Errorf("%q has no IPv6 address in its brackets; want [ADDRESS]:PORT", text)
		}
		if a.Zone() != "" {
			return t, fmt.Errorf("%q has a zone; want an address that means the same on every node", text)
		}
		t.addr = a.Unmap()
		return t, nil
	}
	if a, err := netip.ParseAddr(host); err == nil && a.Is4() {
		t.addr = a
		return t, nil
	}
	if why := hostnameError(host); why != "" {
		return t, fmt.Errorf("%q %s; want an IPv4 address, an IPv6 address in brackets, or a host name, and a port", text, why)
	}
	t.host = strings.ToLower(host)
	return t, nil
}

// hostnameError returns what is wrong with a host name, or "" if it is valid. A name whose last
// label begins with a digit is a notation of an address (2130706433, 0x7f.1, 127.1). Resolvers
// disagree on these, so they are errors.
func hostnameError(h string) string {
	if h == "" || len(h) > 253 {
		return "has no host of 1 to 253 characters"
	}
	h = strings.TrimSuffix(h, ".")
	last := ""
	for label := range strings.SplitSeq(h, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return "has an empty label in its host, or one too long or with a hyphen at an end"
		}
		for i := range len(label) {
			c := label[i]
			if c != '-' && c != '_' && (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'z') {
				return fmt.Sprintf("has %q in its host", string(rune(c)))
			}
		}
		last = label
	}
	if last[0] >= '0' && last[0] <= '9' {
		return "has a host that is a number, and no IPv4 address of four parts"
	}
	return ""
}
