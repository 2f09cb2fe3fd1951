package front

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/proxyproto"
)

// lineOf and binaryOf are PROXY headers of a client.
func lineOf(client string) string {
	a := netip.MustParseAddrPort(client)
	family, to := "TCP4", "192.0.2.99"
	if a.Addr().Is6() {
		family, to = "TCP6", "2001:db8::99"
	}
	return fmt.Sprintf("PROXY %s %s %s %d 443\r\n", family, a.Addr(), to, a.Port())
}

func binaryOf(client string) string {
	a := netip.MustParseAddrPort(client)
	family, to := byte(0x11), netip.MustParseAddr("192.0.2.99")
	if a.Addr().Is6() {
		family, to = 0x21, netip.MustParseAddr("2001:db8::99")
	}
	body := append(a.Addr().AsSlice(), to.AsSlice()...)
	body = binary.BigEndian.AppendUint16(body, a.Port())
	body = binary.BigEndian.AppendUint16(body, 443)
	body = append(body, 0x02, 0, 1, 'x') // a TLV
	b := append([]byte("\r\n\r\n\x00\r\nQUIT\n"), 0x21, family)
	return string(binary.BigEndian.AppendUint16(b, uint16(len(body)))) + string(body)
}

const local = "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00"

func networks(t testing.TB, words ...string) proxyproto.Networks {
	t.Helper()
	n, err := proxyproto.ParseNetworks(words)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// clientIPHandler answers with the client's address.
func clientIPHandler(x Exchange) { x.ReplyJSON(200, []byte(`"`+x.Request().ClientIP.String()+`"`)) }

// refusals returns how many connections or requests were refused for a reason.
func (r *recorder) refusals(reason Reason) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused[reason]
}

// dialFrom connects from a given address of this machine.
func (r *testServer) dialFrom(ip string) *client {
	r.t.Helper()
	c, err := r.tryFrom(ip)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *testServer) tryFrom(ip string) (*client, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	nc, err := d.Dial("tcp", r.addr)
	if err != nil {
		return nil, err
	}
	r.t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(testTimeout))
	return newClient(r.t, nc), nil
}

func TestProxyHeader(t *testing.T) {
	r := start(t, Options{Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}}, clientIPHandler)
	for name, k := range map[string]struct{ header, client string }{
		"v1":        {lineOf("198.51.100.7:4711"), "198.51.100.7"},
		"v1, IPv6":  {lineOf("[2001:db8::7]:4711"), "2001:db8::7"},
		"v1 of who": {"PROXY UNKNOWN\r\n", "127.0.0.1"},
		"v2":        {binaryOf("198.51.100.7:4711"), "198.51.100.7"},
		"v2, IPv6":  {binaryOf("[2001:db8::7]:4711"), "2001:db8::7"},
		"v2 LOCAL":  {local, "127.0.0.1"},
	} {
		for _, way := range []string{"together", "apart", "in bytes"} {
			c := r.dial()
			switch way {
			case "together":
				c.send(k.header + chatPost(hello))
			case "apart":
				c.send(k.header)
				testwait.Pace(5 * time.Millisecond)
				c.send(chatPost(hello))
			case "in bytes":
				for i := range len(k.header) {
					c.send(k.header[i : i+1])
					if i%16 == 0 {
						testwait.Pace(time.Millisecond)
					}
				}
				c.send(chatPost(hello))
			}
			for range 2 { // the header belongs to the connection, not to a request
				if resp, body := c.readResponse(); resp.StatusCode != 200 || body != `"`+k.client+`"` {
					t.Errorf("%s, %s: %d %s; want client %s", name, way, resp.StatusCode, body, k.client)
				}
				c.send(chatPost(hello))
			}
			c.readResponse()
			_ = c.Close()
		}
	}
	if n := r.observed.refusals(BadProxyHeader); n > 0 {
		t.Errorf("%d connections refused", n)
	}
}

func TestProxyHeaderIsRefused(t *testing.T) {
	t.Parallel()
	var logged logLines
	r := start(t, Options{Log: slog.New(slog.NewTextHandler(&logged, nil)), Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}, HeadTimeout: 300 * time.Millisecond}, clientIPHandler)
	refused := 0
	for _, first := range []string{
		chatPost(hello),
		"PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n" + chatPost(hello),
		"PROXY TCP9 1.2.3.4 5.6.7.8 1 1\r\n" + chatPost(hello),
		"PROXY UNKNOWN" + strings.Repeat("x", 200) + "\r\n" + chatPost(hello),
		"\r\n\r\n\x00\r\nQUIT\n\x21\x12\x00\x0c" + strings.Repeat("x", 12) + chatPost(hello),
		"\r\n\r\n\x00\r\nQUIT\n\x21\x11\xff\xff" + strings.Repeat("x", 70_000),
		"\x16\x03\x01\x02\x00\x01",
		"PROXY TCP4 1.2.3.4 ", // and no more
		"",                    // not a word
	} {
		c := r.dial()
		_, _ = io.WriteString(c, first) // may fail, because the server may reset the connection
		c.expectClosed()
		refused++
		testwait.Until(t, fmt.Sprintf("%.30q is counted", first), func() bool { return r.observed.refusals(BadProxyHeader) == refused })
	}
	c := r.dialFrom("127.0.0.2") // not a proxy
	c.expectClosed()
	refused++
	testwait.Until(t, "the stranger is counted", func() bool { return r.observed.refusals(BadProxyHeader) == refused })
	if n := r.calls.Load(); n > 0 {
		t.Errorf("%d requests were served", n)
	}
	contains(t, logged.String(), "does not begin with a PROXY header", "client=127.0.0.1")

	r = start(t, Options{Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}}, clientIPHandler)
	_ = r.dial().Close() // a port probe, which is not an error
	testwait.Until(t, "it is gone", func() bool { r.observed.mu.Lock(); defer r.observed.mu.Unlock(); return r.observed.closedConns == 1 })
	if n := r.observed.refusals(BadProxyHeader); n > 0 {
		t.Errorf("a connection that was only tried counts as refused")
	}
}

// A router behind a proxy may also get direct connections: health checks, or internal clients.
func TestProxyHeaderIsOptional(t *testing.T) {
	r := start(t, Options{Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolOptional}}, clientIPHandler)
	for _, k := range []struct{ from, first, client string }{
		{"127.0.0.1", "", "127.0.0.1"},
		{"127.0.0.1", lineOf("198.51.100.7:1"), "198.51.100.7"},
		{"127.0.0.2", "", "127.0.0.2"},
	} {
		c := r.dialFrom(k.from)
		c.send(k.first + chatPost(hello))
		if _, body := c.readResponse(); body != `"`+k.client+`"` {
			t.Errorf("%+v: %s", k, body)
		}
	}
	// A PROXY header from an untrusted address is an invalid request.
	c := r.dialFrom("127.0.0.2")
	c.send(lineOf("198.51.100.7:1") + chatPost(hello))
	if resp, body := c.readResponse(); resp.StatusCode != 400 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// After a PROXY header everything works as without: TLS, streams on event loops, keep-alive.
func TestProxyHeaderBeforeTLS(t *testing.T) {
	with := httptest.NewTLSServer(nil)
	cert := with.TLS.Certificates[0]
	with.Close()
	r := start(t, Options{TLS: &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}}, clientIPHandler)
	for _, header := range []string{lineOf("198.51.100.7:1"), binaryOf("198.51.100.7:1")} {
		plain := r.dial()
		plain.send(header)
		secure := tls.Client(plain.Conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
		c := newClient(t, secure)
		for range 2 {
			c.send(chatPost(hello))
			if _, body := c.readResponse(); body != `"198.51.100.7"` {
				t.Errorf("%s", body)
			}
		}
	}
}

func TestStreamBehindAProxyHeader(t *testing.T) {
	withBothRelayModes(t, func(t *testing.T, by RelayMode) {
		e := startEngine(t, func(w net.Conn, _ *http.Request) bool {
			_, _ = io.WriteString(w, streamHead+chunk("data: 1\n\n")+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
			return true
		})
		r := start(t, Options{RelayMode: by, Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}, MaxConnsPerIP: 1}, relayTo(e, func() RelayHooks { return RelayHooks{} }))
		c := r.dial()
		c.send(binaryOf("198.51.100.7:1"))
		for range 3 {
			c.send(chatPost(`{"stream":true}`))
			if _, body := c.readResponse(); body != "data: 1\n\ndata: [DONE]\n\n" {
				t.Fatalf("%q", body)
			}
		}
	})
}

// The limit for each address applies to the clients' addresses, not to the proxy's.
func TestLimitPerClientBehindAProxy(t *testing.T) {
	r := start(t, Options{Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolOptional}, MaxConnsPerIP: 2}, clientIPHandler)
	ask := func(c *client) int {
		c.send(chatPost(hello))
		resp, _ := c.readResponse()
		return resp.StatusCode
	}
	var open []*client
	for _, client := range []string{"198.51.100.7:1", "198.51.100.7:2", "198.51.100.8:1", "198.51.100.8:2", "198.51.100.9:1"} {
		c := r.dial()
		c.send(lineOf(client))
		if s := ask(c); s != 200 {
			t.Fatalf("%s: %d", client, s)
		}
		open = append(open, c)
	}
	over := r.dial()
	over.send(lineOf("198.51.100.7:3"))
	if resp, body := over.readResponse(); resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != string(TooManyConnections) {
		t.Errorf("over the limit: %d %s", resp.StatusCode, body)
	}
	for range 5 { // the proxy's own: health checks
		c := r.dial()
		c.send(local)
		if s := ask(c); s != 200 {
			t.Fatalf("the proxy's own connection: %d", s)
		}
	}
	_ = open[0].Close()
	testwait.Until(t, "a place is free", func() bool { return r.server.conns.countForIP("198.51.100.7") == 1 })
	c := r.dial()
	c.send(lineOf("198.51.100.7:4"))
	if s := ask(c); s != 200 {
		t.Errorf("after a place became free: %d", s)
	}
	r.stop()
	if n := len(r.server.conns.byIP); n > 0 {
		t.Errorf("%d addresses are still counted", n)
	}
}

func (s *connSet) countForIP(ip string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byIP[netip.MustParseAddr(ip)]
}

func TestForwardedClient(t *testing.T) {
	for _, k := range []struct {
		form         Forwarded
		from, client string
		fields       []string
	}{
		{ForwardedX, "127.0.0.1", "198.51.100.7", []string{"X-Forwarded-For: 6.6.6.6, 198.51.100.7"}},
		{ForwardedX, "127.0.0.1", "198.51.100.7", []string{"x-forwarded-for: 6.6.6.6", "X-Forwarded-For: 198.51.100.7, 127.0.0.1"}},
		{ForwardedX, "127.0.0.1", "127.0.0.1", []string{"Forwarded: for=6.6.6.6"}}, // not what the proxy writes
		{ForwardedX, "127.0.0.1", "127.0.0.1", nil},
		{ForwardedX, "127.0.0.1", "127.0.0.1", []string{"X-Forwarded-For: 6.6.6.6, what"}},
		{ForwardedX, "127.0.0.2", "127.0.0.2", []string{"X-Forwarded-For: 6.6.6.6"}}, // not from a proxy
		{ForwardedRFC, "127.0.0.1", "2001:db8::7", []string{`Forwarded: for=6.6.6.6, for="[2001:db8::7]:47";proto=https`}},
		{ForwardedRFC, "127.0.0.1", "127.0.0.1", []string{"X-Forwarded-For: 6.6.6.6"}},
		{ForwardedRFC, "127.0.0.2", "127.0.0.2", []string{"Forwarded: for=6.6.6.6"}},
		{ForwardedOff, "127.0.0.1", "127.0.0.1", []string{"Forwarded: for=6.6.6.6", "X-Forwarded-For: 6.6.6.6"}},
	} {
		var mu sync.Mutex // the socket's own order is not seen by the race detector
		var toEngine string
		r := start(t, Options{Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), Forwarded: k.form}}, func(x Exchange) {
			mu.Lock()
			defer mu.Unlock()
			toEngine = ""
			for _, f := range x.ForwardFields(nil) {
				toEngine += f.Name + ": " + f.Value + "\n"
			}
			clientIPHandler(x)
		})
		c := r.dialFrom(k.from)
		c.send(chatPost(hello, append(k.fields, "X-Real-IP: 6.6.6.6", "X-Forwarded-Proto: https", "X-Forwarded-Host: evil", "X-Other: kept")...))
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != `"`+k.client+`"` {
			t.Errorf("%+v: %d %s", k, resp.StatusCode, body)
		}
		mu.Lock()
		if want := "Content-Type: application/json\nX-Other: kept\nX-Forwarded-For: " + k.client + "\n"; toEngine != want {
			t.Errorf("%+v: the engine is sent %q, want %q", k, toEngine, want)
		}
		mu.Unlock()
	}
}

// Without proxies an engine gets no header lines about the origin of a request.
func TestForwardingHeadersAreNotForwarded(t *testing.T) {
	r := start(t, Options{}, func(x Exchange) {
		for _, f := range x.ForwardFields(nil) {
			if f.Name != "Content-Type" {
				t.Errorf("forwarded %s: %s", f.Name, f.Value)
			}
		}
		clientIPHandler(x)
	})
	c := r.dial()
	c.send(chatPost(hello, "X-Forwarded-For: 6.6.6.6", "FORWARDED: for=6.6.6.6", "x-real-ip: 6.6.6.6", "X-Forwarded-Port: 1", "Origin: https://evil.example"))
	if _, body := c.readResponse(); body != `"127.0.0.1"` {
		t.Errorf("client %s", body)
	}
}

// A proxy's connections carry requests of many clients, so the limit counts requests.
func TestForwardedRequestsAreLimited(t *testing.T) {
	free := make(chan struct{})
	r := start(t, Options{Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), Forwarded: ForwardedX}, MaxConnsPerIP: 2}, func(x Exchange) {
		<-free
		clientIPHandler(x)
	})
	var waiting []*client
	for _, client := range []string{"198.51.100.7", "198.51.100.7", "198.51.100.8"} {
		c := r.dial()
		c.send(chatPost(hello, "X-Forwarded-For: "+client))
		waiting = append(waiting, c)
	}
	testwait.Until(t, "three requests in flight", func() bool { return r.calls.Load() == 3 })
	over := r.dial()
	over.send(chatPost(hello, "X-Forwarded-For: 198.51.100.7"))
	if resp, body := over.readResponse(); resp.StatusCode != 503 || !strings.Contains(body, "of this client") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	close(free)
	for _, c := range waiting {
		if resp, _ := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("%d", resp.StatusCode)
		}
	}
	over.send(chatPost(hello, "X-Forwarded-For: 198.51.100.7")) // on the same connection
	if resp, _ := over.readResponse(); resp.StatusCode != 200 {
		t.Errorf("afterwards: %d", resp.StatusCode)
	}
	testwait.Until(t, "nobody is counted", func() bool {
		return r.server.conns.countForIP("198.51.100.7") == 0 && r.server.conns.countForIP("198.51.100.8") == 0
	})
}

// logLines is a log that several goroutines write.
type logLines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
func (l *logLines) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }
