package nixl

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// behaviorTests hold for every NIXL: the fake's and the real one's.
var behaviorTests = []struct {
	name string
	run  func(t *testing.T, w agentNetwork)
}{
	{"WriteWithNotification", testWriteWithNotification},
	{"ReadOfSpans", testReadOfSpans},
	{"NotifyOneWay", testNotifyOneWay},
	{"Refusals", testRefusals},
	{"Invalidation", testInvalidation},
	{"PeerThatCloses", testPeerThatCloses},
	{"ManyNotifications", testManyNotifications},
	{"CloseTwiceAndAfter", testCloseTwiceAndAfter},
	{"BoardByWrite", testBoardByWrite},
	{"BoardUnderLoad", testBoardUnderLoad},
}

func TestFakeBehaviours(t *testing.T) {
	for _, b := range behaviorTests {
		t.Run(b.name, func(t *testing.T) { b.run(t, fakeNetwork()) })
	}
}

func TestRealBehaviours(t *testing.T) {
	realNIXL(t)
	for _, b := range behaviorTests {
		t.Run(b.name, func(t *testing.T) { b.run(t, realNetwork()) })
	}
}

func testWriteWithNotification(t *testing.T, w agentNetwork) {
	var in inbox
	a := w.open(t, Config{Telemetry: true})
	b := w.open(t, Config{OnNotification: in.handler()})
	const size = 1 << 20
	src, dst := hostMemory(t, a, size), hostMemory(t, b, size)
	want := bytes.Repeat([]byte("kv block "), size/9+1)[:size]
	if err := src.Write(0, want); err != nil {
		t.Fatal(err)
	}
	p := connectAgents(t, a, b)
	tr := must[*Transfer](t)(a.Start(t.Context(), Write, []Span{{src, 0, size}}, p, []Remote{dst.Remote(0, size)}, []byte("req-42:1")))
	tel := must[Telemetry](t)(tr.Wait(t.Context()))
	if tel.Bytes != size || !tel.Measured || tel.Observed <= 0 {
		t.Errorf("telemetry %+v; want %d bytes, measured", tel, size)
	}
	testwait.Until(t, "the notification of the transfer", func() bool { return len(in.list()) == 1 })
	if got := in.list()[0]; got != a.Name()+":req-42:1" {
		t.Errorf("notification %q", got)
	}
	if !bytes.Equal(dst.Bytes(), want) {
		t.Error("the data that arrived is not what was sent")
	}
	if s := tr.Status(); s != Success {
		t.Errorf("status %v", s)
	}
}

func testReadOfSpans(t *testing.T, w agentNetwork) {
	a, b := w.open(t, Config{}), w.open(t, Config{})
	const n, each = 64, 4096
	dst, src := hostMemory(t, a, n*each), hostMemory(t, b, n*each)
	for i := range n {
		if err := src.Write(i*each, bytes.Repeat([]byte{byte(i + 1)}, each)); err != nil {
			t.Fatal(err)
		}
	}
	p := connectAgents(t, a, b)
	var local []Span
	var remote []Remote
	for i := range n { // backwards, so that a merge of neighbours would show
		local = append(local, Span{dst, i * each, each})
		remote = append(remote, src.Remote((n-1-i)*each, each))
	}
	tr := must[*Transfer](t)(a.Start(t.Context(), Read, local, p, remote, nil))
	must[Telemetry](t)(tr.Wait(t.Context()))
	for i := range n {
		if got := dst.Bytes()[i*each]; got != byte(n-i) {
			t.Fatalf("block %d holds %d, want %d", i, got, n-i)
		}
	}
}

func testNotifyOneWay(t *testing.T, w agentNetwork) {
	var in inbox
	a, b := w.open(t, Config{}), w.open(t, Config{OnNotification: in.handler()})
	p := connectAgents(t, a, b) // b never loads a
	long := strings.Repeat("x", 5000)
	for _, m := range []string{"HB:req1,req2", long, "\x00\xff binary", "end"} {
		if err := a.Notify(t.Context(), p, []byte(m)); err != nil {
			t.Fatal(err)
		}
	}
	testwait.Until(t, "four notifications", func() bool { return len(in.list()) == 4 })
	if got := in.list(); got[1] != a.Name()+":"+long || got[2] != a.Name()+":\x00\xff binary" {
		t.Errorf("notifications came changed: %.80q", got)
	}
}

func testRefusals(t *testing.T, w agentNetwork) {
	a, b := w.open(t, Config{}), w.open(t, Config{})
	m := hostMemory(t, a, 4096)
	other := hostMemory(t, b, 4096)
	p := connectAgents(t, a, b)
	for name, f := range map[string]func() error{
		"registered twice":    func() error { return a.Register(t.Context(), m) },
		"not registered here": func() error { return a.Deregister(t.Context(), other) },
		"garbage metadata":    func() error { _, err := a.LoadPeer(t.Context(), []byte("garbage"), "NIXL 1.3.2"); return err },
		"empty metadata":      func() error { _, err := a.LoadPeer(t.Context(), nil, ""); return err },
		"freed while in use":  m.Free,
		"span beyond its end": func() error {
			_, err := a.Start(t.Context(), Write, []Span{{m, 1, 4096}}, p, []Remote{other.Remote(0, 4096)}, nil)
			return err
		},
		"unequal lengths": func() error {
			_, err := a.Start(t.Context(), Write, []Span{{m, 0, 64}}, p, []Remote{other.Remote(0, 128)}, nil)
			return err
		},
		"memory of another": func() error {
			_, err := a.Start(t.Context(), Write, []Span{{other, 0, 64}}, p, []Remote{other.Remote(0, 64)}, nil)
			return err
		},
		"no spans":           func() error { _, err := a.Start(t.Context(), Write, nil, p, nil, nil); return err },
		"a message of 2 MiB": func() error { return a.Notify(t.Context(), p, make([]byte, 2<<20)) },
	} {
		if err := f(); err == nil {
			t.Errorf("%s: accepted", name)
		} else if !strings.HasPrefix(err.Error(), "nixl: cannot ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Unregistered memory of the peer: NIXL says so when the request is made.
	tr := must[*Transfer](t)(a.Start(t.Context(), Write, []Span{{m, 0, 64}}, p, []Remote{{DRAM, 0x10000, 64, 0}}, nil))
	if _, err := tr.Wait(t.Context()); err == nil {
		t.Error("a write to memory that the peer never registered succeeded")
	}
	if err := a.Health(); err != nil {
		t.Errorf("after refusals the agent is not healthy: %v", err)
	}
}

func testInvalidation(t *testing.T, w agentNetwork) {
	var in inbox
	a, b := w.open(t, Config{}), w.open(t, Config{OnNotification: in.handler()})
	p := connectAgents(t, a, b)
	if err := a.Notify(t.Context(), p, []byte("one")); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the first notification", func() bool { return len(in.list()) == 1 })
	if err := a.DropPeer(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if err := a.Notify(t.Context(), p, []byte("two")); !errors.Is(err, ErrPeerDead) {
		t.Errorf("to a dropped peer: %v; want ErrPeerDead", err)
	}
	if err := a.Post(p, []byte("two")); !errors.Is(err, ErrPeerDead) {
		t.Errorf("post to a dropped peer: %v; want ErrPeerDead", err)
	}
	p = connectAgents(t, a, b)
	if err := a.Notify(t.Context(), p, []byte("three")); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the notification after the metadata came again", func() bool { return len(in.list()) == 2 })
	if got := in.list(); !strings.HasSuffix(got[1], ":three") {
		t.Errorf("got %q", got)
	}
}

func testPeerThatCloses(t *testing.T, w agentNetwork) {
	down := make(chan string, 16)
	a := w.open(t, Config{OnPeerDown: func(p *Peer) { down <- p.Name() }})
	b := w.open(t, Config{})
	p := connectAgents(t, a, b)
	if err := a.Notify(t.Context(), p, []byte("alive")); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "sends to the closed peer to fail", func() bool { return a.Notify(t.Context(), p, []byte("gone?")) != nil })
	if got := <-down; got != b.Name() {
		t.Errorf("down: %q", got)
	}
	if err := a.Post(p, []byte("x")); !errors.Is(err, ErrPeerDead) {
		t.Errorf("post: %v; want ErrPeerDead", err)
	}
	if len(down) != 0 {
		t.Error("notified twice that the peer is down")
	}
}

func testManyNotifications(t *testing.T, w agentNetwork) {
	const n = 100_000
	next := 0
	bad := ""
	done := make(chan struct{})
	a := w.open(t, Config{})
	b := w.open(t, Config{Events: 256, OnNotification: func(m Notification) {
		if want := fmt.Sprintf("n%06d", next); string(m.Message) != want && bad == "" {
			bad = fmt.Sprintf("got %q, want %q", m.Message, want)
		}
		if next++; next == n {
			close(done)
		}
	}})
	p := connectAgents(t, a, b)
	began := time.Now()
	buf := []byte("n000000")
	for i := range n {
		for v, at := i, 6; at > 0; v, at = v/10, at-1 {
			buf[at] = '0' + byte(v%10)
		}
		var err error
		testwait.Until(t, "the agent has room", func() bool {
			err = a.Post(p, buf)
			return !errors.Is(err, ErrFull)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%d of %d notifications came", next, n)
	}
	if bad != "" {
		t.Errorf("out of order: %s", bad)
	}
	t.Logf("%d notifications through a ring of 256 in %s", n, time.Since(began).Round(time.Millisecond))
}

func testCloseTwiceAndAfter(t *testing.T, w agentNetwork) {
	a := w.open(t, Config{})
	b := w.open(t, Config{})
	p := connectAgents(t, a, b)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Post(p, []byte("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("post after close: %v", err)
	}
	if _, err := a.Metadata(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("metadata after close: %v", err)
	}
	if err := a.Health(); !errors.Is(err, ErrClosed) {
		t.Errorf("health after close: %v", err)
	}
}
