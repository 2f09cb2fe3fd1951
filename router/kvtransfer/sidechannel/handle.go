package sidechannel

import (
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"sluice/dataplane/jsonscan"
	"sluice/router/networks"
	"sluice/router/worker"
)

// handleInfo is what a handle says of the blocks it stands for.
type handleInfo struct {
	engine   string // the prefill engine's id; another after its restart
	request  string // prefill's own id of the request
	endpoint string // tcp://HOST:PORT of the side channel
	tp, pp   int
	withPP   bool // the form of the question, by release
	rank     *worker.Rank
	ownHost  bool // the endpoint is at the rank's own host; "localhost", vLLM's default, says nothing
}

const (
	maxRanks   = 64
	maxRequest = 512 // bytes of an id, the engine's too
)

// supportedVersion says whether the engine's release is one whose messages are known, and
// whether its side channel is asked with a pipeline rank (0.26 and later).
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

func hostOf(base string) string {
	u, err := url.Parse(base)
	if err != nil {
		return ""
	}
	return u.Hostname()
}

// readHandle reads what is needed of a handle; false when the engine or the handle
// is not one to be spoken to. The host is what the engine said: of a worker that
// registered itself it must lie in the networks that workers may lie in.
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
	l.rank, l.ownHost = rank, host == hostOf(rank.URL)
	l.endpoint = "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
	return l, true
}
