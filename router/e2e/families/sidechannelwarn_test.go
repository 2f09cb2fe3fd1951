package families

import (
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestSideChannelWithoutEffectWarns: the log reports a side channel that has no effect, with what is
// missing and what to do.
func TestSideChannelWithoutEffectWarns(t *testing.T) {
	for _, c := range []struct {
		name, family, mode string
		want               []string
	}{
		{"no library", "nixl", "release", []string{"level=WARN", "transfers.side_channel: release has no effect", "/nonexistent/libnixl", "transfers.nixl_library", "sluice doctor"}},
		{"no library, renew", "nixl", "renew", []string{"level=WARN", "transfers.side_channel: renew has no effect", "/nonexistent/libnixl"}},
		{"no family", "sglang", "release", []string{"level=WARN", "transfers.side_channel: release has no effect", "pd.family: nixl"}},
		{"off", "nixl", "off", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.LaunchRouter(t, func(cfg *config.Config) {
				cfg.PD.Family, cfg.Transfers.SideChannel, cfg.Transfers.NIXLLibrary = c.family, c.mode, "/nonexistent/libnixl"
			}, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
			line := func() string {
				for l := range strings.Lines(r.Logs.String()) {
					if strings.Contains(l, "has no effect") {
						return l
					}
				}
				return ""
			}
			if c.want == nil {
				testwait.Holds(t, 200*time.Millisecond, "the log does not warn", func() bool { return line() == "" })
				return
			}
			testwait.UntilWithin(t, 10*time.Second, "the log warns", func() bool { return line() != "" })
			for _, want := range c.want {
				if !strings.Contains(line(), want) {
					t.Errorf("%q lacks %q", line(), want)
				}
			}
		})
	}
}
