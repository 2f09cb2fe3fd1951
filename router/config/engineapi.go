package config

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Socket reports whether the framed socket is enabled, on a Unix path or a TCP address.
func (r *EngineAPI) Socket() bool { return r.UnixSocket != "" || r.TCP() }

// TCP reports whether the framed socket is enabled on a TCP address.
func (r *EngineAPI) TCP() bool { return r.Listen != "" && r.Listen != "off" }

// On reports whether the engine API is enabled, over HTTP or the framed socket.
func (r *EngineAPI) On() bool { return r.HTTP || r.Socket() }

func (c *Config) checkEngineAPI(bad report) {
	r := &c.EngineAPI
	if t := r.Token; t != "" && (len(t) < minToken || strings.ContainsFunc(t, func(x rune) bool { return x <= ' ' || x > '~' })) {
		bad("engine_api.token", "a token of %d bytes; want at least %d visible ASCII characters without spaces", len(t), minToken)
	}
	if (r.TLSCert == "") != (r.TLSKey == "") {
		bad("engine_api.tls_cert", "requires engine_api.tls_key, and the reverse; want both or neither")
	}
	if len(r.UnixSocket) > maxSocketPath {
		bad("engine_api.unix_socket", "a path of %d bytes; want at most %d, the limit of the operating system", len(r.UnixSocket), maxSocketPath)
	}
	if r.Socket() && r.MaxFrame > c.Limits.MemoryBudget/4 {
		bad("engine_api.max_frame", "%d bytes is more than a quarter of limits.memory_budget (%d); want at most %d", r.MaxFrame, c.Limits.MemoryBudget, c.Limits.MemoryBudget/4)
	}
	for i, h := range r.AllowedHosts {
		_, notNet := netip.ParsePrefix(h)
		_, notAddr := netip.ParseAddr(h)
		if notNet != nil && notAddr != nil && (h == "" || strings.ContainsAny(h, "/:* ")) {
			bad(fmt.Sprintf("engine_api.allowed_hosts[%d]", i), "%s; want a network such as 10.0.0.0/8, an address or a name", quoted(h))
		}
	}
	if !r.TCP() {
		return
	}
	if err := checkAddr(r.Listen); err != nil {
		bad("engine_api.listen", `%s: %v; want HOST:PORT, such as 10.0.0.1:8082, or "off"`, quoted(r.Listen), err)
		return
	}
	host, port, _ := net.SplitHostPort(r.Listen)
	if port != "0" && (r.Listen == c.Listen || r.Listen == c.Admin.Listen || r.Listen == c.Registration.Listen) {
		bad("engine_api.listen", "%s is the address of another listener; want a different address", quoted(r.Listen))
	}
	if ip, err := netip.ParseAddr(host); r.Token == "" && host != "localhost" && (err != nil || !ip.IsLoopback()) {
		bad("engine_api.token", "is missing, and engine_api.listen (%s) is not a loopback address, so anyone on the network could use the engines; want a token, for example in $SLUICE_ENGINE_API_TOKEN", quoted(r.Listen))
	}
}

// maxSocketPath is the longest path that fits into Linux's sockaddr_un, without the terminating zero
// byte.
const maxSocketPath = 107
