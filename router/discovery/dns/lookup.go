package dns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Lookup is one name, its record type and the server to query.
type Lookup struct {
	Host string
	SRV  bool   // query SRV records; otherwise A and AAAA
	Port uint16 // port of the targets if SRV is false
	// Server is HOST:PORT; "": the servers of /etc/resolv.conf, in order.
	Server string
	// Timeout of one query to one server [2s].
	Timeout time.Duration
}

// maxTargets bounds the number of targets in an answer.
const maxTargets = 1024

// errNoName means NXDOMAIN, which is a valid, empty answer.
var errNoName = errors.New("no such name")

// Do performs the lookup. The targets are sorted and unique; ttl is the smallest TTL of all
// records used, at most maxTTL. Do returns no targets and no error if the name does not exist or
// has no records.
func (l *Lookup) Do(ctx context.Context) (targets []Target, ttl time.Duration, err error) {
	servers := []string{l.Server}
	if l.Server == "" {
		if servers, err = systemServers(); err != nil {
			return nil, 0, err
		}
	}
	for _, server := range servers {
		q := query{server: server, timeout: l.Timeout, minTTL: maxTTL}
		if q.timeout <= 0 {
			q.timeout = 2 * time.Second
		}
		if l.SRV {
			targets, err = q.service(ctx, l.Host)
		} else {
			targets, err = q.host(ctx, l.Host, l.Port)
		}
		if err == nil {
			if len(targets) > maxTargets {
				return nil, 0, fmt.Errorf("dns: %s has %d addresses; want at most %d", l.Host, len(targets), maxTargets)
			}
			return sorted(targets), q.minTTL, nil
		}
	}
	return nil, 0, fmt.Errorf("dns: cannot look up %q: %w", l.Host, err)
}

const maxTTL = 24 * time.Hour

// query sends the queries of one lookup to one server.
type query struct {
	server  string
	timeout time.Duration
	minTTL  time.Duration // smallest TTL so far
}

// host queries A and AAAA records. A server answers a record type that the name does not have with
// an empty answer, not with an error.
func (q *query) host(ctx context.Context, name string, port uint16) ([]Target, error) {
	var targets []Target
	for _, typ := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		records, _, err := q.send(ctx, name, typ)
		if errors.Is(err, errNoName) {
			continue // some servers answer NXDOMAIN for one of the two types
		}
		if err != nil {
			return nil, err
		}
		for _, a := range addresses(records) {
			targets = append(targets, Target{Addr: a.addr, Port: port})
			q.recordTTL(a.ttl)
		}
	}
	return targets, nil
}

// service queries SRV records, and the addresses of those targets that the answer's additional
// records do not include.
func (q *query) service(ctx context.Context, name string) ([]Target, error) {
	records, extra, err := q.send(ctx, name, dnsmessage.TypeSRV)
	if errors.Is(err, errNoName) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	brought := map[string][]address{}
	for _, a := range addresses(extra) {
		brought[lower(a.name)] = append(brought[lower(a.name)], a)
	}
	var targets []Target
	hosts := 0
	for _, r := range records {
		srv, ok := r.Body.(*dnsmessage.SRVResource)
		if !ok || srv.Target.String() == "." || srv.Port == 0 { // "." means that the service does not exist (RFC 2782)
			continue
		}
		q.recordTTL(r.Header.TTL)
		host := srv.Target.String()
		if known := brought[lower(host)]; len(known) > 0 {
			for _, a := range known {
				targets = append(targets, Target{Addr: a.addr, Port: srv.Port})
				q.recordTTL(a.ttl)
			}
			continue
		}
		if hosts++; hosts > maxTargets {
			return nil, fmt.Errorf("more than %d targets", maxTargets)
		}
		more, err := q.host(ctx, host, srv.Port)
		if err != nil {
			return nil, fmt.Errorf("target %q: %w", host, err)
		}
		targets = append(targets, more...)
	}
	return targets, nil
}

func (q *query) recordTTL(seconds uint32) {
	q.minTTL = min(q.minTTL, time.Duration(seconds)*time.Second)
}

type address struct {
	name string
	addr netip.Addr
	ttl  uint32
}

// addresses returns the A and AAAA records. It ignores the names of aliases (CNAME), because the
// server has followed them.
func addresses(records []dnsmessage.Resource) (out []address) {
	for _, r := range records {
		a := address{name: r.Header.Name.String(), ttl: r.Header.TTL}
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			a.addr = netip.AddrFrom4(body.A)
		case *dnsmessage.AAAAResource:
			a.addr = netip.AddrFrom16(body.AAAA).Unmap()
		default:
			continue
		}
		out = append(out, a)
	}
	return out
}

func lower(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}
