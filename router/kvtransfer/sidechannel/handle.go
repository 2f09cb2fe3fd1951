package sidechannel

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"sluice/dataplane/jsonscan"
	"sluice/router/networks"
	"sluice/router/worker"
)

// handleInfo is the part of a handle that identifies its blocks and their engine.
type handleInfo struct {
	engine   string // the prefill engine's id; a restart changes it
	request  string // the prefill engine's own id of the request
	endpoint string // tcp://HOST:PORT of the side channel
	tp, pp   int
	withPP   bool // the metadata query contains a pipeline rank
	rank     *worker.Rank
	ownHost  bool // the endpoint is on the rank's own host; not so for "localhost", vLLM's default, which identifies no host
}

const (
	maxRanks   = 64
	maxRequest = 512 // bytes of a request id or an engine id
)

// supportedVersion returns whether the messages of the engine's release are known (0.22 to
// 0.33), and whether its side channel expects a pipeline rank in the query (0.26 and later).
func supportedVersion(version string) (withPP, ok bool) {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	minor = strings.TrimRight(strings.SplitN(minor, "rc", 2)[0], "abcdefghijklmnopqrstuvwxyz+")
	n, err := strconv.Atoi(minor)
	if major != "0" || err != nil || n < 22 || n > 33 {
		return false, false
	}
	return n >= 26, true
}

// readHandle parses a handle. It returns false when the engine's release is unsupported or the
// handle is invalid. The host comes from the engine; for a worker that registered itself, the
// host must lie in the networks allowed for workers.
func readHandle(rank *worker.Rank, handle []byte) (handleInfo, bool) {
	var l handleInfo
	var ok bool
	if l.withPP, ok = supportedVersion(rank.Worker.Info().Version); !ok {
		return l, false
	}
	text := func(name string) string {
		v, found, err := jsonscan.Find(handle, name)
		if err != nil || !found || v.Kind <= jsonscan.Null {
			return ""
		}
		raw := handle[v.Start:v.End]
		if v.Kind == jsonscan.String && len(raw) >= 2 {
			raw = raw[1 : len(raw)-1]
		}
		return string(raw)
	}
	number := func(name string) int {
		n, err := strconv.Atoi(text(name))
		if err != nil || n < 1 {
			return 1
		}
		return n
	}
	host, port := text("remote_host"), number("remote_port")
	l.engine, l.request = text("remote_engine_id"), text("remote_request_id")
	l.tp, l.pp = number("tp_size"), number("pp_size")
	switch {
	case l.engine == "", l.request == "", len(l.engine) > maxRequest, len(l.request) > maxRequest, strings.ContainsAny(l.engine+l.request, "\\, \n"),
		port > 65535, l.tp > maxRanks, l.pp > maxRanks, l.tp*l.pp > maxRanks, text("transfer_mode") == "push":
		return l, false
	}
	if allowed := rank.Worker.Spec.Networks; len(allowed) > 0 {
		a, err := netip.ParseAddr(host)
		if err != nil || !networks.Contains(allowed, a) {
			return l, false
		}
	}
	if host == "" || strings.ContainsAny(host, "/;,* ") {
		return l, false
	}
	l.rank, l.ownHost = rank, host == strings.Trim(rank.Host(), "[]")
	l.endpoint = "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
	return l, true
}
