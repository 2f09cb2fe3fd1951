package config

import (
	"fmt"
	"net/netip"
	"net/url"
	"strings"

	"sluice/dataplane/proxyproto"
)

func (c *Config) checkProxies(bad report) {
	p := &c.Proxies
	for i, word := range p.Trusted {
		if _, err := proxyproto.ParseNetwork(word); err != nil {
			bad(fmt.Sprintf("proxies.trusted[%d]", i), "%s; want a network such as 10.0.0.0/8, or an address such as 10.0.0.1", quoted(word))
		}
	}
	if len(p.Trusted) > 0 {
		return
	}
	const why = "%s, but proxies.trusted is empty; want the networks of the proxies in proxies.trusted, or off here"
	if p.Protocol != "off" && p.Protocol != "" {
		bad("proxies.protocol", why, quoted(p.Protocol))
	}
	if p.Forwarded != "off" && p.Forwarded != "" {
		bad("proxies.forwarded", why, quoted(p.Forwarded))
	}
}

// TrustedProxies returns the networks of proxies.trusted. c must have been checked.
func (c *Config) TrustedProxies() proxyproto.Networks {
	n, _ := proxyproto.ParseNetworks(c.Proxies.Trusted)
	return n
}

func (c *Config) checkCORS(bad report) {
	for i, o := range c.CORS.Origins {
		path := fmt.Sprintf("cors.origins[%d]", i)
		if o == "*" {
			if len(c.CORS.Origins) > 1 {
				bad(path, `"*" is combined with other values; want it alone, or only the others`)
			}
			continue
		}
		if o == "null" {
			bad(path, `"null" is the origin of every sandboxed page; want the origins of your pages, or * for all`)
			continue
		}
		u, err := url.Parse(o)
		switch {
		case err != nil || u.Scheme == "" || u.Host == "" || strings.ContainsAny(o, "* "):
			bad(path, "%s; want an origin as a browser sends it, https://app.example or http://localhost:3000, or * for all", quoted(o))
		case u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" || strings.ToLower(o) != o:
			bad(path, "%s; want only scheme, host and port, in lower case: %s://%s", quoted(o), strings.ToLower(u.Scheme), strings.ToLower(u.Host))
		case u.Scheme == "https" && u.Port() == "443" || u.Scheme == "http" && u.Port() == "80":
			bad(path, "%s; browsers omit the default port of the scheme; want %s://%s", quoted(o), u.Scheme, u.Hostname())
		}
	}
	for field, words := range map[string][]string{"methods": c.CORS.Methods, "headers": c.CORS.Headers} {
		for i, w := range words {
			if w == "" || strings.ContainsFunc(w, func(r rune) bool {
				return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("!#$%&'*+-.^_`|~", r))
			}) {
				bad(fmt.Sprintf("cors.%s[%d]", field, i), "%s is not a name; want a word such as POST or X-Request-Id", quoted(w))
			}
		}
	}
}

// checkMediaHosts requires hosts without scheme, port or path, because only the host of a URL is
// compared with them.
func (c *Config) checkMediaHosts(bad report) {
	for i, h := range c.MediaHosts {
		name := strings.TrimPrefix(h, "*.")
		_, err := netip.ParseAddr(name)
		if h == "*" || err == nil && name == h {
			continue
		}
		if name == "" || strings.ContainsFunc(name, func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '.' || r == '_')
		}) {
			bad(fmt.Sprintf("media_hosts[%d]", i), "%s; want a host name, *.example.com for all below it, an IP address, or * for any host, without scheme and port", quoted(h))
		}
	}
}
