package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/native/dl"
)

// ucxNetwork opens agents over the UCX of the cached NIXL wheel, without NIXL.
func ucxNetwork() agentNetwork {
	return agentNetwork{name: "ucx", open: func(t testing.TB, cfg Config) *Agent {
		cfg.Search = realNIXL(t)
		return opened(t, cfg, func(ctx context.Context, cfg Config) (*Agent, error) { return OpenUCX(ctx, UCXConfig{Agent: cfg}) })
	}}
}

func TestRealUCXMessages(t *testing.T) {
	w := ucxNetwork()
	var at, bt inbox
	a, b := w.open(t, Config{Name: "a", OnNotification: at.handler()}), w.open(t, Config{Name: "b", OnNotification: bt.handler()})
	ab, ba := connectAgents(t, a, b), connectAgents(t, b, a)
	if l := a.Library(); l.NIXL != "" || !strings.Contains(l.String(), "UCX 1.23") {
		t.Errorf("library %s; want UCX 1.23 alone", l)
	}
	long := strings.Repeat("x", 60<<10)
	for _, m := range []string{"hello", "", "with\x00zero", long} {
		if err := a.Notify(t.Context(), ab, []byte(m)); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Notify(t.Context(), ba, []byte("back")); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the messages", func() bool { return len(bt.list()) == 4 && len(at.list()) == 1 })
	for i, want := range []string{"a:hello", "a:", "a:with\x00zero", "a:" + long} {
		if got := bt.list()[i]; got != want {
			t.Errorf("message %d is %.40q, want %.40q", i, got, want)
		}
	}
	if at.list()[0] != "b:back" {
		t.Errorf("the way back: %q", at.list())
	}
	for _, a := range []*Agent{a, b} {
		if err := a.Health(); err != nil {
			t.Error(err)
		}
		if c := a.Counters(); c.Unread != 0 || c.Signals != 0 {
			t.Errorf("%s: %+v; want nothing unread and no signal taken", a.Name(), c)
		}
	}
	if err := a.Notify(t.Context(), ab, make([]byte, 65<<10)); err == nil {
		t.Error("a message beyond 64 KiB was taken")
	}
	m := must[*Memory](t)(NewHostMemory(4096))
	if err := a.Register(t.Context(), m); err == nil || !strings.Contains(err.Error(), "lacks the call") {
		t.Errorf("registration over UCX alone: %v", err)
	}
	if err := a.DropPeer(t.Context(), ab); err != nil {
		t.Error(err)
	}
	if err := a.Notify(t.Context(), ab, []byte("x")); !errors.Is(err, ErrPeerDead) {
		t.Errorf("to a dropped peer: %v; want ErrPeerDead", err)
	}
}

// No message is lost, and none overtakes another, although the reader is slow and
// its ring is small.
func TestRealUCXBurst(t *testing.T) {
	n := 100_000
	if testing.Short() {
		n = 2_000
	}
	w := ucxNetwork()
	var next, wrong atomic.Int64
	b := w.open(t, Config{Events: 64, OnNotification: func(m Notification) {
		var i int64
		if _, err := fmt.Sscanf(string(m.Message), "%d", &i); err != nil || i != next.Load() {
			wrong.Add(1)
		}
		if next.Add(1)%int64(n/10) == 0 {
			testwait.Pace(5 * time.Millisecond)
		}
	}})
	a := w.open(t, Config{})
	p := connectAgents(t, a, b)
	for i := 0; i < n; {
		var err error
		testwait.Until(t, "the agent has room", func() bool {
			err = a.Post(p, fmt.Appendf(nil, "%d", i))
			return !errors.Is(err, ErrFull)
		})
		if err != nil {
			t.Fatal(err)
		}
		i++
	}
	testwait.Until(t, "all messages", func() bool { return next.Load() == int64(n) })
	if wrong.Load() != 0 || b.Counters().Unread != 0 {
		t.Errorf("%d of %d out of order, %d unread", wrong.Load(), n, b.Counters().Unread)
	}
}

func TestRealUCXRefusesAddresses(t *testing.T) {
	a := ucxNetwork().open(t, Config{Name: "a"})
	md := must[[]byte](t)(a.Metadata(t.Context()))
	for name, bad := range map[string][]byte{
		"of NIXL": []byte("nixlSerDes|"), "cut": md[:8], "no address": md[:10], "another version": append([]byte("SLUCX\x02"), md[6:]...),
		"a name with a NUL": append(append(append([]byte(nil), md[:9]...), 0), md[10:]...),
	} {
		if _, err := a.LoadPeer(t.Context(), bad, ""); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	old := append([]byte(nil), md...)
	old[7] = 21
	if _, err := a.LoadPeer(t.Context(), old, "UCX 1.21"); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "UCX 1.23") {
		t.Errorf("an address of UCX 1.21: %v; want ErrVersion that names ours", err)
	}
	if err := a.Health(); err != nil {
		t.Error(err)
	}
}

func TestRealUCXKilledPeer(t *testing.T) {
	realNIXL(t)
	down := make(chan time.Time, 1)
	a := ucxNetwork().open(t, Config{OnPeerDown: func(*Peer) { down <- time.Now() }})
	c := startChild(t, "ucx-peer:1.5.1")
	p := must[*Peer](t)(a.LoadPeer(t.Context(), c.metadata(t), ""))
	if err := a.Notify(t.Context(), p, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if l := c.line(t); l != "got hello" {
		t.Fatalf("the child says %q", l)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	// The socket reports it, without a send.
	select {
	case at := <-down:
		t.Logf("known %s after the kill", at.Sub(killed).Round(time.Microsecond))
	case <-time.After(10 * time.Second):
		t.Fatal("OnPeerDown was not called within 10s")
	}
	if err := a.Notify(t.Context(), p, []byte("gone?")); !errors.Is(err, ErrPeerDead) {
		t.Errorf("to a killed peer: %v; want ErrPeerDead", err)
	}
	again := startChild(t, "ucx-peer:1.5.1")
	p = must[*Peer](t)(a.LoadPeer(t.Context(), again.metadata(t), ""))
	if err := a.Notify(t.Context(), p, []byte("again")); err != nil {
		t.Fatal(err)
	}
	if l := again.line(t); l != "got again" {
		t.Errorf("the new child says %q", l)
	}
}

func childUCX(version string, on func(Notification)) *Agent {
	a, err := OpenUCX(context.Background(), UCXConfig{Agent: Config{Name: fmt.Sprintf("child-%d", os.Getpid()), OnNotification: on}, Path: wheelDir(version)})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
	return a
}

func TestRealUCXTier(t *testing.T) {
	search := realNIXL(t)
	above := StartAgentTier(AgentTierConfig{Agent: Config{Name: "router", Search: search}})
	defer above.Close()
	var got inbox
	tier := StartUCXTier(UCXTierConfig{UCX: UCXConfig{Agent: Config{Name: "router", OnNotification: got.handler()}}, After: above})
	defer tier.Close()
	reason := wantTier(t, tier, TierUp)
	if !strings.Contains(reason, "UCX 1.23") || tier.Tier() != TierUCX {
		t.Errorf("%s is up: %s; want UCX 1.23 named", tier.Tier(), reason)
	}
	// NIXL's own UCX was taken, not one of the loader's.
	if ucx := ResidentUCX(); len(ucx) != 1 || !strings.Contains(ucx[0], "nixl-1.5.1") {
		t.Errorf("libucp in this process: %v; want the wheel's alone", ucx)
	}
	if active, _ := (Tiers{tier}).Active(); active != TierUCX {
		t.Errorf("active %s", active)
	}
	a := tier.Agent()
	if a == nil {
		t.Fatal("no agent although the tier is up")
	}
	if err := a.Close(); err != nil { // as a failure would
		t.Fatal(err)
	}
	testwait.Until(t, "the closed agent to be noticed", func() bool { s, _ := tier.Status(); return s == TierDown })
	if len(got.list()) != 0 {
		t.Errorf("the self-test was handed on: %v", got.list())
	}
}

// One UCX in a process: another file is refused, with the reason.
func TestRealSecondUCXIsRefused(t *testing.T) {
	ucxNetwork().open(t, Config{})
	other := filepath.Join(t.TempDir(), "libucp.so.0")
	if err := os.WriteFile(other, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := LoadUCX(other, Search{}, loadLimit)
	var e *LoadError
	if !errors.As(err, &e) || e.Attempts[0].Code != dl.LoadOther || !strings.Contains(err.Error(), "no UCX") {
		t.Errorf("%v; want that another is loaded", err)
	}
}

func TestUCXCandidates(t *testing.T) {
	t.Setenv(UCXVariable, "")
	t.Setenv("VIRTUAL_ENV", "")
	t.Setenv("CONDA_PREFIX", "")
	root := t.TempDir()
	wheel := filepath.Join(root, "venv/lib/python3.11/site-packages/nixl_cu12.libs/libucp-0a.so.0.0.0")
	own := filepath.Join(root, "venv/lib/python3.11/site-packages/libucx/lib/libucp.so.0")
	for _, f := range []string{wheel, own} {
		if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := UCXCandidates("", Search{Python: []string{filepath.Join(root, "venv")}})
	if len(got) < 4 || got[0] != "" || got[1] != wheel || got[2] != own || got[3] != "libucp.so.0" {
		t.Errorf("candidates %q; want the resident, the wheels, the loader's", got)
	}
	for _, s := range []Search{
		{Path: filepath.Join(root, "venv/lib/python3.11/site-packages")},
		{Path: filepath.Join(root, "venv/lib/python3.11/site-packages/nixl_cu12.libs")},
	} {
		if got := UCXCandidates("", s); got[1] != wheel {
			t.Errorf("beside NIXL at %s: %q", s.Path, got)
		}
	}
	if got := UCXCandidates(filepath.Join(root, "none.so"), Search{}); len(got) != 1 {
		t.Errorf("a configured path: %q; want it alone", got)
	}
	t.Setenv(UCXVariable, filepath.Dir(own))
	if got := UCXCandidates("", Search{}); len(got) != 1 || got[0] != own {
		t.Errorf("the environment's directory: %q; want %q alone", got, own)
	}
}

func TestUCXStatusWords(t *testing.T) {
	for s, want := range map[Status]string{-225: "connection reset by the peer (UCX -25)", -299: "UCX -99", -301: "unknown status -301"} {
		if s.String() != want {
			t.Errorf("%d: %q, want %q", int32(s), s, want)
		}
	}
}
