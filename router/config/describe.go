package config

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"

	"sluice/router/worker"
)

// Describe returns the text that `sluice check` prints: what a router with this configuration would
// do, followed by the warnings.
func (c *Config) Describe() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	transport := ""
	if c.TLS.Cert != "" {
		transport = " with TLS"
	}
	line("serves clients on %s%s", c.Listen, transport)
	switch {
	case c.Admin.Listen == "off":
		line("has no admin listener")
	case c.Admin.Token == "":
		line("serves the admin API on %s, with a random token", c.Admin.Listen)
	default:
		line("serves the admin API on %s, with the configured token", c.Admin.Listen)
	}
	c.describeEngineAPI(line)

	specs := c.Specs()
	line("\nworkers: %d", len(specs))
	for _, role := range []worker.Role{worker.Prefill, worker.Decode, worker.Aggregated} {
		for _, s := range specs {
			if s.Role == role {
				line("  %s", describeSpec(s))
			}
		}
	}

	c.describeSources(line)

	line("\nlegs (pd.family may be %s):", joinOr(Families()))
	c.describeLegs(line, "every model", &c.PD)
	for _, name := range slices.Sorted(maps.Keys(c.Models)) {
		if pd := c.Models[name].PD; pd != nil {
			c.describeLegs(line, "model "+quoted(name), pd)
		}
	}

	if m := c.Migration; m.MaxAttempts > 0 {
		line("\na stream whose engine fails continues on another, at most %s, if its token ids are known (migration.tokens %s)", english.Plural(m.MaxAttempts, "time", ""), m.Tokens)
	}
	t, h := c.Timeouts, c.Health
	line("\ntimeouts: prefill %s, decode %s, response head of a stream %s, between two reads of a stream %s, connect %s, wait for a worker %s, drain %s", t.Prefill, t.Decode, t.FirstByte, t.StreamIdle, t.Connect, t.PoolWait, t.Drain)
	line("health: a probe every %s, timeout %s, unhealthy after %s", h.Interval, h.Timeout, english.Plural(h.UnhealthyThreshold, "consecutive failure", ""))
	if h.MetricsInterval > 0 {
		line("load: /metrics of every engine every %s", h.MetricsInterval)
	} else {
		line("load: engines' /metrics are not read; only this router's own requests count")
	}
	c.describeTransfers(line)
	line("choice: %s; tokens: %s", c.Schedule.Policy, c.Tokens.Mode)
	line("limits: body %s, memory budget %s, head %s, %s connections, %s to one engine; index %s",
		humanize.IBytes(uint64(c.Limits.MaxBody)), humanize.IBytes(uint64(c.Limits.MemoryBudget)), humanize.IBytes(uint64(c.Limits.MaxHead)),
		humanize.Comma(int64(c.Limits.MaxConns)), humanize.Comma(int64(c.Limits.EngineConns)), humanize.IBytes(uint64(c.Index.MaxBytes)))
	if warnings := c.Warnings(); len(warnings) > 0 {
		line("\nwarnings:")
		for _, w := range warnings {
			line("  %s", w)
		}
	}
	return b.String()
}

// describeEngineAPI describes the listeners of the engine API and the credentials that their callers
// need.
func (c *Config) describeEngineAPI(line func(format string, args ...any)) {
	r := &c.EngineAPI
	callers := "no token"
	if r.Token != "" {
		callers = "the configured token"
	}
	if r.UnixSocket != "" {
		line("serves the engine API on %s (framed socket), with %s", r.UnixSocket, callers)
	}
	if r.TCP() {
		transports := "plain TCP"
		if r.TLSCert != "" {
			transports = "TLS"
		}
		line("serves the engine API on %s (framed socket, %s), with %s", r.Listen, transports, callers)
	}
	if r.HTTP {
		line("serves POST /v1/engine/generate")
	}
}

func describeSpec(s worker.Spec) string {
	parts := []string{fmt.Sprintf("%-10s %s at %s", s.Role, s.ID, s.URL)}
	if n := len(s.Ranks); n > 1 || n == 1 && s.Ranks[0] != 0 {
		how := "by header"
		if len(s.RankURLs) > 0 {
			how = "one URL each"
		}
		parts = append(parts, fmt.Sprintf("ranks %s (%s)", strings.Trim(fmt.Sprint(s.Ranks), "[]"), how))
	}
	if len(s.Models) > 0 {
		parts = append(parts, "models "+strings.Join(s.Models, ", "))
	} else {
		parts = append(parts, "models read from the engine")
	}
	if len(s.Labels) > 0 {
		parts = append(parts, "labels "+strings.Join(s.Labels, ", "))
	}
	switch s.KVEvents[0] {
	case "auto":
		parts = append(parts, "KV events at the endpoints that the engine reports")
	case "off":
		parts = append(parts, "no KV events")
	default:
		events := "KV events from " + strings.Join(s.KVEvents, ", ")
		if len(s.KVReplay) > 0 {
			events += " (replay " + strings.Join(s.KVReplay, ", ") + ")"
		} else {
			events += " (no replay)"
		}
		parts = append(parts, events)
	}
	if len(s.LoadEvents) > 0 {
		parts = append(parts, "load messages from "+strings.Join(s.LoadEvents, ", "))
	}
	return strings.Join(parts, "; ")
}

func (c *Config) describeLegs(line func(string, ...any), what string, pd *PD) {
	if pd.Family == "off" {
		line("  %s: one leg, on an aggregated worker, or on a decode worker if there is none", what)
		return
	}
	f := familyOf(pd.Family)
	line("  %s: %s (%s)", what, f.description, f.name)
	line("    at most %s for one request", english.Plural(pd.MaxAttempts, "pair", ""))
	if f.leased {
		line("    a handle is used for %s of its lease of %s, by at most %s", pd.Lease-pd.LeaseMargin, pd.Lease, english.Plural(pd.DecodeAttempts, "decode worker", ""))
	}
	switch {
	case f.name != "lmcache":
	case pd.CompletionTimeout == 0:
		line("    decode does not wait for LMCache's notifications (pd.completion_timeout 0)")
	default:
		line("    decode waits for LMCache's notifications, received at %s, for at most %s", c.LMCache.NotifyEndpoint(), min(pd.CompletionTimeout, pd.Lease-pd.LeaseMargin))
	}
	switch {
	case !f.decodeOnly:
		line("    without prefill: refused, because a decode worker cannot prefill")
	case pd.DecodeOnlyFallback:
		line("    without prefill, or without a handle that decode can use: decode only")
	default:
		line("    without prefill, or without a handle that decode can use: refused")
	}
	if pd.LocalPrefillTokens > 0 {
		line("    without prefill if a decode worker has fewer than %s to compute", english.Plural(pd.LocalPrefillTokens, "token", ""))
	}
	if pd.LocalWhenFaster {
		line("    without prefill if a decode worker is estimated to be faster alone")
	}
	if pd.PrefillByIDs == "verified" {
		line("    prompts are sent as token ids to engines that have confirmed the router's ids")
	}
	for _, l := range []struct {
		leg   string
		words []string
	}{{"prefill", pd.PrefillLabels}, {"decode", pd.DecodeLabels}} {
		if len(l.words) > 0 {
			line("    only %s workers with one of the labels %s", l.leg, strings.Join(l.words, ", "))
		}
	}
}

// Warnings lists settings that are allowed but probably not intended.
func (c *Config) Warnings() []string {
	var out []string
	var n [3]int
	for _, w := range c.Workers {
		n[w.Role]++
	}
	switch {
	case c.Dynamic(): // the other workers may have any role
	case len(c.Workers) == 0:
		out = append(out, "there is no worker: every request waits and then gets 503; add workers with --engine, --prefill and --decode, or under workers")
	case n[worker.Prefill] > 0 && n[worker.Decode]+n[worker.Aggregated] == 0:
		out = append(out, "there are prefill workers, but no decode or aggregated worker: every request gets 503")
	case n[worker.Prefill] > 0 && n[worker.Decode] > 0 && n[worker.Aggregated] > 0:
		out = append(out, "there are prefill, decode and aggregated workers: for a model that all three serve, the aggregated ones get only requests that generate no text, such as embeddings")
	case n[worker.Prefill] == 0 && c.PD.Family != "off":
		out = append(out, fmt.Sprintf("pd.family is %s, but there is no prefill worker: every request takes one leg", c.PD.Family))
	}
	pds := map[string]*PD{"pd": &c.PD}
	for name, m := range c.Models {
		if m.PD != nil {
			pds["models."+name+".pd"] = m.PD
		}
	}
	for _, path := range slices.Sorted(maps.Keys(pds)) {
		out = append(out, c.missingLabels(path+".prefill_labels", worker.Prefill, pds[path].PrefillLabels)...)
		out = append(out, c.missingLabels(path+".decode_labels", worker.Decode, pds[path].DecodeLabels)...)
	}
	if ip, _, _ := net.SplitHostPort(c.Listen); (ip == "" || ip == "0.0.0.0" || ip == "::") && len(c.APIKeys) == 0 && c.TLS.ClientCA == "" {
		out = append(out, "listen accepts clients from every network of this machine, without authentication")
	}
	if why := c.SideChannelUnused(); why != "" {
		out = append(out, why)
	}
	if why := c.Admission.preemptionUnused(); why != "" {
		out = append(out, why)
	}
	return slices.Concat(out, c.openSockets(), c.warnSharedEndpoints(), c.inputWarnings)
}

func (c *Config) missingLabels(path string, role worker.Role, labels []string) []string {
	if c.Dynamic() {
		return nil
	}
	for _, w := range c.Workers {
		if w.Role == role && slices.ContainsFunc(labels, func(l string) bool { return slices.Contains(w.Labels, l) }) {
			return nil
		}
	}
	if len(labels) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s selects %s, but no %s worker has one of these labels", path, strings.Join(labels, ", "), role)}
}
