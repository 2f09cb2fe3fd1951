package config

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"sluice/router/worker"
)

// Dynamic reports whether workers may come from a source other than this configuration.
func (c *Config) Dynamic() bool {
	d := &c.Discovery
	return d.File != "" || len(d.DNS) > 0 || c.Kube.Selector != "" || c.Registration.On()
}

// On reports whether the registration listener is enabled.
func (r *Registration) On() bool { return r.Listen != "" && r.Listen != "off" }

// fillDefaults sets the defaults of one entry, because Default has no entries of lists.
func (d *DNS) fillDefaults() {
	if d.Type == "" {
		d.Type = "a"
	}
	if d.Scheme == "" {
		d.Scheme = "http"
	}
	if d.MinInterval == 0 {
		d.MinInterval = 5 * time.Second
	}
	if d.MaxInterval == 0 {
		d.MaxInterval = max(30*time.Second, d.MinInterval)
	}
}

// Spec returns the specification of a worker that was found at host and port. source names the
// discovery source in the admin API and in logs.
func (d *DNS) Spec(host string, port uint16, source string) worker.Spec {
	var w Worker
	if d.Worker != nil {
		w = *d.Worker
	}
	w.URL, w.Role = d.Scheme+"://"+net.JoinHostPort(host, strconv.Itoa(int(port))), d.Role
	return w.Spec(source)
}

var dnsName = regexp.MustCompile(`^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?$`)

func (c *Config) checkDiscovery(bad report) {
	for i := range c.Discovery.DNS {
		d, path := &c.Discovery.DNS[i], fmt.Sprintf("discovery.dns[%d]", i)
		if len(d.Name) > 253 || !dnsName.MatchString(d.Name) {
			bad(path+".name", "%s is not the name of a host or service; want one such as prefill.engines.example or _http._tcp.prefill.engines.example", quoted(d.Name))
		}
		if d.Type == "a" && d.Port == 0 {
			bad(path+".port", "is missing; want the port of the engines, or type srv, whose answers contain ports")
		}
		if d.Type == "srv" && d.Port != 0 {
			bad(path+".port", "%d, but answers of type srv contain the ports; want none", d.Port)
		}
		if d.Server != "" {
			if err := checkAddr(d.Server); err != nil {
				bad(path+".server", "%s: %v; want HOST:PORT, such as 10.0.0.2:53", quoted(d.Server), err)
			}
		}
		if d.MinInterval > d.MaxInterval {
			bad(path+".min_interval", "%q is more than max_interval (%q); want at most that", d.MinInterval, d.MaxInterval)
		}
		c.checkTemplate(bad, path+".worker", d.Worker)
	}
	k := &c.Kube
	if k.Selector == "" {
		return
	}
	c.checkTemplate(bad, "kube.worker", k.Worker)
	if n, err := strconv.ParseUint(k.Port, 10, 16); (err != nil || n == 0) && !portName.MatchString(k.Port) {
		bad("kube.port", "%s is neither a port nor a port's name; want 1 to 65535, or the name in the pod's containers", quoted(k.Port))
	}
	if k.RoleLabel == "" {
		bad("kube.role_label", "is empty; want the label whose value distinguishes prefill from decode")
	}
}

var portName = regexp.MustCompile(`^[a-z0-9-]*[a-z][a-z0-9-]{0,14}$`)

// checkTemplate checks the settings that apply to every worker of a discovery source.
func (c *Config) checkTemplate(bad report, path string, w *Worker) {
	if w == nil {
		return
	}
	for _, f := range []struct {
		name  string
		given bool
	}{{"url", w.URL != ""}, {"id", w.ID != ""}, {"rank_urls", len(w.RankURLs) > 0}, {"role", w.Role != worker.Aggregated}} {
		if f.given {
			bad(path+"."+f.name, "is discovered for each worker; want it empty")
		}
	}
	c.checkRanks(bad, path, w)
	c.checkEvents(bad, path, w)
	checkNames(bad, path, w)
}

func (c *Config) checkRegister(bad report) {
	r := &c.Registration
	if !r.On() {
		return
	}
	if err := checkAddr(r.Listen); err != nil {
		bad("registration.listen", `%s: %v; want HOST:PORT, such as 10.0.0.1:8081, or "off"`, quoted(r.Listen), err)
		return
	}
	if _, port, _ := net.SplitHostPort(r.Listen); port != "0" && (r.Listen == c.Listen || r.Listen == c.Admin.Listen) {
		bad("registration.listen", "%s is the address of another listener; want a different address", quoted(r.Listen))
	}
	if r.Token == "" && r.ClientCA == "" {
		bad("registration.token", "is missing, and so is registration.client_ca, so anyone could register a worker; want a token, for example in $SLUICE_REGISTRATION_TOKEN, or client certificates")
	}
	if t := r.Token; t != "" && (len(t) < minToken || strings.ContainsFunc(t, func(x rune) bool { return x <= ' ' || x > '~' })) {
		bad("registration.token", "a token of %d bytes; want at least %d visible ASCII characters without spaces", len(t), minToken)
	}
	if (r.TLSCert == "") != (r.TLSKey == "") {
		bad("registration.tls_cert", "requires registration.tls_key, and the reverse; want both or neither")
	}
	if r.ClientCA != "" && r.TLSCert == "" {
		bad("registration.client_ca", "requires registration.tls_cert and registration.tls_key; want all three")
	}
	if r.Lease > r.MaxLease {
		bad("registration.lease", "%q is more than registration.max_lease (%q); want at most that", r.Lease, r.MaxLease)
	}
	checkNetworks(bad, "registration.networks", r.Networks)
	if host, _, _ := net.SplitHostPort(r.Listen); len(r.Networks) == 0 {
		if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
			bad("registration.networks", "is empty; want the CIDRs from which workers call and in which they serve, such as 10.0.0.0/16")
		}
	}
}

// Prefixes returns the networks of the registration listener, or the loopback networks if none are
// configured. r must have been checked.
func (r *Registration) Prefixes() []netip.Prefix {
	if len(r.Networks) == 0 {
		return []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	}
	return Prefixes(r.Networks)
}

// Prefixes parses networks that have been checked, and skips invalid ones.
func Prefixes(networks []string) (out []netip.Prefix) {
	for _, n := range networks {
		if p, err := netip.ParsePrefix(n); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

func checkNetworks(bad report, path string, networks []string) {
	for i, n := range networks {
		if _, err := netip.ParsePrefix(n); err != nil {
			bad(fmt.Sprintf("%s[%d]", path, i), "%s is not a network; want a CIDR, such as 10.0.0.0/16 or fd00::/8", quoted(n))
		}
	}
}

// describeSources describes the sources of workers other than the configuration's list.
func (c *Config) describeSources(line func(string, ...any)) {
	if c.path != "" {
		line("  those of %s are read again when it changes", c.path)
	}
	if f := c.Discovery.File; f != "" {
		line("  more from the file %s, read again when it changes", f)
	}
	for i := range c.Discovery.DNS {
		d := &c.Discovery.DNS[i]
		line("  more from DNS: %s %s, %s, looked up every %s to %s as its TTL says", d.Type, d.Name, d.Role, d.MinInterval, d.MaxInterval)
	}
	if c.Kube.Selector != "" {
		line("  more from Kubernetes: pods with %s, role by label %s, port %s", c.Kube.Selector, c.Kube.RoleLabel, c.Kube.Port)
	}
	if r := &c.Registration; r.On() {
		how := "a token"
		if r.ClientCA != "" {
			how = "a certificate"
			if r.Token != "" {
				how = "a certificate and a token"
			}
		}
		line("  more register themselves at %s with %s, from and on %v; removed after %s without a renewal", r.Listen, how, r.Prefixes(), r.Lease)
	}
}
