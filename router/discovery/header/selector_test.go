package header

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/front"
	"sluice/router/fleet"
	"sluice/router/pd"
	"sluice/router/worker"
)

type headers map[string]string

func (h headers) Header(name string) []byte {
	if v, ok := h[name]; ok {
		return []byte(v)
	}
	return nil
}

func nets(t *testing.T, text string) []netip.Prefix {
	t.Helper()
	n, err := ParseNetworks(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// fakeResolver is a Resolver with a table of hosts.
type fakeResolver struct {
	mu    sync.Mutex
	hosts map[string][]string
	asked int
}

func (n *fakeResolver) set(host string, addrs ...string) {
	n.mu.Lock()
	n.hosts[host] = addrs
	n.mu.Unlock()
}

func (n *fakeResolver) LookupNetIP(_ context.Context, _, host string) (addrs []netip.Addr, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked++
	if n.hosts[host] == nil {
		return nil, errors.New("no such host")
	}
	for _, a := range n.hosts[host] {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	return addrs, nil
}

func start(t *testing.T, opt Options) (*Selector, *fleet.Fleet) {
	t.Helper()
	f := fleet.New(fleet.Options{})
	opt.Fleet = f
	n := New(opt)
	t.Cleanup(func() {
		n.Close()
		if left := f.TransientWorkers(); left != 0 {
			t.Errorf("%d guests are left in the fleet", left)
		}
		f.Close()
	})
	return n, f
}

func urls(out pd.Selection) string {
	var all []string
	for _, r := range out.Prefill {
		all = append(all, strings.TrimPrefix(r.URL, "http://"))
	}
	return strings.Join(all, " ")
}

func TestHeaderForms(t *testing.T) {
	dns := &fakeResolver{hosts: map[string][]string{"p.pods.local": {"10.1.0.9"}, "two.pods.local": {"10.1.0.8", "10.1.0.7"}}}
	n, _ := start(t, Options{Networks: nets(t, "10.0.0.0/8, fd00::/8"), Resolver: dns})
	for _, c := range []struct{ header, value, want string }{
		{HeaderPrefiller, "10.0.0.1:8000", "10.0.0.1:8000"},
		{HeaderPrefiller, " 10.0.0.1:8000 , 10.0.0.2:8000,", "10.0.0.1:8000 10.0.0.2:8000"},
		{HeaderPrefiller, "10.0.0.2:8000,10.0.0.1:8000,10.0.0.2:8000", "10.0.0.2:8000 10.0.0.1:8000"},
		{HeaderPrefiller, "[fd00::1]:8000", "[fd00::1]:8000"},
		{HeaderPrefiller, "[::ffff:10.0.0.1]:8000", "10.0.0.1:8000"},
		{HeaderPrefiller, "P.Pods.local:8000", "10.1.0.9:8000"},
		{HeaderPrefiller, "two.pods.local:8000", "10.1.0.7:8000"},
		{HeaderPrefiller, "gone.pods.local:8000,10.0.0.1:8000", "10.0.0.1:8000"},
		{HeaderPrefiller, "", ""},
		{HeaderPrefill, "10.0.0.1:8000;rank=3;bootstrap_port=8998", "10.0.0.1:8000"},
		{HeaderPrefill, "none", ""},
	} {
		for range 2 { // first uncached, then from the cache
			out, refusal := n.Select(headers{c.header: c.value})
			if refusal != nil {
				t.Errorf("%s: %q: refused: %s", c.header, c.value, refusal.Message)
			} else if got := urls(out); got != c.want {
				t.Errorf("%s: %q names %q, want %q", c.header, c.value, got, c.want)
			}
			if out.NoPrefill != (c.value == "none") {
				t.Errorf("%s: %q: plain is %v", c.header, c.value, out.NoPrefill)
			}
		}
	}
	out, _ := n.Select(headers{HeaderPrefill: "10.0.0.1:8000;rank=3;bootstrap_port=8998", HeaderPrefiller: "10.0.0.2:8000"})
	if r := out.Prefill[0]; r.ID.Rank != 3 || !r.SendRank || r.Worker.Spec.Options["bootstrap_port"][0] != "8998" || r.URL != "http://10.0.0.1:8000" {
		t.Errorf("our own header names %+v of %+v", r.ID, r.Worker.Spec)
	}
	if got := n.Workers(); got != 6 {
		t.Errorf("%d guests; want 6: one for each address, rank and bootstrap port", got)
	}
}

func TestRefused(t *testing.T) {
	dns := &fakeResolver{hosts: map[string][]string{"half.evil": {"10.0.0.1", "192.168.0.1"}, "meta.evil": {"169.254.169.254"}, "lo.evil": {"127.0.0.1"}, "mapped.evil": {"::ffff:127.0.0.1"}}}
	n, f := start(t, Options{Networks: nets(t, "10.0.0.0/8,0.0.0.0/1,fd00::/8,::/0,169.0.0.0/8"), Ports: []Ports{{8000, 8999}}, Resolver: dns})
	for _, value := range []string{
		"192.168.0.1:8000", "127.0.0.1:8000", "[::1]:8000", "0.0.0.0:8000", "[::]:8000", "[::ffff:127.0.0.1]:8000", "[::ffff:7f00:1]:8000",
		"169.254.169.254:8000", "[fe80::1]:8000", "[fe80::1%25eth0]:8000", "[fd00::1%eth0]:8000", "224.0.0.1:8000", "[ff02::1]:8000", "255.255.255.255:8000",
		"2130706433:8000", "0x7f000001:8000", "0x7f.1:8000", "0177.0.0.1:8000", "127.1:8000", "10.1:8000", "010.0.0.1:8000", "10.0.0.1.:8000", "1.2.3.4.5:8000",
		"10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:080", "10.0.0.1:+8000", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1:22", "10.0.0.1:9000", "10.0.0.1:8000:8001",
		"fd00::1:8000", "[10.0.0.1]:8000", "[fd00::1:8000", ":8000",
		"user@10.0.0.1:8000", "user:pw@10.0.0.1:8000", "10.0.0.1@192.168.0.1:8000", "http://10.0.0.1:8000", "10.0.0.1:8000/x", "10.0.0.1:8000?x", "10.0.0.1/8:8000", "10.0.0.1#:8000",
		"10.0.0.1\\@x:8000", "10.0.0.1 x:8000", "10.0.0.1%00:8000", "１０.0.0.1:8000", "10。0。0。1:8000", "-a.b:8000", "a..b:8000",
		"half.evil:8000", "meta.evil:8000", "lo.evil:8000", "mapped.evil:8000",
		"10.0.0.1:8000;rank=1", "10.0.0.1:8000,192.168.0.1:8000", ",", strings.Repeat("10.0.0.1:8000,", 9), strings.Repeat("a", 600) + ":8000",
	} {
		out, refusal := n.Select(headers{HeaderPrefiller: value})
		if refusal == nil {
			t.Errorf("%q was let through: %s", value, urls(out))
			continue
		}
		if refusal.Reason != front.BadHeader || !strings.Contains(refusal.Message, HeaderPrefiller) || !strings.Contains(refusal.Message, "want") && !strings.Contains(refusal.Message, "lies outside") && !strings.Contains(refusal.Message, "names more") && !strings.Contains(refusal.Message, "not an address of one host") {
			t.Errorf("%q: the refusal helps nobody: %s %q", value, refusal.Reason, refusal.Message)
		}
	}
	for _, value := range []string{"10.0.0.1:8000;rank=70000", "10.0.0.1:8000;x=1", "10.0.0.1:8000;", "10.0.0.1:8000;bootstrap_port=22", "10.0.0.1:8000;bootstrap_port=0"} {
		if _, refusal := n.Select(headers{HeaderPrefill: value}); refusal == nil || refusal.Reason != front.BadHeader {
			t.Errorf("%q was let through", value)
		}
	}
	// A cached entry with keys of X-Sluice-Prefill is not valid in the other header.
	if _, refusal := n.Select(headers{HeaderPrefill: "10.0.0.1:8000;rank=1"}); refusal != nil {
		t.Fatal(refusal.Message)
	}
	if _, refusal := n.Select(headers{HeaderPrefiller: "10.0.0.1:8000;rank=1"}); refusal == nil {
		t.Error("the other router's header accepted a key of this one")
	}
	if f.TransientWorkers() > 2 {
		t.Errorf("%d guests of refused requests", f.TransientWorkers())
	}

	none, _ := start(t, Options{Resolver: dns})
	if _, refusal := none.Select(headers{HeaderPrefiller: "10.0.0.1:8000"}); refusal == nil || !strings.Contains(refusal.Message, "--prefill-networks") {
		t.Errorf("without networks: %+v", refusal)
	}
	if dns.asked == 0 {
		t.Error("no name was looked up")
	}
}

func TestRankAddress(t *testing.T) {
	n, _ := start(t, Options{Ranks: map[string]uint16{"127.0.0.1:8200": 0, "127.0.0.1:8201": 1}})
	out, refusal := n.Select(headers{HeaderRank: "127.0.0.1:8201"})
	if refusal != nil || !out.HasRank || out.Rank != 1 || out.Prefill != nil {
		t.Errorf("%+v, %v", out, refusal)
	}
	for _, v := range []string{"127.0.0.1:8202", "10.0.0.1:8201", "", "127.1:8201"} {
		_, refusal := n.Select(headers{HeaderRank: v})
		if refusal == nil || !strings.Contains(refusal.Message, "127.0.0.1:8201 (rank 1)") {
			t.Errorf("%q: %+v", v, refusal)
		}
	}
}

// TestRebinding checks that a name whose addresses change is checked again, and that its worker
// keeps the checked address.
func TestRebinding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dns := &fakeResolver{hosts: map[string][]string{}}
		dns.set("p.pods", "10.0.0.1")
		n, _ := start(t, Options{Networks: nets(t, "10.0.0.0/8"), Resolver: dns, ResolveTTL: 10 * time.Second})
		name := func() (string, *pd.Refusal) {
			out, refusal := n.Select(headers{HeaderPrefiller: "p.pods:8000"})
			return urls(out), refusal
		}
		if got, _ := name(); got != "10.0.0.1:8000" {
			t.Fatal(got)
		}
		dns.set("p.pods", "192.168.0.1")
		if got, _ := name(); got != "10.0.0.1:8000" || dns.asked != 1 {
			t.Errorf("while the address is cached: %q after %d look-ups", got, dns.asked)
		}
		time.Sleep(11 * time.Second)
		if got, refusal := name(); refusal == nil {
			t.Errorf("after the address has expired it names %q", got)
		}
		dns.set("p.pods", "10.0.0.3", "10.0.0.2")
		if got, _ := name(); got != "10.0.0.2:8000" {
			t.Errorf("it moved to %q", got)
		}
		time.Sleep(11 * time.Second)
		dns.set("p.pods", "10.0.0.1", "10.0.0.2", "10.0.0.0")
		if got, _ := name(); got != "10.0.0.1:8000" && got != "10.0.0.2:8000" {
			t.Errorf("a name with several addresses left those it had: %q", got)
		}
		time.Sleep(11 * time.Second)
		dns.set("p.pods")
		delete(dns.hosts, "p.pods")
		if got, refusal := name(); refusal != nil || got == "" {
			t.Errorf("a name server that is away: %q, %+v", got, refusal)
		}
	})
}

func TestIdleWorkersAreRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		joined, left := map[string]int{}, map[string]int{}
		var mu sync.Mutex
		count := func(m map[string]int) func(*worker.Worker) {
			return func(w *worker.Worker) { mu.Lock(); m[w.Spec.ID]++; mu.Unlock() }
		}
		gone := func(id string) int { mu.Lock(); defer mu.Unlock(); return left[id] }
		n, f := start(t, Options{Networks: nets(t, "10.0.0.0/8"), MaxWorkers: 4, IdleTimeout: time.Minute, OnAdded: count(joined), OnRemoved: count(left)})
		name := func(i int) *pd.Refusal {
			_, refusal := n.Select(headers{HeaderPrefiller: fmt.Sprintf("10.0.0.%d:8000", i)})
			return refusal
		}
		for i := range 4 {
			if r := name(i + 1); r != nil {
				t.Fatal(r.Message)
			}
		}
		if r := name(5); r == nil || r.Reason != front.PoolOverloaded || r.RetryAfter == 0 {
			t.Errorf("a fifth while four are fresh: %+v", r)
		}
		time.Sleep(10 * time.Second)
		name(1)
		out, _ := n.Select(headers{HeaderPrefiller: "10.0.0.2:8000"})
		out.Prefill[0].Requests.Add(1)
		if r := name(5); r != nil {
			t.Errorf("a fifth, in place of an old one: %s", r.Message)
		}
		if f.TransientWorkers() != 4 || gone("10.0.0.1:8000")+gone("10.0.0.2:8000") != 0 {
			t.Errorf("%d guests; one named lately, or with a request, went", f.TransientWorkers())
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if f.TransientWorkers() != 1 || gone("10.0.0.2:8000") != 0 {
			t.Errorf("%d guests after an idle time; want the one with a request", f.TransientWorkers())
		}
		out.Prefill[0].Requests.Add(-1)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if f.TransientWorkers() != 0 || len(*n.byText.Load()) != 0 {
			t.Errorf("%d guests and %d texts after all ended", f.TransientWorkers(), len(*n.byText.Load()))
		}
		mu.Lock()
		defer mu.Unlock()
		if len(joined) != 5 || len(left) != 5 {
			t.Errorf("joined %v, left %v", joined, left)
		}
	})
}

// TestEntriesAreBounded checks that many spellings of one worker lead to one worker, and that only
// maxTexts of them are cached.
func TestEntriesAreBounded(t *testing.T) {
	n, f := start(t, Options{Networks: nets(t, "fd00::/8")})
	for i := range 50 {
		text := "[fd00:" + strings.Repeat("0", i%4) + "0::" + strings.Repeat("0", i%3) + "1]:8000"
		if _, r := n.Select(headers{HeaderPrefiller: text}); r != nil {
			t.Fatal(r.Message)
		}
	}
	if f.TransientWorkers() != 1 || len(*n.byText.Load()) > maxTexts {
		t.Errorf("%d guests, %d texts", f.TransientWorkers(), len(*n.byText.Load()))
	}
}

func TestKnownEntryDoesNotAllocate(t *testing.T) {
	n, _ := start(t, Options{Networks: nets(t, "10.0.0.0/8"), Ranks: map[string]uint16{"127.0.0.1:8200": 0}})
	h := fixed{prefill: []byte("10.0.0.1:8000"), rank: []byte("127.0.0.1:8200")}
	if _, r := n.Select(h); r != nil {
		t.Fatal(r.Message)
	}
	if a := testing.AllocsPerRun(100, func() { n.Select(&h) }); a > 0 {
		t.Errorf("a worker met before costs %v allocations", a)
	}
}

type fixed struct{ prefill, rank []byte }

func (f fixed) Header(name string) []byte {
	switch name {
	case HeaderPrefiller:
		return f.prefill
	case HeaderRank:
		return f.rank
	}
	return nil
}

func TestParseLists(t *testing.T) {
	for _, bad := range []string{"10.0.0.0", "x/8", "10.0.0.0/33", "::ffff:10.0.0.0/104"} {
		if _, err := ParseNetworks(bad); err == nil {
			t.Errorf("network %q", bad)
		}
	}
	for _, bad := range []string{"0", "x", "9-8", "1-70000", "-5"} {
		if _, err := ParsePorts(bad); err == nil {
			t.Errorf("ports %q", bad)
		}
	}
	p, err := ParsePorts("8000, 8100-8200")
	if err != nil || !slices.Equal(p, []Ports{{8000, 8000}, {8100, 8200}}) {
		t.Errorf("%v, %v", p, err)
	}
}

func FuzzTarget(f *testing.F) {
	f.Add("10.0.0.1:8000;rank=1")
	f.Add("[fd00::1]:8000")
	f.Add("a.b:1")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseEntry(text, true)
		if err != nil {
			return
		}
		if got.port == 0 || got.addr.IsValid() == (got.host != "") || got.addr.Is4In6() || got.addr.Zone() != "" {
			t.Errorf("%q reads as %+v", text, got)
		}
		if _, err := netip.ParseAddr(got.host); err == nil {
			t.Errorf("%q: an address as a host name", text)
		}
	})
}
