package config

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"sluice/router/worker"
)

// Sidecar has the settings of a sidecar that a Config does not have. They are unparsed text: package
// header parses them.
type Sidecar struct {
	Networks          string        // comma-separated CIDRs of the prefill workers that requests may name; "": none
	Ports             string        // the ports that these workers may have, such as 8000,8100-8200
	MaxPrefillWorkers int           // maximum number of these workers at a time
	PrefillIdle       time.Duration // such a worker is removed when no request named it for this long
	Keys              string        // options of every such worker: key=value,…
	Addresses         string        // comma-separated HOST:PORT by which requests name the engine's ranks, in rank order
	EngineMetrics     bool          // /metrics includes the engine's metrics
}

// SidecarFlags holds the flags of one command line of a sidecar.
type SidecarFlags struct {
	*Flags
	Sidecar
	model string
}

// sidecarFlags are the named flags that a sidecar shares with serve.
var sidecarFlags = []string{"listen", "admin", "pd", "nixl-proxy-host", "nixl-proxy-port", "nixl-peer-host", "nixl-peer-init-port",
	"nixl-peer-alloc-port", "log-level", "log-format", "max-body", "prefill-timeout", "decode-timeout", "pool-wait", "drain", "lease"}

// sidecarDefaults are the defaults that --help shows for flags whose defaults differ from those of
// serve.
var sidecarDefaults = map[string]string{"listen": "[127.0.0.1:8000]", "admin": "[off]", "pd": "[nixl]"}

// RegisterSidecarFlags adds a sidecar's flags to fs.
func RegisterSidecarFlags(fs *flag.FlagSet) *SidecarFlags {
	f := &SidecarFlags{Flags: &Flags{}}
	f.worker(fs, "engine", worker.Aggregated, "`URL[,key=value]...` of the sidecar's engine; required, once")
	f.worker(fs, "prefill", worker.Prefill, "`URL[,key=value]...` of a prefill worker for requests that name none; may be repeated")
	fs.StringVar(&f.Networks, "prefill-networks", "", "comma-separated `CIDRS` that must contain a prefill worker that a request names [requests cannot name one]")
	fs.StringVar(&f.Ports, "prefill-ports", "1024-65535", "`PORTS` that a prefill worker named by a request may have, such as 8000,8100-8200")
	fs.StringVar(&f.Keys, "prefill-options", "", "comma-separated `KEY=VALUE` pairs of every prefill worker named by a request, such as bootstrap_port=8998")
	fs.IntVar(&f.MaxPrefillWorkers, "max-prefill-workers", 256, "maximum `COUNT` of prefill workers named by requests")
	fs.DurationVar(&f.PrefillIdle, "prefill-idle-timeout", 2*time.Minute, "`DURATION` after which a prefill worker that no request names is removed")
	fs.StringVar(&f.Addresses, "rank-addresses", "", "comma-separated `HOST:PORT` by which X-Data-Parallel-Host-Port names the engine's ranks, in rank order [port and port+rank of engine and listener, at their hosts and at the variable POD_IP]")
	fs.StringVar(&f.model, "model", "", "`NAME` of the model [read from the engine]")
	fs.BoolVar(&f.EngineMetrics, "engine-metrics", true, "/metrics includes the engine's metrics, for an endpoint picker that reads them here")
	for _, n := range namedFlags {
		if !slices.Contains(sidecarFlags, n.name) {
			continue
		}
		usage := n.usage
		if d := sidecarDefaults[n.name]; d != "" {
			if i := strings.LastIndexByte(usage, '['); i >= 0 {
				usage = usage[:i] + d
			}
		}
		f.addNamed(fs, n.name, n.path, usage)
	}
	f.set(fs, anyField)
	return f
}

// Resolve builds the configuration of a sidecar: it applies the environment and the flags to the
// sidecar's defaults and checks the result. It reads no file. It replaces Flags.Resolve, which is that
// of serve.
func (f *SidecarFlags) Resolve(environ []string) (*Config, error) {
	c, err := f.applyOver(sidecarDefault(), environ, &errorList{})
	if err != nil {
		return nil, err
	}
	engines := 0
	for i := range c.Workers {
		w := &c.Workers[i]
		switch w.Role {
		case worker.Aggregated, worker.Decode:
			engines++
			// As in a pool that has only decode workers, the engine gets decode legs, and whole
			// requests if there is no prefill worker.
			w.Role = worker.Decode
			if w.ID == "" {
				w.ID = "engine"
			}
		}
		if len(w.KVEvents) == 0 {
			w.KVEvents = []string{"off"} // off by default: with one engine the index does not affect the choice
		}
		if f.model != "" && len(w.Models) == 0 {
			w.Models = []string{f.model}
		}
	}
	switch {
	case engines != 1:
		return nil, fmt.Errorf("there are %d engines; want one, such as --engine http://127.0.0.1:8200 (its data-parallel ranks by ranks=COUNT or rank_urls=URL+URL…)", engines)
	case c.Kube.Selector != "":
		return nil, errors.New("kube.selector is set, but a sidecar has one engine; want it empty, or sluice serve")
	case f.MaxPrefillWorkers < 1 || f.MaxPrefillWorkers > worker.MaxSlots/2:
		return nil, fmt.Errorf("--max-prefill-workers %d; want 1 to %d", f.MaxPrefillWorkers, worker.MaxSlots/2)
	case f.PrefillIdle < time.Second:
		return nil, fmt.Errorf("--prefill-idle-timeout %s; want 1s or more", f.PrefillIdle)
	}
	if _, given := c.origins["tokens.mode"]; !given && c.PD.Family != "lmcache" {
		c.Tokens.Mode = "text" // hashes of the text suffice to choose among the prefill workers
	}
	if c.Admin.Listen == "off" {
		c.Schedule.Explain = -1 // without an admin listener the records cannot be read
	}
	if len(f.engine(c).Ranks) <= 1 {
		c.Health.MetricsInterval = -1 // with one rank there is no choice by load
	}
	return c, nil
}

// sidecarDefault returns the defaults of a router with limits and caches that are sized for one
// engine.
func sidecarDefault() *Config {
	const mib = 1 << 20
	c := Default()
	c.Listen, c.Admin.Listen = "127.0.0.1:8000", "off"
	c.PD.Family = "nixl"
	c.origins["pd.family"] = origin{from: "sidecar"}
	c.Limits.MemoryBudget, c.Limits.MaxConns, c.Limits.PoolWaiters = 256*mib, 10_000, 256
	c.Index.MaxBytes = 4 * mib
	c.Tokens.CacheBytes = 2 * mib
	c.Schedule.Explain = 256
	c.Admission.Mode = "off"    // the router in front of the sidecar has admitted the request
	c.Migration.MaxAttempts = 0 // there is no other engine to continue on
	return c
}

func (f *SidecarFlags) engine(c *Config) *Worker {
	i := slices.IndexFunc(c.Workers, func(w Worker) bool { return w.Role == worker.Decode })
	return &c.Workers[i]
}

// PrefillSpec returns the specification, from --prefill-options, that every prefill worker named by a
// request gets. Its address is a placeholder.
func (f *SidecarFlags) PrefillSpec(c *Config) (worker.Spec, error) {
	text := "http://0.0.0.0"
	if f.Keys != "" {
		text += "," + f.Keys
	}
	w, err := ParseWorker(worker.Prefill, text)
	switch {
	case err != nil:
		return worker.Spec{}, fmt.Errorf("--prefill-options: %w", err)
	case w.ID != "" || len(w.Ranks) > 0 || len(w.RankURLs) > 0 || len(w.KVEvents) > 0:
		return worker.Spec{}, fmt.Errorf("--prefill-options %s: id, ranks, rank_urls and kv_events belong to one worker; want keys that apply to all workers, such as bootstrap_port=8998", quoted(f.Keys))
	}
	w.Models = f.engine(c).Models
	return w.Spec("header"), nil
}

// RankAddresses maps the addresses by which requests may name the engine's ranks to the numbers of the
// ranks.
func (f *SidecarFlags) RankAddresses(c *Config) (map[string]uint16, error) {
	w := f.engine(c)
	ranks := w.Ranks
	if len(ranks) == 0 {
		ranks = []uint16{0}
	}
	at := map[string]uint16{}
	if f.Addresses != "" {
		words := strings.Split(f.Addresses, ",")
		if len(words) != len(ranks) {
			return nil, fmt.Errorf("--rank-addresses has %d addresses; want %d, one for each rank of the engine", len(words), len(ranks))
		}
		for i, word := range words {
			word = strings.TrimSpace(word)
			if _, _, err := net.SplitHostPort(word); err != nil {
				return nil, fmt.Errorf("--rank-addresses: %s is not HOST:PORT", quoted(word))
			}
			at[word] = ranks[i]
		}
		return at, nil
	}
	listenHost, listenPort, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen: %s is not HOST:PORT", quoted(c.Listen))
	}
	urls := w.RankURLs
	if len(urls) != len(ranks) {
		urls = []string{w.URL}
	}
	for i, rank := range ranks {
		u, err := url.Parse(urls[min(i, len(urls)-1)])
		if err != nil {
			return nil, errors.New("the engine's URL cannot be parsed")
		}
		step := i
		if len(urls) > 1 {
			step = 0 // its URL has its own port
		}
		ports := []string{portAfter(u.Port(), step), portAfter(listenPort, i)}
		for _, host := range []string{u.Hostname(), listenHost, os.Getenv("POD_IP")} {
			if host == "" || host == "0.0.0.0" || host == "::" {
				continue
			}
			for _, port := range ports {
				if port == "" {
					continue
				}
				addr := net.JoinHostPort(host, port)
				if other, taken := at[addr]; taken && other != rank {
					return nil, fmt.Errorf("%s would name ranks %d and %d; want --rank-addresses with an address for each rank", addr, other, rank)
				}
				at[addr] = rank
			}
		}
	}
	return at, nil
}

// portAfter returns the port that is step above port, or "" if there is none.
func portAfter(port string, step int) string {
	n, err := strconv.Atoi(port)
	if err != nil || n == 0 || n+step > 65535 {
		return ""
	}
	return strconv.Itoa(n + step)
}
