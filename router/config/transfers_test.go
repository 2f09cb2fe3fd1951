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
		"ucx":  {func(t *Transfers, v string) { t.UCX = v }, (*Config).WantsUCX, "register.listen"},
		"zmq":  {func(t *Transfers, v string) { t.ZMQ = v }, func(c *Config) bool { return c.ReportEndpoint() != "" }, "register.listen"},
	}
	for name, tier := range tiers {
		for _, value := range []string{"auto", "on", "off"} {
			for _, family := range []string{"nixl", "sglang"} {
				for _, listens := range []bool{true, false} {
					c := Default()
					c.PD.Family = family
					if listens {
						c.Register.Listen, c.Register.Token = "127.0.0.1:8081", "0123456789abcdef"
					}
					tier.set(&c.Transfers, value)
					var problems []string
					c.checkTransfers(func(field, format string, args ...any) { problems = append(problems, field+": "+format) })
					all := strings.Join(problems, "; ")
					if value == "on" && !listens && tier.needs != "" {
						if len(problems) != 1 || !strings.HasPrefix(all, "transfers."+name+": on, and ") || !strings.Contains(all, tier.needs) {
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
