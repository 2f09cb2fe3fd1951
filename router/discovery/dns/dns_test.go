package dns

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"sluice/bench/testwait"
	"sluice/router/discovery"
	"sluice/router/worker"
)

// server is a DNS server on loopback, UDP and TCP on one port.
type server struct {
	addr string
	mu   sync.Mutex
	zone map[string][]dnsmessage.Resource // "A name." -> records
	// Faults to inject.
	rcode    dnsmessage.RCode
	silent   bool
	truncate bool // UDP answers are truncated
	spoof    bool // sends an answer with a wrong id first
	extra    bool // SRV answers include the targets' addresses
	queries  int
	tcp      int
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{zone: map[string][]dnsmessage.Resource{}}
	var udp net.PacketConn
	var tcp net.Listener
	for range 20 {
		var err error
		if udp, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if tcp, err = net.Listen("tcp", udp.LocalAddr().String()); err == nil {
			break
		}
		udp.Close()
	}
	s.addr = udp.LocalAddr().String()
	t.Cleanup(func() { udp.Close(); tcp.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			for _, a := range s.answer(buf[:n], false) {
				udp.WriteTo(a, from)
			}
		}
	}()
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			var size [2]byte
			if _, err := io.ReadFull(c, size[:]); err == nil {
				q := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, q); err == nil {
					for _, a := range s.answer(q, true) {
						c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...))
					}
				}
			}
			c.Close()
		}
	}()
	return s
}

func (s *server) answer(packet []byte, tcp bool) [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	var q dnsmessage.Message
	if q.Unpack(packet) != nil || len(q.Questions) != 1 {
		return nil
	}
	s.queries++
	if tcp {
		s.tcp++
	}
	if s.silent {
		return nil
	}
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true, RCode: s.rcode}, Questions: q.Questions}
	if s.rcode == 0 {
		name := q.Questions[0].Name.String()
		kind := strings.TrimPrefix(q.Questions[0].Type.String(), "Type")
		m.Answers = s.zone[kind+" "+name]
		known := false
		for _, k := range []string{"A", "AAAA", "SRV"} {
			_, has := s.zone[k+" "+name]
			known = known || has
		}
		if !known {
			m.RCode = dnsmessage.RCodeNameError
		}
		if s.extra && kind == "SRV" {
			for _, r := range m.Answers {
				m.Additionals = append(m.Additionals, s.zone["A "+r.Body.(*dnsmessage.SRVResource).Target.String()]...)
			}
		}
		if s.truncate && !tcp {
			m.Truncated, m.Answers = true, nil
		}
	}
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	if s.spoof && !tcp {
		m.ID++
		m.Answers = []dnsmessage.Resource{a(q.Questions[0].Name.String(), "6.6.6.6", 60)}
		wrong, _ := m.Pack()
		return [][]byte{wrong, {1, 2, 3}, b}
	}
	return [][]byte{b}
}

func (s *server) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *server) put(key string, records ...dnsmessage.Resource) {
	s.set(func() { s.zone[key] = records })
}

func header(name string, ttl uint32) dnsmessage.ResourceHeader {
	return dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name), Class: dnsmessage.ClassINET, TTL: ttl}
}

func a(name, addr string, ttl uint32) dnsmessage.Resource {
	ip := netip.MustParseAddr(addr)
	if ip.Is4() {
		return dnsmessage.Resource{Header: header(name, ttl), Body: &dnsmessage.AResource{A: ip.As4()}}
	}
	return dnsmessage.Resource{Header: header(name, ttl), Body: &dnsmessage.AAAAResource{AAAA: ip.As16()}}
}

func srv(name, target string, port uint16, ttl uint32) dnsmessage.Resource {
	return dnsmessage.Resource{Header: header(name, ttl), Body: &dnsmessage.SRVResource{Target: dnsmessage.MustNewName(target), Port: port}}
}

func text(targets []Target) string {
	var all []string
	for _, t := range targets {
		all = append(all, netip.AddrPortFrom(t.Addr, t.Port).String())
	}
	return strings.Join(all, " ")
}

func TestAddresses(t *testing.T) {
	s := newServer(t)
	s.put("A d.engines.", a("d.engines.", "10.0.0.2", 30), a("d.engines.", "10.0.0.1", 9), a("d.engines.", "10.0.0.1", 9))
	s.put("AAAA d.engines.", a("d.engines.", "fd00::1", 60))
	l := Lookup{Host: "d.engines", Port: 8000, Server: s.addr}
	for name, fault := range map[string]func(){"plain": func() {}, "cut over UDP": func() { s.truncate = true }, "spoofed first": func() { s.truncate, s.spoof = false, true }} {
		s.set(fault)
		got, ttl, err := l.Do(context.Background())
		if err != nil || text(got) != "10.0.0.1:8000 10.0.0.2:8000 [fd00::1]:8000" || ttl != 9*time.Second {
			t.Errorf("%s: %s, TTL %v, %v", name, text(got), ttl, err)
		}
	}
	if s.tcp == 0 {
		t.Error("a cut answer was not asked for over TCP")
	}
	s.put("A d.engines.")
	s.put("AAAA d.engines.")
	if got, _, err := l.Do(context.Background()); err != nil || len(got) != 0 {
		t.Errorf("no records: %v %v", got, err)
	}
	l.Host = "nobody.engines"
	if got, _, err := l.Do(context.Background()); err != nil || len(got) != 0 {
		t.Errorf("no such name: %v %v", got, err)
	}
}

func TestServices(t *testing.T) {
	s := newServer(t)
	const name = "_http._tcp.p.engines."
	s.put("SRV "+name, srv(name, "one.engines.", 8000, 40), srv(name, "Two.Engines.", 8001, 50), srv(name, ".", 0, 5))
	s.put("A one.engines.", a("one.engines.", "10.0.0.1", 20))
	s.put("A two.engines.", a("two.engines.", "10.0.0.2", 60))
	s.put("A Two.Engines.", a("Two.Engines.", "10.0.0.2", 60))
	l := Lookup{Host: name, SRV: true, Server: s.addr}
	for _, extra := range []bool{false, true} {
		s.set(func() { s.extra, s.queries = extra, 0 })
		got, ttl, err := l.Do(context.Background())
		if err != nil || text(got) != "10.0.0.1:8000 10.0.0.2:8001" || ttl != 20*time.Second {
			t.Errorf("addresses brought along %v: %s, TTL %v, %v", extra, text(got), ttl, err)
		}
		s.set(func() {
			if extra && s.queries != 1 {
				t.Errorf("%d questions though the answer brought the addresses", s.queries)
			}
		})
	}
}

func TestFailures(t *testing.T) {
	s := newServer(t)
	s.put("A d.engines.", a("d.engines.", "10.0.0.1", 30))
	l := Lookup{Host: "d.engines", Port: 8000, Server: s.addr, Timeout: 50 * time.Millisecond}
	for name, c := range map[string]struct {
		fault func()
		want  string
	}{
		"servfail": {func() { s.rcode, s.silent = dnsmessage.RCodeServerFailure, false }, "ServerFailure"},
		"refused":  {func() { s.rcode, s.silent = dnsmessage.RCodeRefused, false }, "Refused"},
		"mute":     {func() { s.rcode, s.silent = 0, true }, "timeout"},
	} {
		s.set(c.fault)
		l.Timeout = 5 * time.Second
		if name == "mute" {
			l.Timeout = 50 * time.Millisecond
		}
		if got, _, err := l.Do(context.Background()); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "d.engines") {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	l.Server = "127.0.0.1:1"
	if _, _, err := l.Do(context.Background()); err == nil {
		t.Error("no server, no error")
	}
	s.set(func() { s.silent = true })
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	l.Server, l.Timeout = s.addr, time.Minute
	begun := time.Now()
	if _, _, err := l.Do(ctx); err == nil || time.Since(begun) > 10*time.Second {
		t.Errorf("a lookup whose context ended: %v after %v", err, time.Since(begun))
	}
}

// members is a discovery.Sink.
type members struct {
	mu sync.Mutex
	in map[string]worker.Spec
}

func (m *members) Add(s worker.Spec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.in[s.ID] = s
	return nil
}

func (m *members) Remove(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.in, id)
	return nil
}

func (m *members) has(ids ...string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		if _, ok := m.in[id]; !ok {
			return false
		}
	}
	return len(m.in) == len(ids)
}

func TestSourceFollowsTheName(t *testing.T) {
	s := newServer(t)
	s.put("A d.engines.", a("d.engines.", "10.0.0.1", 0), a("d.engines.", "10.0.0.2", 0))
	m := &members{in: map[string]worker.Spec{}}
	run := discovery.NewRunner(m, nil)
	defer run.Close()
	src := &Source{
		Lookup: Lookup{Host: "d.engines", Port: 8000, Server: s.addr, Timeout: 100 * time.Millisecond},
		Spec: func(t Target) worker.Spec {
			return worker.Spec{URL: fmt.Sprintf("http://%s", netip.AddrPortFrom(t.Addr, t.Port)), Role: worker.Decode}
		},
		MinInterval: 20 * time.Millisecond, MaxInterval: time.Second,
	}
	if err := run.Start(src); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "both are in", func() bool { return m.has("decode@10.0.0.1:8000", "decode@10.0.0.2:8000") })
	s.put("A d.engines.", a("d.engines.", "10.0.0.2", 0), a("d.engines.", "10.0.0.3", 0))
	testwait.Until(t, "one went, one came", func() bool { return m.has("decode@10.0.0.2:8000", "decode@10.0.0.3:8000") })

	s.set(func() { s.rcode, s.silent = dnsmessage.RCodeServerFailure, false })
	testwait.Until(t, "the failure is shown", func() bool { return strings.Contains(run.States()[0].Error, "ServerFailure") })
	if !m.has("decode@10.0.0.2:8000", "decode@10.0.0.3:8000") {
		t.Error("a failed lookup took workers out")
	}
	s.set(func() { s.rcode = 0 })
	testwait.Until(t, "the failure is over", func() bool { return run.States()[0].Error == "" })

	s.set(func() { delete(s.zone, "A d.engines.") })
	testwait.Until(t, "the empty answer is doubted first", func() bool { return strings.Contains(run.States()[0].Error, "no addresses") })
	testwait.Until(t, "and then believed", func() bool { return m.has() && run.States()[0].Error == "" })
}

// TestTTLIsKept checks that Source waits for a TTL that is longer than MinInterval.
func TestTTLIsKept(t *testing.T) {
	s := newServer(t)
	s.put("A d.engines.", a("d.engines.", "10.0.0.1", 3600))
	m := &members{in: map[string]worker.Spec{}}
	run := discovery.NewRunner(m, nil)
	defer run.Close()
	src := &Source{Lookup: Lookup{Host: "d.engines", Port: 1, Server: s.addr}, MinInterval: time.Millisecond, MaxInterval: time.Hour,
		Spec: func(t Target) worker.Spec { return worker.Spec{ID: "w", URL: "http://10.0.0.1:1"} }}
	if err := run.Start(src); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "it is in", func() bool { return m.has("w") })
	testwait.Holds(t, 100*time.Millisecond, "two questions, for A and AAAA, within a TTL of an hour", func() (two bool) {
		s.set(func() { two = s.queries == 2 })
		return two
	})
}

func TestNameservers(t *testing.T) {
	got := nameservers("# nameserver 1.1.1.1\nsearch x\nnameserver 10.0.0.2\nnameserver fd00::2 \noptions ndots:5\n")
	if strings.Join(got, " ") != "10.0.0.2:53 [fd00::2]:53" {
		t.Errorf("%q", got)
	}
}
