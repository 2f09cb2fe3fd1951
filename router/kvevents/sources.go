package kvevents

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Endpoints are the addresses of one rank's events, ready to connect to.
type Endpoints struct {
	Rank   int
	Pub    string // "tcp://host:port"
	Replay string // "" when there is none
	Topic  string
}

// Resolve gives the endpoint of each rank by the engines' rule: one base
// endpoint serves rank r at its port + r (tcp), or there is one endpoint for each
// rank, in the same order. Hosts that mean "all of mine" ("*", "0.0.0.0", "::")
// become host, the worker's own. No endpoints give none.
func Resolve(host string, endpoints []string, ranks []uint16) ([]string, error) {
	if len(endpoints) == 0 {
		return nil, nil
	}
	if len(endpoints) != 1 && len(endpoints) != len(ranks) {
		return nil, fmt.Errorf("kvevents: cannot share %d endpoints among %d ranks; want one, or one for each rank", len(endpoints), len(ranks))
	}
	out := make([]string, len(ranks))
	for i, rank := range ranks {
		endpoint, offset := endpoints[0], int(rank)
		if len(endpoints) > 1 {
			endpoint, offset = endpoints[i], 0
		}
		resolved, err := resolveOne(host, endpoint, offset)
		if err != nil {
			return nil, err
		}
		out[i] = resolved
	}
	return out, nil
}

func resolveOne(host, endpoint string, offset int) (string, error) {
	if rest, ok := strings.CutPrefix(endpoint, "ipc://"); ok && rest != "" {
		if offset != 0 {
			return "", fmt.Errorf("kvevents: cannot use %q for rank %d: an ipc endpoint serves rank 0 alone", endpoint, offset)
		}
		return endpoint, nil
	}
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("kvevents: cannot use endpoint %q: want tcp://HOST:PORT or ipc://PATH", endpoint)
	}
	at := strings.LastIndexByte(rest, ':')
	if at < 0 {
		return "", fmt.Errorf("kvevents: cannot use endpoint %q: it names no port", endpoint)
	}
	name, port := strings.Trim(rest[:at], "[]"), rest[at+1:]
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return "", fmt.Errorf("kvevents: cannot use endpoint %q: port %q is not a number from 1 to 65535", endpoint, port)
	}
	if int(n)+offset > 65535 {
		return "", fmt.Errorf("kvevents: cannot use endpoint %q for rank %d: port %d is above 65535", endpoint, offset, int(n)+offset)
	}
	if slices.Contains([]string{"", "*", "0.0.0.0", "::"}, name) {
		name = strings.Trim(host, "[]")
	}
	if name == "" {
		return "", fmt.Errorf("kvevents: cannot use endpoint %q: it names no host, and the worker's is not known", endpoint)
	}
	return "tcp://" + net.JoinHostPort(name, strconv.Itoa(int(n)+offset)), nil
}

// ParseSources reads the answer of vLLM's GET /kv_event_sources (0.31
// on): by rank, the configuration its publisher runs with. Ranks come in order;
// those that publish nothing are left out.
func ParseSources(body []byte, workerHost string) ([]Endpoints, error) {
	var byRank map[string]struct {
		Enabled   *bool   `json:"enable_kv_cache_events"`
		Publisher string  `json:"publisher"`
		Endpoint  string  `json:"endpoint"`
		Replay    *string `json:"replay_endpoint"`
		Topic     string  `json:"topic"`
	}
	if err := json.Unmarshal(body, &byRank); err != nil {
		return nil, fmt.Errorf("kvevents: cannot read event sources: %w", err)
	}
	var out []Endpoints
	for key, s := range byRank {
		rank, err := strconv.ParseUint(key, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("kvevents: cannot read event sources: %q is not a rank", key)
		}
		if s.Enabled != nil && !*s.Enabled || s.Publisher == "null" {
			continue
		}
		e := Endpoints{Rank: int(rank), Topic: s.Topic}
		if e.Pub, err = resolveOne(workerHost, s.Endpoint, 0); err != nil {
			return nil, err
		}
		if s.Replay != nil && *s.Replay != "" {
			if e.Replay, err = resolveOne(workerHost, *s.Replay, 0); err != nil {
				return nil, err
			}
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b Endpoints) int { return a.Rank - b.Rank })
	return out, nil
}

// ServerInfo is what SGLang's GET /server_info says of its events.
type ServerInfo struct {
	BlockSize int // tokens; 0 when not said
	Ranks     []Endpoints
}

// maxRanks bounds what a server may claim.
const maxRanks = 4096

// ParseServerInfo reads the kv_events member of SGLang's GET /server_info. It
// gives no ranks when there are no events.
func ParseServerInfo(body []byte, workerHost string) (ServerInfo, error) {
	var answer struct {
		KVEvents *struct {
			Publisher string `json:"publisher"`
			Host      string `json:"endpoint_host"`
			Port      int    `json:"endpoint_port_base"`
			Topic     string `json:"topic"`
			BlockSize int    `json:"block_size"`
			DPSize    *int   `json:"dp_size"`
			Replay    *int   `json:"replay_endpoint_port_base"`
		} `json:"kv_events"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return ServerInfo{}, fmt.Errorf("kvevents: cannot read server info: %w", err)
	}
	kv := answer.KVEvents
	if kv == nil || kv.Publisher == "null" {
		return ServerInfo{}, nil
	}
	ranks := 1
	if kv.DPSize != nil {
		ranks = *kv.DPSize
	}
	if ranks < 1 || ranks > maxRanks || kv.BlockSize < 0 {
		return ServerInfo{}, fmt.Errorf("kvevents: cannot read server info: dp_size %d, block_size %d", ranks, kv.BlockSize)
	}
	info := ServerInfo{BlockSize: kv.BlockSize}
	for rank := range ranks {
		e := Endpoints{Rank: rank, Topic: kv.Topic}
		var err error
		if e.Pub, err = resolveOne(workerHost, "tcp://"+net.JoinHostPort(strings.Trim(kv.Host, "[]"), strconv.Itoa(kv.Port)), rank); err != nil {
			return ServerInfo{}, err
		}
		if kv.Replay != nil && *kv.Replay != 0 {
			if e.Replay, err = resolveOne(workerHost, "tcp://"+net.JoinHostPort("*", strconv.Itoa(*kv.Replay)), rank); err != nil {
				return ServerInfo{}, err
			}
		}
		info.Ranks = append(info.Ranks, e)
	}
	return info, nil
}
