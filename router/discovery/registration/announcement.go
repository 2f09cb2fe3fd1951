package registration

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"sluice/router/config"
	"sluice/router/worker"
)

// Version is the version of an Announcement; there is only one.
const Version = 1

// Announcement is what a worker reports about itself. Hosts are IP addresses: the target of a name
// may change after the router has checked it. A host that is a wildcard (*, 0.0.0.0, ::) or
// missing means the address of the caller.
type Announcement struct {
	// Version must be 1.
	Version int `json:"version"`
	// URL is that of the engine's HTTP server, such as http://10.0.0.5:8000 or http://*:8000.
	URL string `json:"url"`
	// Role is prefill, decode or aggregated; "": aggregated.
	Role string `json:"role,omitempty"`
	// Models are the models that the worker serves; empty: the router asks the engine.
	Models []string `json:"models,omitempty"`
	// Ranks are the data-parallel ranks behind URL; empty: only rank 0.
	Ranks []uint16 `json:"ranks,omitempty"`
	// StartRank is the engine's own number of the first rank; 0: as the engine reports.
	StartRank int `json:"start_rank,omitempty"`
	// RankURLs has one URL per rank, if each rank has its own server.
	RankURLs []string `json:"rank_urls,omitempty"`
	Labels   []string `json:"labels,omitempty"`
	// Engine is vllm, sglang or trtllm; "": the router detects it.
	Engine string `json:"engine,omitempty"`
	// HealthPath is the path of health probes; "": the router's default for the engine.
	HealthPath string `json:"health_path,omitempty"`
	// BlockSize is the number of tokens in a KV block; 0: the router detects it.
	BlockSize int `json:"block_size,omitempty"`
	// KVEvents are ZMQ endpoints: one base endpoint, or one per rank. ["off"]: the worker sends no
	// KV events; empty: the router asks the engine. KVReplay follows the same rule.
	KVEvents []string `json:"kv_events,omitempty"`
	KVReplay []string `json:"kv_replay,omitempty"`
	// LoadEvents are ZMQ endpoints of load messages, by the same rule; empty: the router asks an
	// SGLang engine.
	LoadEvents []string `json:"load_events,omitempty"`
	// MaxRequests bounds the router's requests in flight on all ranks together. RankRequests
	// bounds them on each rank; RankTokens bounds the prompt tokens that each rank has still to
	// compute. 0: only the router's own limits apply.
	MaxRequests  int64 `json:"max_requests,omitempty"`
	RankRequests int64 `json:"rank_requests,omitempty"`
	RankTokens   int64 `json:"rank_tokens,omitempty"`
	// Bootstrap is the bootstrap server of an SGLang or Mooncake prefill worker.
	Bootstrap *Bootstrap `json:"bootstrap,omitempty"`
	// NIXL has the addresses of the worker's NIXL agent.
	NIXL *NIXL `json:"nixl,omitempty"`
	// LeaseSeconds is the requested lease; 0: the router's default (registration.lease).
	LeaseSeconds int `json:"lease_seconds,omitempty"`
}

// Bootstrap is the address of a bootstrap server.
type Bootstrap struct {
	Host string `json:"host,omitempty"` // "": that of the worker
	Port int    `json:"port"`
}

// NIXL has the addresses of a worker's NIXL agent.
type NIXL struct {
	Host string `json:"host,omitempty"` // "": that of the worker
	// Port is the port of vLLM's side channel (VLLM_NIXL_SIDE_CHANNEL_PORT); 0: none.
	Port int `json:"port,omitempty"`
	// Connector is true if the engine runs Sluice's connector, which reports transfers to the
	// router.
	Connector bool `json:"connector,omitempty"`
	// InitPorts and AllocPorts are the ports of an LMCache decode worker, one per tensor-parallel
	// rank.
	InitPorts  []int `json:"init_ports,omitempty"`
	AllocPorts []int `json:"alloc_ports,omitempty"`
}

// Lease is the router's response to an Announcement or a renewal.
type Lease struct {
	Version      int     `json:"version"`
	ID           string  `json:"id"`
	LeaseSeconds float64 `json:"lease_seconds"`
	// RenewSeconds is the time until the next renewal: a third of the lease, so that two lost
	// calls do not end it.
	RenewSeconds float64 `json:"renew_seconds"`
	// Changed is true if the router added the worker, or replaced it because its announcement was
	// different.
	Changed bool `json:"changed"`
	// State and Reason are the state of the worker in the fleet and its reason.
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// Bounds of an Announcement.
const (
	maxBody  = 64 << 10
	maxRanks = 256
	maxList  = 256 // models, labels
)

// Decode parses an Announcement. It rejects unknown fields, because a misspelt field must not be
// ignored.
func Decode(body []byte) (*Announcement, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	a := new(Announcement)
	if err := d.Decode(a); err != nil {
		var typ *json.UnmarshalTypeError
		if errors.As(err, &typ) {
			return nil, fmt.Errorf("%s: a %s; want a %s", typ.Field, typ.Value, typ.Type)
		}
		return nil, fmt.Errorf("the body is not an announcement: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("the body has more than one JSON object")
	}
	if a.Version != Version {
		return nil, fmt.Errorf("version: %d; want %d", a.Version, Version)
	}
	return a, nil
}

// spec returns the worker's Spec. It checks every field and replaces wildcard hosts by the
// caller's address; all addresses lie inside the allowed networks.
func (a *Announcement) spec(id string, at callerScope) (worker.Spec, error) {
	none := worker.Spec{}
	for _, l := range []struct {
		field     string
		got, most int
	}{{"ranks", len(a.Ranks), maxRanks}, {"rank_urls", len(a.RankURLs), maxRanks}, {"models", len(a.Models), maxList}, {"labels", len(a.Labels), maxList},
		{"kv_events", len(a.KVEvents), maxRanks}, {"kv_replay", len(a.KVReplay), maxRanks}, {"load_events", len(a.LoadEvents), maxRanks}} {
		if l.got > l.most {
			return none, fmt.Errorf("%s: %d entries; want at most %d", l.field, l.got, l.most)
		}
	}
	w := config.Worker{ID: id, Models: a.Models, Ranks: a.Ranks, StartRank: a.StartRank, Labels: a.Labels, Engine: a.Engine, HealthPath: a.HealthPath, BlockSize: a.BlockSize,
		MaxRequests: a.MaxRequests, RankRequests: a.RankRequests, RankTokens: a.RankTokens, Options: map[string][]string{}}
	if a.Role != "" {
		if err := w.Role.UnmarshalText([]byte(a.Role)); err != nil {
			return none, fmt.Errorf("role: %q; want prefill, decode or aggregated", a.Role)
		}
	}
	var err error
	if w.URL, err = at.url("url", a.URL); err != nil {
		return none, err
	}
	for i, u := range a.RankURLs {
		if u, err = at.url(fmt.Sprintf("rank_urls[%d]", i), u); err != nil {
			return none, err
		}
		w.RankURLs = append(w.RankURLs, u)
	}
	if w.KVEvents, err = at.endpoints("kv_events", a.KVEvents); err != nil {
		return none, err
	}
	if w.KVReplay, err = at.endpoints("kv_replay", a.KVReplay); err != nil {
		return none, err
	}
	if w.LoadEvents, err = at.endpoints("load_events", a.LoadEvents); err != nil {
		return none, err
	}
	if b := a.Bootstrap; b != nil {
		if err = at.option(w.Options, "bootstrap", b.Host, "bootstrap_host", b.Port, "bootstrap_port"); err != nil {
			return none, err
		}
	}
	if n := a.NIXL; n != nil {
		if err = n.options(w.Options, at); err != nil {
			return none, err
		}
	}
	if err := config.CheckWorker(w); err != nil {
		return none, err
	}
	spec := w.Spec("register")
	if n := a.NIXL; n != nil && n.Port != 0 {
		spec.Options["nixl_port"] = []string{strconv.Itoa(n.Port)}
	}
	spec.Networks = at.networks
	return spec, nil
}

func (n *NIXL) options(to map[string][]string, at callerScope) error {
	if n.Port < 0 || n.Port > 65535 {
		return fmt.Errorf("nixl.port: %d; want 1 to 65535", n.Port)
	}
	if n.Host != "" {
		host, err := at.host("nixl.host", n.Host)
		if err != nil {
			return err
		}
		to["peer_host"] = []string{host}
	}
	if n.Connector {
		to["connector"] = []string{"true"}
	}
	for _, l := range []struct {
		field, key string
		ports      []int
	}{{"nixl.init_ports", "init_port", n.InitPorts}, {"nixl.alloc_ports", "alloc_port", n.AllocPorts}} {
		if len(l.ports) > maxRanks {
			return fmt.Errorf("%s: %d entries; want at most %d", l.field, len(l.ports), maxRanks)
		}
		for _, p := range l.ports {
			to[l.key] = append(to[l.key], strconv.Itoa(p))
		}
	}
	return nil
}

// lease returns how long the worker stays registered without a renewal: the requested time, or the
// router's default if none is requested. It fails if the worker requests more than the maximum.
func (a *Announcement) lease(own, most time.Duration) (time.Duration, error) {
	if a.LeaseSeconds == 0 {
		return own, nil
	}
	if a.LeaseSeconds < 1 || a.LeaseSeconds > int(most/time.Second) {
		return 0, fmt.Errorf("lease_seconds: %d; want 1 to %d", a.LeaseSeconds, int(most/time.Second))
	}
	return time.Duration(a.LeaseSeconds) * time.Second, nil
}
