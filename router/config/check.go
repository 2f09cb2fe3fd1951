package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"sluice/router/worker"
)

// Validate fills the defaults that depend on other fields and checks the whole configuration. It is
// for a Config that was built in code: Load and Resolve have already checked theirs. The error is of
// type Errors.
func (c *Config) Validate() error {
	if c.origins == nil {
		c.origins = map[string]origin{}
	}
	var f errorList
	c.fillDefaults()
	c.check(&f)
	return f.err()
}

// Place returns where the value of a field was set: FILE:LINE:COLUMN, a flag or an environment
// variable, or "" if the field has its default. For a field without a recorded place it returns that
// of the enclosing group.
func (c *Config) Place(path string) string { return c.originOf(path).String() }

// originOf returns the origin of a field, or of the nearest enclosing group that has one.
func (c *Config) originOf(path string) origin {
	for path != "" {
		if o, ok := c.origins[path]; ok {
			return o
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
	return origin{}
}

// fillDefaults sets the fields whose defaults depend on other fields.
func (c *Config) fillDefaults() {
	prefill := false
	for i := range c.Workers {
		w := &c.Workers[i]
		prefill = prefill || w.Role == worker.Prefill
		w.URL = strings.TrimRight(w.URL, "/")
		for j := range w.RankURLs {
			w.RankURLs[j] = strings.TrimRight(w.RankURLs[j], "/")
		}
		if n := len(w.RankURLs); n > 0 && n <= worker.MaxSlots {
			if w.URL == "" {
				w.URL = w.RankURLs[0]
			}
			if len(w.Ranks) == 0 {
				w.Ranks, _ = parseRanks(strconv.Itoa(n))
			}
		}
	}
	prefill = prefill || c.Dynamic()
	for i := range c.Discovery.DNS {
		c.Discovery.DNS[i].fillDefaults()
	}
	if _, given := c.origins["pd.family"]; !given && (c.PD.Family == "" || c.PD.Family == "off") {
		c.PD.Family = "off"
		if prefill {
			c.PD.Family = "nixl"
		}
	}
	// A model's pd has only the fields that it overrides; the others are copied from pd.
	common := reflect.ValueOf(c.PD)
	for name, m := range c.Models {
		if m.PD == nil {
			continue
		}
		pd := reflect.ValueOf(m.PD).Elem()
		_, parsed := c.origins["models."+name]
		for _, f := range fieldsOf(pd.Type()) {
			if _, given := c.origins["models."+name+".pd."+f.Tag.Get("yaml")]; !given && (parsed || pd.FieldByIndex(f.Index).IsZero()) {
				pd.FieldByIndex(f.Index).Set(common.FieldByIndex(f.Index))
			}
		}
	}
}

// isJSONObject reports whether text is a JSON object.
func isJSONObject(text []byte) bool {
	var members map[string]json.RawMessage
	return json.Unmarshal(text, &members) == nil && members != nil
}

// check adds an error for each rule that concerns several fields, and for each rule of one field that
// its tags cannot express.
func (c *Config) check(f *errorList) {
	bad := func(path, format string, args ...any) {
		at := c.originOf(path)
		if !slices.ContainsFunc(f.list, func(e *Error) bool { return e.Field == path && path != "" }) {
			f.add(at, path, format, args...)
		}
	}
	c.checkListeners(bad)
	c.checkPD(bad, "pd", &c.PD)
	for _, name := range slices.Sorted(maps.Keys(c.Models)) {
		m := c.Models[name]
		if m.PD != nil {
			c.checkPD(bad, "models."+name+".pd", m.PD)
		}
		if kwargs := m.ChatTemplateKwargs; kwargs != "" && !isJSONObject([]byte(kwargs)) {
			bad("models."+name+".chat_template_kwargs", `want a JSON object such as {"enable_thinking": false}`)
		}
	}
	c.checkWorkers(bad)
	checkHealthPath(bad, "health.path", c.Health.Path)
	c.checkLMCache(bad)
	c.checkTransfers(bad)
	for i, p := range c.Steering.Pinning {
		if _, err := netip.ParsePrefix(p); err != nil && p != "any" && p != "unix" && p != "off" || p == "off" && len(c.Steering.Pinning) > 1 {
			bad(fmt.Sprintf("steering.pinning[%d]", i), `%s; want networks such as 10.0.0.0/8, "unix", "any", or "off" alone`, quoted(p))
		}
	}
	for i, word := range c.Migration.Allow {
		if at := fmt.Sprintf("migration.allow[%d]", i); word == "many_choices" {
			c.inputWarnings = append(c.inputWarnings, renamedWarning(at, word, "multiple_choices"))
			c.Migration.Allow[i] = "multiple_choices"
			continue
		}
		if !slices.Contains(MigrationAllow, word) {
			hint := ""
			switch word {
			case "n":
				hint = " (n over 1 is multiple_choices)"
			case "structured":
				hint = " (a grammar's rest has a field of its own, migration.structured)"
			case "tools", "reasoning", "media", "processors", "prompt", "prompt_logprobs", "echo", "batch_prompt", "beam_search":
				hint = " (such a stream cannot move)"
			}
			bad(fmt.Sprintf("migration.allow[%d]", i), "%s; want one of %s%s", quoted(word), strings.Join(MigrationAllow, ", "), hint)
		}
	}
	c.checkAdmission(bad)
	c.checkRequestLog(bad)
	c.checkKeys(bad)
	c.checkTLS(bad)
	c.checkProxies(bad)
	c.checkCORS(bad)
	c.checkMediaHosts(bad)
	c.checkDiscovery(bad)
	c.checkRegister(bad)
	c.checkEngineAPI(bad)
	// Each comment costs a write to the client and the wake-up of a timer.
	if k := c.Relay.CommentInterval; k > 0 && k < minComments {
		bad("relay.comment_interval", "%v; want %v or more, or 0", k, minComments)
	}
	// The buffer of a body takes up to twice its size while it grows, and a single body must not
	// use most of the budget of all.
	if c.Limits.MaxBody > c.Limits.MemoryBudget/4 {
		bad("limits.max_body", "%d bytes is more than a quarter of limits.memory_budget (%d); want at most %d", c.Limits.MaxBody, c.Limits.MemoryBudget, c.Limits.MemoryBudget/4)
	}
}

// minComments is the shortest interval between two comments to a client.
const minComments = 10 * time.Millisecond

// minToken is the minimum length of the admin token in bytes; the admin server has the same minimum.
const minToken = 16

type report func(path, format string, args ...any)

func (c *Config) checkListeners(bad report) {
	if err := checkAddr(c.Listen); err != nil {
		bad("listen", "%s: %v; want HOST:PORT, such as 127.0.0.1:8080 or :8080", quoted(c.Listen), err)
	}
	admin := c.Admin.Listen
	if admin == "off" {
		return
	}
	if t := c.Admin.Token; t != "" && (len(t) < minToken || strings.ContainsFunc(t, func(r rune) bool { return r <= ' ' || r > '~' })) {
		bad("admin.token", "a token of %d bytes; want at least %d visible ASCII characters without spaces, or none for a random one", len(t), minToken)
	}
	if err := checkAddr(admin); err != nil {
		bad("admin.listen", `%s: %v; want HOST:PORT on a loopback address, such as 127.0.0.1:9901, or "off"`, quoted(admin), err)
		return
	}
	host, port, _ := net.SplitHostPort(admin)
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		bad("admin.listen", `%s is not a loopback address, and the admin API must not be reachable from the network; want 127.0.0.1:%s, [::1]:%s, localhost:%s or "off"`, quoted(admin), port, port, port)
	}
	if admin == c.Listen && port != "0" {
		path := "admin.listen"
		if _, given := c.origins[path]; !given {
			path = "listen"
		}
		bad(path, "%s is the address of both listen and admin.listen; want different ports", quoted(admin))
	}
}

func checkAddr(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("not an address with a port")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("port %s is not from 0 to 65535", quoted(port))
	}
	if strings.ContainsAny(host, " /@") {
		return fmt.Errorf("%s is not a host", quoted(host))
	}
	return nil
}

func (c *Config) checkPD(bad report, path string, pd *PD) {
	families := Families()
	switch {
	case slices.Contains(families, pd.Family):
	default:
		bad(path+".family", "%s is not known%s; want %s", quoted(pd.Family), suggestion(pd.Family, families), joinOr(families))
	}
	inherited := path != "pd" && pd.Lease == c.PD.Lease && pd.LeaseMargin == c.PD.LeaseMargin
	if pd.LeaseMargin >= pd.Lease && !inherited {
		bad(path+".lease_margin", "%q is not less than pd.lease (%q), so no decode request could be sent; want less than that", pd.LeaseMargin, pd.Lease)
	}
	if f := familyOf(pd.Family); slices.Contains(families, pd.Family) && !f.decodeOnly {
		const why = "a decode worker of family %s cannot prefill; want %s, or another family"
		if pd.LocalPrefillTokens > 0 && (path == "pd" || pd.LocalPrefillTokens != c.PD.LocalPrefillTokens) {
			bad(path+".local_prefill_tokens", why, quoted(pd.Family), "0")
		}
		if pd.LocalWhenFaster && (path == "pd" || !c.PD.LocalWhenFaster) {
			bad(path+".local_when_faster", why, quoted(pd.Family), "false")
		}
	}
	if path == "pd" && pd.Family == "off" {
		for i, w := range c.Workers {
			if w.Role == worker.Prefill {
				bad("pd.family", `"off", but workers[%d], %s, is a prefill worker, which would get no requests; want %s, or the role decode or aggregated for this worker`, i, quoted(w.URL), joinOr(Families()[:len(familyTable)-1]))
				break
			}
		}
	}
}

// checkHealthPath checks the path of health probes. "" means that none is configured.
func checkHealthPath(bad report, field, path string) {
	visible := !strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r > '~' })
	if path != "" && (path[0] != '/' || !visible || strings.Contains(path, "#") || len(path) > maxHealthPath) {
		bad(field, "%s; want a path of at most %d visible ASCII characters that begins with /, such as /healthz, or empty to try the usual paths", quoted(path), maxHealthPath)
	}
}

const maxHealthPath = 256

func (c *Config) checkWorkers(bad report) {
	ids, urls, ranks := map[string]int{}, map[string]int{}, 0
	for i := range c.Workers {
		w := &c.Workers[i]
		path := fmt.Sprintf("workers[%d]", i)
		if w.ID != "" {
			if !idForm.MatchString(w.ID) {
				bad(path+".id", "%s is not an id; want at most 128 letters, digits or any of . _ : @ -, and no - at the beginning", quoted(w.ID))
			} else if first, twice := ids[w.ID]; twice {
				bad(path+".id", "%s is already the id of workers[%d]; want a unique id", quoted(w.ID), first)
			}
			ids[w.ID] = i
		}
		if w.StartRank < 0 || w.StartRank > 65535 {
			bad(path+".start_rank", "%d; want from 0 to 65535", w.StartRank)
		}
		own := map[string]bool{}
		checkURL := func(path, raw string) {
			key, err := engineURL(raw)
			if err != nil {
				bad(path, "%s: %v; want http://HOST:PORT or https://HOST:PORT, with an optional path", quoted(raw), err)
				return
			}
			if first, twice := urls[key]; twice && first != i {
				bad(path, "%s is already the URL of workers[%d]; want one worker with ranks for the data-parallel ranks of a server", quoted(raw), first)
			}
			urls[key] = i
			own[key] = true
		}
		checkURL(path+".url", w.URL)
		for j, u := range w.RankURLs {
			checkURL(fmt.Sprintf("%s.rank_urls[%d]", path, j), u)
		}
		if distinct := len(own); len(w.RankURLs) > 1 && distinct < len(w.RankURLs) {
			bad(path+".rank_urls", "a URL is listed twice; want one server for each rank")
		}
		c.checkRanks(bad, path, w)
		c.checkEvents(bad, path, w)
		checkNames(bad, path, w)
		ranks += max(len(w.Ranks), 1)
	}
	if ranks > worker.MaxSlots {
		bad("workers", "%d ranks in all; want at most %d", ranks, worker.MaxSlots)
	}
}

// idForm is the form of ids. Commands take an argument that begins with - for a flag.
var idForm = regexp.MustCompile(`^[A-Za-z0-9._:@][A-Za-z0-9._:@-]{0,127}$`)

// maxURL bounds the URL of an engine, in bytes. It is in log lines and in every list of workers.
const maxURL = 2048

// engineURL checks the URL of an engine and returns it in a canonical form, so that two URLs of one
// server compare equal.
func engineURL(raw string) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case raw == "":
		return "", fmt.Errorf("is missing")
	case len(raw) > maxURL:
		return "", fmt.Errorf("it has %d bytes, more than %d", len(raw), maxURL)
	case err != nil:
		return "", fmt.Errorf("not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("its scheme is not http or https")
	case u.Hostname() == "":
		return "", fmt.Errorf("it has no host")
	case u.User != nil:
		return "", fmt.Errorf("it contains a user name or password")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(raw, "#"):
		return "", fmt.Errorf("it contains a query or fragment")
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("port %s is not from 1 to 65535", quoted(port))
	}
	return u.Scheme + "://" + strings.ToLower(u.Hostname()) + ":" + port + u.EscapedPath(), nil
}

func (c *Config) checkRanks(bad report, path string, w *Worker) {
	seen := map[uint16]bool{}
	for j, r := range w.Ranks {
		if seen[r] {
			bad(fmt.Sprintf("%s.ranks[%d]", path, j), "rank %d is listed twice", r)
		}
		seen[r] = true
	}
	if n := max(len(w.Ranks), 1); len(w.RankURLs) > 0 && len(w.RankURLs) != n {
		bad(path+".rank_urls", "%d URLs, but ranks: %d; want one for each", len(w.RankURLs), n)
	}
}

func (c *Config) checkEvents(bad report, path string, w *Worker) {
	last := 0
	for _, r := range w.Ranks {
		last = max(last, int(r))
	}
	n := max(len(w.Ranks), 1)
	check := func(field string, list []string) {
		alone := false
		for j, ep := range list {
			at := fmt.Sprintf("%s.%s[%d]", path, field, j)
			if field == "kv_events" && (ep == "auto" || ep == "off") {
				if alone = true; len(list) > 1 {
					bad(at, "%s is combined with other values; want it alone", quoted(ep))
				}
				continue
			}
			port, err := zmqEndpoint(ep)
			switch {
			case err != nil && field == "kv_events":
				bad(at, "%s: %v; want auto, off, tcp://HOST:PORT or ipc://PATH", quoted(ep), err)
			case err != nil:
				bad(at, "%s: %v; want tcp://HOST:PORT or ipc://PATH", quoted(ep), err)
			case len(list) == 1 && port > 0 && port+last > 65535:
				bad(at, "%s: rank %d would use port %d; want a lower base port, or one endpoint for each rank", quoted(ep), last, port+last)
			case len(list) == 1 && port == 0 && n > 1:
				bad(at, "%s: an ipc endpoint serves one rank; want one for each of the %d ranks", quoted(ep), n)
			}
		}
		if len(list) > 1 && len(list) != n && !alone {
			bad(path+"."+field, "%d endpoints, but ranks: %d; want one base endpoint, or one for each rank", len(list), n)
		}
	}
	check("kv_events", w.KVEvents)
	check("kv_replay", w.KVReplay)
	check("load_events", w.LoadEvents)
	for j, ep := range w.LoadEvents {
		if strings.HasPrefix(ep, "bind:") {
			bad(fmt.Sprintf("%s.load_events[%d]", path, j), "%s: the router does not listen for load messages; want tcp://HOST:PORT or ipc://PATH", quoted(ep))
		}
	}
	if len(w.KVReplay) > 0 && (len(w.KVEvents) == 0 || w.KVEvents[0] == "auto" || w.KVEvents[0] == "off") {
		bad(path+".kv_replay", "has no effect without endpoints in kv_events (auto asks the engine for both); want kv_events as well")
	}
}

// zmqEndpoint checks one endpoint; port is 0 for ipc.
func zmqEndpoint(ep string) (port int, err error) {
	ep = strings.TrimPrefix(ep, "bind:")
	if p, ok := strings.CutPrefix(ep, "ipc://"); ok && p != "" {
		return 0, nil
	}
	addr, ok := strings.CutPrefix(ep, "tcp://")
	i := strings.LastIndexByte(addr, ':')
	if !ok || i < 1 || strings.ContainsAny(addr, "/@ ") {
		return 0, fmt.Errorf("not a ZMQ endpoint")
	}
	n, err := strconv.ParseUint(addr[i+1:], 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %s is not from 1 to 65535", quoted(addr[i+1:]))
	}
	return int(n), nil
}

func checkNames(bad report, path string, w *Worker) {
	checkHealthPath(bad, path+".health_path", w.HealthPath)
	if engines := []string{"", "vllm", "sglang", "trtllm"}; !slices.Contains(engines, w.Engine) {
		bad(path+".engine", "%s is not known%s; want vllm, sglang or trtllm, or empty to read it from the engine", quoted(w.Engine), suggestion(w.Engine, engines))
	}
	for j, m := range w.Models {
		if m == "" || len(m) > 512 || !worker.Printable(m) {
			bad(fmt.Sprintf("%s.models[%d]", path, j), "%s is not a model name; want 1 to 512 bytes of printable text without control, direction and zero-width characters", quoted(m))
		}
	}
	for j, l := range w.Labels {
		if l == "" || len(l) > 128 || !worker.Printable(l) || strings.ContainsAny(l, " ,") {
			bad(fmt.Sprintf("%s.labels[%d]", path, j), "%s is not a label; want 1 to 128 bytes of printable text without spaces and commas", quoted(l))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(w.Options)) {
		at := path + ".options." + key
		if !slices.Contains(optionKeys, key) {
			bad(at, "no such option%s; want one of %s", suggestion(key, optionKeys), strings.Join(optionKeys, ", "))
			continue
		}
		for _, v := range w.Options[key] {
			if n, err := strconv.ParseUint(v, 10, 16); strings.HasSuffix(key, "_port") && (err != nil || n == 0) {
				bad(at, "%s is not a port; want 1 to 65535", quoted(v))
			}
			if v == "" {
				bad(at, "is empty; want a value")
			}
		}
	}
}
