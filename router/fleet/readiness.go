package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// defaultBootstrapPort is SGLang's --disaggregation-bootstrap-port.
const defaultBootstrapPort = 8998

// bootstrapRoutes request the server info of an SGLang bootstrap server, which it returns (200)
// once every rank of the prefill engine has registered, and 503 before: SGLang 0.5.10 and later,
// then the form of earlier releases, which later ones reject with 400.
var bootstrapRoutes = [...]string{
	"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
	"/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1",
}

// checkRanks compares the requested ranks with those that the engine shows. An engine that shows
// none is accepted: not all report them.
func checkRanks(spec *worker.Spec, a *EngineInfo) error {
	if reason := a.MissingRanks(spec); reason != "" {
		return errors.New("its ranks do not match: " + reason)
	}
	return nil
}

// bootstrapOf returns HOST:PORT of the bootstrap server of a prefill worker: from the Spec, else
// from the engine, else SGLang's default port on the worker's own host; "" for workers that have
// none. If no port is configured, it is set in a.
func bootstrapOf(spec *worker.Spec, s *server, a *EngineInfo) string {
	named := spec.Options["bootstrap_port"]
	engine := a.Engine
	if spec.Engine != "" {
		engine = spec.Engine
	}
	if spec.Role != worker.Prefill || engine != SGLang {
		return ""
	}
	u, err := url.Parse(s.url)
	if err != nil {
		return ""
	}
	host, port := u.Hostname(), strconv.Itoa(defaultBootstrapPort)
	if h := spec.Options["bootstrap_host"]; len(h) == 1 {
		host = h[0]
	}
	// One port for all, or one per rank's server, in the order of the ranks.
	i := slices.Index(s.member.worker.Ranks, s.ranks[0])
	switch {
	case len(named) == 1:
		port = named[0]
	case i >= 0 && len(named) == len(s.member.worker.Ranks):
		port = named[i]
	case a.BootstrapPort > 0:
		port = strconv.Itoa(a.BootstrapPort)
	default:
		a.BootstrapPort = defaultBootstrapPort
	}
	return net.JoinHostPort(host, port)
}

// checkBootstrap returns why a bootstrap server is not ready, or nil.
func (s *server) checkBootstrap(ctx context.Context, addr string, timeout time.Duration) error {
	ep, err := s.bootstrapAt(addr)
	if err != nil {
		return fmt.Errorf("its bootstrap server is not ready: %w", err)
	}
	for i, route := range bootstrapRoutes {
		status, body, err := get(ctx, ep, route, timeout, healthBody)
		switch {
		case err != nil:
			return fmt.Errorf("its bootstrap server at %s is not ready: %s", addr, short(err))
		case status == 200:
			return nil
		case status == 400 && i+1 < len(bootstrapRoutes):
		case status == 503:
			return fmt.Errorf("its bootstrap server at %s is not ready: some ranks have not registered (503)", addr)
		default:
			return fmt.Errorf("its bootstrap server at %s is not ready: GET /route returned %d: %s; want 200", addr, status, firstLine(body))
		}
	}
	return nil
}

// bootstrapAt returns connections to a bootstrap server, the existing ones if its address is
// unchanged. Only run's goroutines call it, one per server.
func (s *server) bootstrapAt(addr string) (*upstream.Endpoint, error) {
	old := s.bootstrap.Load()
	if old != nil && old.URL() == "http://"+addr {
		return old, nil
	}
	opt := s.member.fleet.upstream()
	opt.MaxConns, opt.MaxIdle = bootstrapConns, 1
	opt.Key = "" // it needs no key and does not speak TLS
	ep, err := upstream.NewEndpoint("http://"+addr, opt)
	if err != nil {
		return nil, err
	}
	if s.bootstrap.Store(ep); old != nil {
		old.Close()
	}
	s.setBootstrapConnLimit(s.member.fleet.settings.Load().Engines) // a concurrent Reload did not see it
	return ep, nil
}

// firstLine returns the beginning of an engine's response, suitable for a reason.
func firstLine(body []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(body[:min(len(body), 200)])), "\n")
	return strconv.Quote(line)
}
