package fleet

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"sluice/router/worker"
)

// EventSource is the source of one rank's KV events.
type EventSource struct {
	Rank     uint16
	Endpoint string // ZMQ PUB, with a wildcard host replaced by the worker's
	Bind     bool   // the engine connects: the subscriber binds Endpoint
	Replay   string // ZMQ ROUTER; "" if there is none
	Topic    string
	// Load is the ZMQ PUB endpoint of the rank's load messages, "" if there is none, and LoadTopic
	// their topic.
	Load, LoadTopic string
	Origin          string // "config", "/kv_event_sources" or "/server_info"
}

// bindPrefix before an endpoint in a Spec means that the router binds it. Only an operator can set
// it: nothing that an engine reports makes the router listen.
const bindPrefix = "bind:"

// EventSource returns the source of a rank's events: the Spec's or, if that is "auto" or empty, the
// one that the engine reported when it was last admitted. ok is false if there is none, or none is
// known yet.
func (f *Fleet) EventSource(r *worker.Rank) (src EventSource, ok bool) {
	spec := &r.Worker.Spec
	if !autoEvents(spec) {
		return specSource(spec, r)
	}
	return f.reportedSource(r)
}

// reportedSource returns the source that the engine reported for a rank.
func (f *Fleet) reportedSource(r *worker.Rank) (src EventSource, ok bool) {
	s := f.server(r)
	if s == nil {
		return src, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(s.member.sources, func(src EventSource) bool { return src.Rank == r.ID.Rank })
	if i < 0 {
		return src, false
	}
	return s.member.sources[i], true
}

// LoadSource returns the source of a rank's load messages: the Spec's, else the one that the engine
// reported when it was last admitted; "" if there is none.
func (f *Fleet) LoadSource(r *worker.Rank) (endpoint, topic string) {
	if ep := rankEndpoint(r.Worker.Spec.LoadEvents, r); ep != "" {
		return replaceWildcardHost(ep, r.URL), ""
	}
	src, _ := f.reportedSource(r)
	return src.Load, src.LoadTopic
}

func autoEvents(spec *worker.Spec) bool {
	return len(spec.KVEvents) == 0 || len(spec.KVEvents) == 1 && spec.KVEvents[0] == "auto"
}

func specSource(spec *worker.Spec, r *worker.Rank) (src EventSource, ok bool) {
	ep := rankEndpoint(spec.KVEvents, r)
	if ep == "" || ep == "off" {
		return src, false
	}
	ep, bind := strings.CutPrefix(ep, bindPrefix)
	if !bind {
		ep = replaceWildcardHost(ep, r.URL)
	}
	return EventSource{
		Rank: r.ID.Rank, Endpoint: ep, Bind: bind, Origin: "config",
		Replay: replaceWildcardHost(rankEndpoint(spec.KVReplay, r), r.URL),
	}, true
}

// rankEndpoint returns a rank's own endpoint from a list, or derives it from a single base
// endpoint: the engine's rank r listens at port+r (vLLM and SGLang).
func rankEndpoint(list []string, r *worker.Rank) string {
	switch {
	case len(list) == 0:
		return ""
	case len(list) > 1 && len(list) == len(r.Worker.Ranks):
		return list[slices.Index(r.Worker.Ranks, r)]
	}
	return offsetPort(list[0], r.EngineRank())
}

// offsetPort adds n to the port of a tcp endpoint; port 0 and other transports stay unchanged. It
// returns "" if the port exceeds 65535.
func offsetPort(endpoint string, n int) string {
	i := strings.LastIndexByte(endpoint, ':')
	if n == 0 || !strings.Contains(endpoint, "tcp://") || i < 0 {
		return endpoint
	}
	port, err := strconv.Atoi(endpoint[i+1:])
	switch {
	case err != nil || port == 0:
		return endpoint
	case port+n > 65535:
		return ""
	}
	return endpoint[:i+1] + strconv.Itoa(port+n)
}

// replaceWildcardHost replaces a wildcard host of a tcp endpoint by that of the worker's URL.
func replaceWildcardHost(endpoint, rawURL string) string {
	addr, tcp := strings.CutPrefix(endpoint, "tcp://")
	if !tcp {
		return endpoint
	}
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return endpoint
	}
	switch addr[:i] {
	case "*", "0.0.0.0", "::", "[::]", "":
	default:
		return endpoint
	}
	u, err := url.Parse(rawURL)
	if err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(u.Hostname(), addr[i+1:])
}

// sourcesOf assigns the sources that one server reported to its ranks: by rank or, for a server of
// one rank, the only source (an engine that runs one rank of several may count from 0).
func sourcesOf(s *server, a *EngineInfo) []EventSource {
	var out []EventSource
	for _, r := range s.ranks {
		i := slices.IndexFunc(a.Events, func(src EventSource) bool { return int(src.Rank) == r.EngineRankFrom(a.StartRank) })
		if i < 0 && len(s.ranks) == 1 && len(a.Events) == 1 {
			i = 0
		}
		if i >= 0 {
			src := a.Events[i]
			src.Rank = r.ID.Rank
			out = append(out, src)
		}
	}
	return out
}

func joinSources(sources []EventSource) string {
	var b strings.Builder
	for _, s := range sources {
		fmt.Fprintf(&b, "%d=%s;", s.Rank, s.Endpoint)
	}
	return b.String()
}
