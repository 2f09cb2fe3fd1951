package config

import (
	"fmt"
	"maps"
	"net"
	"strconv"

	"sluice/router/worker"
)

// UsesFamily reports whether pd.family, or that of any model, is name.
func (c *Config) UsesFamily(name string) bool {
	if c.PD.Family == name {
		return true
	}
	for _, m := range c.Models {
		if m.PD != nil && m.PD.Family == name {
			return true
		}
	}
	return false
}

// NotifyEndpoint returns the ZMQ endpoint to bind for LMCache's notifications.
func (l *LMCache) NotifyEndpoint() string {
	port := strconv.Itoa(l.ProxyPort)
	if l.ProxyPort == 0 {
		port = "*"
	}
	return "tcp://" + net.JoinHostPort(l.ProxyHost, port)
}

// withPeer returns the options of a worker. Those of a decode worker include the common LMCache ports
// and host, unless the worker sets its own.
func (c *Config) withPeer(w *Worker) map[string][]string {
	l := &c.LMCache
	if w.Role == worker.Prefill {
		return w.Options
	}
	own := w.Options
	add := func(key string, values ...string) {
		if len(values) == 0 || values[0] == "" || len(own[key]) > 0 {
			return
		}
		if own = maps.Clone(own); own == nil {
			own = map[string][]string{}
		}
		own[key] = values
	}
	add("init_port", l.PeerInitPort...)
	add("alloc_port", l.PeerAllocPort...)
	add("peer_host", l.PeerHost)
	return own
}

func (c *Config) checkLMCache(bad report) {
	for _, list := range []struct {
		path  string
		ports []string
	}{{"lmcache.peer_init_port", c.LMCache.PeerInitPort}, {"lmcache.peer_alloc_port", c.LMCache.PeerAllocPort}} {
		for _, v := range list.ports {
			if n, err := strconv.ParseUint(v, 10, 16); err != nil || n == 0 {
				bad(list.path, "%s is not a port; want 1 to 65535", quoted(v))
			}
		}
	}
	checkNetworks(bad, "lmcache.networks", c.LMCache.Networks)
	if !c.UsesFamily("lmcache") {
		return
	}
	if err := checkAddr(net.JoinHostPort(c.LMCache.ProxyHost, strconv.Itoa(c.LMCache.ProxyPort))); err != nil || c.LMCache.ProxyHost == "" {
		bad("lmcache.proxy_host", "%s is not a host; want an address of this machine, such as 10.0.0.1 or 0.0.0.0", quoted(c.LMCache.ProxyHost))
	}
	for i := range c.Workers {
		w := &c.Workers[i]
		if w.Role != worker.Decode {
			continue
		}
		path, o := fmt.Sprintf("workers[%d].options", i), c.withPeer(w)
		init, alloc := len(o["init_port"]), len(o["alloc_port"])
		if init == 0 || init != alloc {
			bad(path, "family lmcache writes to %s at %d init ports and %d alloc ports; want one of each per tensor-parallel rank, such as init_port=7300,alloc_port=7400 or by --nixl-peer-init-port and --nixl-peer-alloc-port",
				quoted(w.URL), init, alloc)
		}
	}
}
