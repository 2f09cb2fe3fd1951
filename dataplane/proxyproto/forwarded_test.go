package proxyproto

import (
	"net/netip"
	"strings"
	"testing"
)

var trusted, _ = ParseNetworks([]string{"10.0.0.0/8", "fd00::/8", "127.0.0.1"})

func show(ip netip.Addr) string {
	if !ip.IsValid() {
		return ""
	}
	return ip.String()
}

func TestXForwardedFor(t *testing.T) {
	for _, c := range []struct {
		lines  []string
		client string
	}{
		{nil, ""},
		{[]string{""}, ""},
		{[]string{"192.0.2.1"}, "192.0.2.1"},
		{[]string{"6.6.6.6, 192.0.2.1"}, "192.0.2.1"}, // the client's own claim
		{[]string{"6.6.6.6, 192.0.2.1, 10.1.1.1"}, "192.0.2.1"},
		{[]string{"6.6.6.6", "192.0.2.1", "10.1.1.1,fd00::1"}, "192.0.2.1"},
		{[]string{"10.2.2.2, 10.1.1.1"}, "10.2.2.2"}, // a client inside
		{[]string{"192.0.2.1:4711, 10.1.1.1:1"}, "192.0.2.1"},
		{[]string{"[2001:db8::1]:4711"}, "2001:db8::1"},
		{[]string{"2001:db8::1"}, "2001:db8::1"},
		{[]string{"::ffff:192.0.2.1"}, "192.0.2.1"},
		{[]string{" 192.0.2.1 ,, 10.1.1.1 "}, "192.0.2.1"},
		{[]string{"6.6.6.6, unknown, 10.1.1.1"}, "10.1.1.1"}, // the earlier sender is unknown
		{[]string{"6.6.6.6, unknown"}, ""},
		{[]string{"6.6.6.6, <script>, 10.2.2.2, 10.1.1.1"}, "10.2.2.2"},
		{[]string{"192.0.2.1:http"}, ""},
		{[]string{"192.0.2.1:99999"}, ""},
		{[]string{"fe80::1%eth0"}, ""},
		{[]string{"[192.0.2.1]"}, ""},
		{[]string{"[::1"}, ""},
		{[]string{"192.0.2.1; 10.1.1.1"}, ""},
		{[]string{strings.Repeat("1", 100)}, ""},
	} {
		chain := ForwardedChain{Trusted: trusted}
		for _, l := range c.lines {
			chain.AddXForwardedFor([]byte(l))
		}
		if got := show(chain.Client()); got != c.client {
			t.Errorf("%q: %q, want %q", c.lines, got, c.client)
		}
	}
}

func TestForwarded(t *testing.T) {
	for _, c := range []struct {
		lines  []string
		client string
	}{
		{[]string{"for=192.0.2.1"}, "192.0.2.1"},
		{[]string{`For="[2001:db8:cafe::17]:4711"`}, "2001:db8:cafe::17"},
		{[]string{`for=192.0.2.60;proto=http;by=203.0.113.43`}, "192.0.2.60"},
		{[]string{`proto=http; for="192.0.2.60:_http" ;by=203.0.113.43 , for=10.0.0.1`}, "192.0.2.60"},
		{[]string{"for=6.6.6.6, for=192.0.2.43", "for=10.0.0.1"}, "192.0.2.43"},
		{[]string{`for=_hidden, for=_SEVKISEK`}, ""},
		{[]string{`for=6.6.6.6, for=unknown, for=10.0.0.1`}, "10.0.0.1"},
		{[]string{`for=6.6.6.6, by=10.0.0.1`}, ""},                           // an entry that tells no address
		{[]string{`for="6.6.6.6, for=192.0.2.1`}, ""},                        // an open quote
		{[]string{`for="6.6.6.6, for=7.7.7.7", for=192.0.2.1`}, "192.0.2.1"}, // a comma in quotes
		{[]string{`for="\"192.0.2.1"`}, ""},
		{[]string{`for=192.0.2.1;for=6.6.6.6`}, ""},
		{[]string{`for=6.6.6.6 192.0.2.1`}, ""},
		{[]string{`for=6.6.6.6`, `garbage`, `for=10.0.0.1`}, "10.0.0.1"},
		{[]string{", ,for=192.0.2.1, ;"}, "192.0.2.1"},
		{[]string{"for="}, ""},
		{[]string{"=1"}, ""},
		{[]string{`for=a"b"`}, ""},
	} {
		chain := ForwardedChain{Trusted: trusted}
		for _, l := range c.lines {
			chain.AddForwarded([]byte(l))
		}
		if got := show(chain.Client()); got != c.client {
			t.Errorf("%q: %q, want %q", c.lines, got, c.client)
		}
	}
}

func TestNetworks(t *testing.T) {
	for _, c := range []struct {
		word, in, out string
	}{
		{"10.0.0.0/8", "10.255.0.1", "11.0.0.1"},
		{"10.1.2.3/8", "10.255.0.1", "11.0.0.1"},
		{"192.0.2.1", "192.0.2.1", "192.0.2.2"},
		{"::ffff:10.0.0.0/104", "10.9.9.9", "11.0.0.1"},
		{"fd00::/8", "fd12::1", "fe80::1"},
		{"::1", "::1", "::2"},
	} {
		n, err := ParseNetworks([]string{c.word})
		if err != nil {
			t.Errorf("%q: %v", c.word, err)
			continue
		}
		if !n.Contain(netip.MustParseAddr(c.in)) || n.Contain(netip.MustParseAddr(c.out)) {
			t.Errorf("%q holds the wrong ones", c.word)
		}
	}
	for _, word := range []string{"", "10.0.0.0/33", "all", "fe80::1%eth0", "10.0.0.0/8,::1"} {
		if _, err := ParseNetworks([]string{word}); err == nil || !strings.Contains(err.Error(), `"`+word+`"`) {
			t.Errorf("%q: %v", word, err)
		}
	}
}

func TestChainAllocatesNothing(t *testing.T) {
	x, f := []byte("6.6.6.6, [2001:db8::1]:47, 10.1.1.1, unknown, 192.0.2.1"), []byte(`for="[2001:db8::1]:4711";proto=https, for=10.1.1.1`)
	if n := testing.AllocsPerRun(100, func() {
		chain := ForwardedChain{Trusted: trusted}
		chain.AddXForwardedFor(x)
		chain.AddForwarded(f)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzChain holds AddXForwardedFor against the plain way from the right, and both forms
// against each other where an address is written the same.
func FuzzChain(f *testing.F) {
	for _, s := range []string{"192.0.2.1", "6.6.6.6, 10.0.0.1", "unknown,::1", `for="[::1]:1"`, `for=a;for=b`, "[", `"\`, "10.0.0.1,10.0.0.2", ",,", "1.2.3.4:5"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, one, two string) {
		chain := ForwardedChain{Trusted: trusted}
		chain.AddXForwardedFor([]byte(one))
		chain.AddXForwardedFor([]byte(two))
		want := fromTheRight(one + "," + two)
		if chain.Client() != want {
			t.Fatalf("%q, %q: %v, from the right %v", one, two, chain.Client(), want)
		}
		forwarded := ForwardedChain{Trusted: trusted}
		forwarded.AddForwarded([]byte(one))
		forwarded.AddForwarded([]byte(two))
		if ip := forwarded.Client(); ip.IsValid() && (ip.Zone() != "" || ip.Is4In6()) {
			t.Fatalf("%v", ip)
		}
		forwarded.AddForwarded([]byte("for=203.0.113.9"))
		if ip := forwarded.Client(); ip != netip.MustParseAddr("203.0.113.9") {
			t.Fatalf("%q, %q: what a trusted proxy wrote is %v", one, two, ip)
		}
	})
}

func fromTheRight(lines string) (client netip.Addr) {
	all := strings.Split(lines, ",")
	for i := len(all) - 1; i >= 0; i-- {
		entry := strings.Trim(all[i], " \t")
		if entry == "" {
			continue
		}
		ip := parseNode([]byte(entry))
		if !ip.IsValid() {
			return client
		}
		if client = ip; !trusted.Contain(ip) {
			return client
		}
	}
	return client
}
