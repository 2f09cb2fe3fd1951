package config

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// HandsOverByNIXL reports whether any model's KV is transferred by one of vLLM's NIXL connectors.
func (c *Config) HandsOverByNIXL() bool { return c.UsesFamily("nixl") || c.UsesFamily("nixl-push") }

// WantsNIXL reports whether the router starts its own NIXL agent.
func (c *Config) WantsNIXL() bool {
	switch t := &c.Transfers; t.NIXL {
	case "on":
		return true
	case "off":
		return false
	default:
		return c.HandsOverByNIXL() && (c.Registration.On() || t.SideChannel != "" && t.SideChannel != "off")
	}
}

// UsesSideChannel reports whether the router sends messages to the side channels of prefill engines.
func (c *Config) UsesSideChannel() bool {
	return c.Transfers.SideChannel == "renew" || c.Transfers.SideChannel == "release"
}

// SideChannelUnused returns the reason why transfers.side_channel has no effect in this configuration,
// or "" if it has one or is off.
func (c *Config) SideChannelUnused() string {
	if !c.UsesSideChannel() || c.UsesFamily("nixl") {
		return ""
	}
	return fmt.Sprintf("transfers.side_channel: %s has no effect: it frees and renews blocks of pd.family nixl alone, which no model uses; set pd.family: nixl, or side_channel: off", c.Transfers.SideChannel)
}

// WantsUCX reports whether the router receives UCX active messages.
func (c *Config) WantsUCX() bool {
	return c.Transfers.UCX == "on" || c.Transfers.UCX == "auto" && c.HandsOverByNIXL() && c.Registration.On()
}

// ReportEndpoint returns the ZMQ endpoint to bind for the connector's reports, or "" if there is none.
func (c *Config) ReportEndpoint() string {
	t := &c.Transfers
	switch {
	case t.ZMQ == "off":
		return ""
	case t.ZMQListen != "":
		return t.ZMQListen
	case !c.Registration.On() || t.ZMQ != "on" && !c.HandsOverByNIXL():
		return ""
	}
	host, _, err := net.SplitHostPort(c.Registration.Listen)
	if err != nil {
		return ""
	}
	if host == "" {
		host = "*"
	}
	return "tcp://" + net.JoinHostPort(host, "*")
}

// describeTransfers describes how the router learns that a KV transfer has ended.
func (c *Config) describeTransfers(line func(string, ...any)) {
	var by []string
	if c.WantsNIXL() {
		by = append(by, "NIXL, by an agent of its own")
	}
	if c.WantsUCX() {
		by = append(by, "UCX")
	}
	if at := c.ReportEndpoint(); at != "" {
		by = append(by, "ZMQ at "+at)
	}
	if len(by) > 0 {
		line("KV transfers: reported by %s, each where it works (see sluice doctor), and by the engines' responses", strings.Join(by, ", "))
	}
}

// openSockets returns a warning for each ZMQ socket that accepts messages from any host.
func (c *Config) openSockets() (out []string) {
	if t := &c.Transfers; t.ZMQ != "off" && t.ZMQListen != "" && !c.Registration.On() && len(t.ZMQNetworks) == 0 && !onLoopback(t.ZMQListen) {
		out = append(out, fmt.Sprintf("transfers.zmq_listen, %s, accepts reports of transfers from any host that reaches it, because registration.networks is empty; set transfers.zmq_networks to the engines' CIDRs, such as 10.0.0.0/16", quoted(t.ZMQListen)))
	}
	if l := &c.LMCache; c.UsesFamily("lmcache") && len(l.Networks) == 0 && !onLoopback(l.NotifyEndpoint()) {
		out = append(out, fmt.Sprintf("lmcache.proxy_host, %s, accepts LMCache's notifications from any host that reaches it; set lmcache.networks to the prefill workers' CIDRs, such as 10.0.0.0/16", quoted(l.ProxyHost)))
	}
	return out
}

// onLoopback reports whether an endpoint can be reached only from this machine.
func onLoopback(endpoint string) bool {
	host, _, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	ip, bad := netip.ParseAddr(host)
	return err == nil && (host == "localhost" || bad == nil && ip.IsLoopback())
}

func (c *Config) checkTransfers(bad report) {
	t := &c.Transfers
	if n := t.CompletionSlots; n%64 != 0 {
		bad("transfers.completion_slots", "%d; want a multiple of 64", n)
	}
	if addr := t.ZMQListen; addr != "" {
		rest, ok := strings.CutPrefix(addr, "tcp://")
		host, port, err := net.SplitHostPort(rest)
		if !ok || err != nil || host == "" || port == "" || strings.Trim(port, "0123456789") != "" && port != "*" {
			bad("transfers.zmq_listen", "%s; want tcp://HOST:PORT with an address of this machine, such as tcp://10.0.0.1:8091", quoted(addr))
		}
		if t.ZMQ == "off" {
			bad("transfers.zmq", "off, but transfers.zmq_listen is %s; want one of them changed", quoted(addr))
		}
	}
	checkNetworks(bad, "transfers.zmq_networks", t.ZMQNetworks)
	if t.ZMQ == "on" && t.ZMQListen == "" && !c.Registration.On() {
		bad("transfers.zmq", "on, but neither transfers.zmq_listen nor registration.listen is set, so the socket has no address; want one of them set")
	}
	if t.UCX == "on" && !c.Registration.On() {
		bad("transfers.ucx", "on, but registration.listen is off, so connectors cannot learn the address; want registration.listen set")
	}
	for i, d := range t.UCXDevices {
		if d == "" || strings.ContainsAny(d, ", \t") {
			bad("transfers.ucx_devices["+strconv.Itoa(i)+"]", "%s; want the name of a network device, such as eth0", quoted(d))
		}
	}
	if r := t.UCXPorts; r != "" {
		from, to, _ := strings.Cut(r, "-")
		a, errA := strconv.ParseUint(from, 10, 16)
		b, errB := strconv.ParseUint(to, 10, 16)
		if errA != nil || errB != nil || a == 0 || a > b {
			bad("transfers.ucx_ports", "%s; want FROM-TO, such as 8095-8099", quoted(r))
		}
	}
	if c.UsesSideChannel() && t.NIXL == "off" {
		bad("transfers.side_channel", "%s, which requires NIXL, but transfers.nixl is off; want transfers.nixl auto or on", t.SideChannel)
	}
	for i := range c.Workers {
		for _, v := range c.Workers[i].Options["connector"] {
			if v != "true" && v != "false" {
				bad("workers["+strconv.Itoa(i)+"].options.connector", "%s; want true or false", quoted(v))
			}
		}
	}
}
