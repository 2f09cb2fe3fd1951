package config

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// warnSharedEndpoints warns of endpoints that two ranks, or events and replays, share, because
// the blocks of each rank would be credited to the other too. It also warns of sockets for
// engines that connect, if any peer can connect to them.
func (c *Config) warnSharedEndpoints() (out []string) {
	type user struct{ worker, field int }
	users := make(map[string]user)
	names := [...]string{"kv_events", "kv_replay"}
	for i := range c.Workers {
		w := &c.Workers[i]
		for field, list := range [...][]string{w.KVEvents, w.KVReplay} {
			warned := false
			for k := range max(len(w.Ranks), 1) {
				ep := w.endpointOf(list, k)
				if ep == "" {
					continue
				}
				me := user{i, field}
				old, exists := users[ep]
				if !exists {
					users[ep] = me
				} else if old != me && !warned {
					warned = true
					out = append(out, fmt.Sprintf("workers[%d].%s: %s is also in workers[%d].%s; rank r is at port + r of each, and no two may meet", i, names[field], ep, old.worker, names[old.field]))
				}
			}
		}
		for _, ep := range w.KVEvents {
			if at, bind := strings.CutPrefix(ep, "bind:"); bind && strings.HasPrefix(at, "tcp://") && !onLoopback(at) {
				out = append(out, fmt.Sprintf("workers[%d].kv_events, %s, trusts every peer that connects to it; make sure that only the engine can connect", i, quoted(ep)))
				break
			}
		}
	}
	return out
}

// endpointOf returns the endpoint of the worker's rank with index k from a list of endpoints, or "" if
// the list does not determine it (auto, off, or too short).
func (w *Worker) endpointOf(list []string, k int) string {
	if len(list) == 0 || list[0] == "auto" || list[0] == "off" {
		return ""
	}
	if len(list) > 1 {
		if k >= len(list) {
			return ""
		}
		return w.onHost(list[k], 0)
	}
	rank := 0
	if k < len(w.Ranks) {
		rank = int(w.Ranks[k])
	}
	return w.onHost(list[0], rank)
}

// onHost adds up to the endpoint's port and replaces a wildcard host by the worker's.
func (w *Worker) onHost(ep string, up int) string {
	addr, ok := strings.CutPrefix(ep, "tcp://")
	host, port, err := net.SplitHostPort(addr)
	if !ok || err != nil {
		if bound, bind := strings.CutPrefix(ep, "bind:tcp://"); bind { // hosts of this machine
			if _, port, err := net.SplitHostPort(bound); err == nil {
				return "bind:" + moved(port, up)
			}
		}
		return ep
	}
	if u, err := url.Parse(w.URL); err == nil && (host == "*" || host == "0.0.0.0" || host == "::") {
		host = u.Hostname()
	}
	return "tcp://" + net.JoinHostPort(host, moved(port, up))
}

func moved(port string, up int) string {
	n, err := strconv.Atoi(port)
	if err != nil {
		return port
	}
	return strconv.Itoa(n + up)
}
