package config

import (
	"strings"
	"testing"
)

// The three tiers take auto, on and off alike: off is off, on asks for what it needs
// and names it, auto is on where something could come by it.
func TestTransferTiers(t *testing.T) {
	tiers := map[string]struct {
		set   func(*Transfers, string)
		wants func(*Config) bool
		needs string // of on; "" nothing
	}{
		"nixl": {func(t *Transfers, v string) { t.NIXL = v }, (*Config).WantsNIXL, ""},
		"ucx":  {func(t *Transfers, v string) { t.UCX = v }, (*Config).WantsUCX, "registration.listen"},
		"zmq":  {func(t *Transfers, v string) { t.ZMQ = v }, func(c *Config) bool { return c.ReportEndpoint() != "" }, "registration.listen"},
	}
	for name, tier := range tiers {
		for _, value := range []string{"auto", "on", "off"} {
			for _, family := range []string{"nixl", "sglang"} {
				for _, listens := range []bool{true, false} {
					c := Default()
					c.PD.Family = family
					if listens {
						c.Registration.Listen, c.Registration.Token = "127.0.0.1:8081", "0123456789abcdef"
					}
					tier.set(&c.Transfers, value)
					var problems []string
					c.checkTransfers(func(field, format string, args ...any) { problems = append(problems, field+": "+format) })
					all := strings.Join(problems, "; ")
					if value == "on" && !listens && tier.needs != "" {
						if len(problems) != 1 || !strings.HasPrefix(all, "transfers."+name+": on, but ") || !strings.Contains(all, tier.needs) {
							t.Errorf("%s on without a listener: %q", name, all)
						}
						continue
					}
					want := value == "on" || value == "auto" && family == "nixl" && listens
					if got := tier.wants(c); got != want || all != "" {
						t.Errorf("%s %s, family %s, register %v: %v, want %v; problems %q", name, value, family, listens, got, want, all)
					}
				}
			}
		}
	}
	c := Default()
	c.Transfers.ZMQ, c.Transfers.ZMQListen = "on", "tcp://10.0.0.1:8091"
	c.checkTransfers(func(field, format string, args ...any) { t.Errorf("%s: "+format, append([]any{field}, args...)...) })
	if e := c.ReportEndpoint(); e != "tcp://10.0.0.1:8091" {
		t.Errorf("reports are taken at %q", e)
	}
}

// A ZMQ socket that takes any host is warned of, with the field and what to set; one that
// is held to networks, or that only this machine reaches, is not.
func TestOpenSocketsWarn(t *testing.T) {
	const lmcache = "workers: [{url: 'http://h:1', role: decode, options: {init_port: ['1'], alloc_port: ['2']}}]\npd: {family: lmcache}\n"
	for text, want := range map[string]string{
		"transfers: {zmq_listen: 'tcp://10.0.0.1:8091'}":                                                             "transfers.zmq_networks",
		"transfers: {zmq_listen: 'tcp://*:8091'}":                                                                    "transfers.zmq_networks",
		"transfers: {zmq_listen: 'tcp://[fd00::1]:8091'}":                                                            "transfers.zmq_networks",
		"transfers: {zmq_listen: 'tcp://127.0.0.1:8091'}":                                                            "",
		"transfers: {zmq_listen: 'tcp://[::1]:8091'}":                                                                "",
		"transfers: {zmq_listen: 'tcp://10.0.0.1:8091', zmq_networks: [10.0.0.0/16]}":                                "",
		"transfers: {zmq_listen: 'tcp://*:8091'}\nregistration: {listen: '127.0.0.1:8081', token: 0123456789abcdef}": "",
		lmcache + "lmcache: {proxy_host: 0.0.0.0}":                                                                   "lmcache.networks",
		lmcache + "lmcache: {proxy_host: 0.0.0.0, networks: [10.0.0.0/16]}":                                          "",
		lmcache:                          "",
		"lmcache: {proxy_host: 0.0.0.0}": "", // no model is of that family
	} {
		got := ""
		for _, w := range mustParseText(t, "listen: 127.0.0.1:8080\n"+text).Warnings() {
			if strings.Contains(w, "from any host") {
				got += w
			}
		}
		if (got == "") != (want == "") || !strings.Contains(got, "set "+want) && want != "" {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	_, err := Parse("t.yaml", []byte("transfers: {zmq_networks: [10.0.0.1]}\nlmcache: {networks: [here]}"))
	for _, want := range []string{`transfers.zmq_networks[0]: "10.0.0.1" is not a network; want a CIDR`, `lmcache.networks[0]: "here" is not a network`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

func TestDescribeTransfers(t *testing.T) {
	const pair = "workers: [{url: 'http://p:1', role: prefill}, {url: 'http://d:1', role: decode}]\n"
	const on = "registration: {listen: '127.0.0.1:81', token: planted-secret-planted}\n"
	for text, want := range map[string]string{
		pair + on: "reported by NIXL, by an agent of its own, UCX, ZMQ at tcp://127.0.0.1:*, each",
		pair + "transfers: {zmq_listen: 'tcp://127.0.0.1:82'}":                                                             "reported by ZMQ at tcp://127.0.0.1:82, each",
		pair + "pd: {family: lmcache, lease: 12s}\nlmcache: {peer_init_port: [7300], peer_alloc_port: [7400]}":             "LMCache's notifications, received at tcp://127.0.0.1:8500, for at most 5s\n",
		pair + "pd: {family: lmcache, lease: 7s}\nlmcache: {peer_init_port: [7300], peer_alloc_port: [7400]}":              "for at most 4s\n",
		pair + "pd: {family: lmcache, completion_timeout: 0s}\nlmcache: {peer_init_port: [7300], peer_alloc_port: [7400]}": "does not wait for LMCache's notifications",
	} {
		if got := mustParseText(t, text).Describe(); !strings.Contains(got, want) || strings.Contains(got, "planted-secret") {
			t.Errorf("%s: want %q in\n%s", text, want, got)
		}
	}
	if got := mustParseText(t, pair).Describe(); strings.Contains(got, "KV transfers:") {
		t.Errorf("described notifications without a tier:\n%s", got)
	}
}
