package sidechannel

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/worker"
)

// realNIXL returns the wheel cached by scripts/nixl-wheel.sh.
func realNIXL(t *testing.T) nixl.Search {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache", "sluice")
	}
	dir := filepath.Join(cache, "nixl-1.5.1")
	if _, err := os.Stat(filepath.Join(dir, ".complete")); err != nil {
		if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
			t.Fatal("no NIXL 1.5.1 in the cache: run scripts/nixl-wheel.sh")
		}
		t.Skip("no NIXL 1.5.1 in the cache: run scripts/nixl-wheel.sh")
	}
	return nixl.Search{Path: dir}
}

// engine simulates a vLLM prefill engine with a real NIXL agent that records its notifications,
// and a real side channel that dies on an unknown query, as vLLM's does.
type engine struct {
	t     *testing.T
	id    string
	agent *nixl.Agent
	port  string
	end   func()

	mu       sync.Mutex
	received []string
	queries  int
	garbage  string
}

func (e *engine) heard() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.received...)
}

func startEngine(t *testing.T, id, port string) *engine {
	t.Helper()
	e := &engine{t: t, id: id}
	e.start(port)
	return e
}

func (e *engine) start(port string) {
	t := e.t
	t.Helper()
	agent, err := nixl.Open(t.Context(), nixl.Config{Name: "engine-" + e.id, Search: realNIXL(t), OnNotification: func(n nixl.Notification) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.received = append(e.received, string(n.Message))
	}})
	if err != nil {
		t.Fatal(err)
	}
	metadata, err := agent.Metadata(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	s, err := ctx.NewSocket(zmq.ROUTER)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.SetLinger(0), s.SetRcvtimeo(20*time.Millisecond), s.Bind("tcp://127.0.0.1:"+port)); err != nil {
		t.Fatal(err)
	}
	at, _ := s.GetLastEndpoint()
	e.agent, e.port = agent, at[strings.LastIndexByte(at, ':')+1:]
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				s.Close()
				return
			default:
			}
			m, err := s.RecvMessageBytes(0)
			if err != nil {
				continue
			}
			e.mu.Lock()
			e.queries++
			if len(m) != 3 || !bytes.Equal(m[2], []byte("\x93\xc4\x0cget_meta_msg\x00\x00")) {
				e.garbage = fmt.Sprintf("%q", m)
				e.mu.Unlock()
				return
			}
			e.mu.Unlock()
			s.SendMessage(m[0], "", payload(e.id, metadata), msgp.AppendFloat64(nil, 12.5))
		}
	}()
	var once sync.Once
	end := func() { once.Do(func() { close(stop); <-done; ctx.Term(); agent.Close() }) }
	t.Cleanup(end)
	e.end = end
}

func payload(id string, metadata []byte) []byte {
	inner := msgp.AppendMapHeader(nil, 3)
	inner = msgp.AppendString(msgp.AppendString(inner, "engine_id"), id)
	inner = msgp.AppendBytes(msgp.AppendString(inner, "agent_metadata"), metadata)
	inner = msgp.AppendArrayHeader(msgp.AppendString(inner, "kv_caches_base_addr"), 0)
	b := msgp.AppendMapHeader(nil, 2)
	b = msgp.AppendString(msgp.AppendString(b, "compatibility_hash"), strings.Repeat("ab", 32))
	return msgp.AppendBytes(msgp.AppendString(b, "agent_metadata_bytes"), inner)
}

func prefillRank(version string, networks ...netip.Prefix) *worker.Rank {
	w := worker.New(worker.Spec{ID: "p0", URL: "http://127.0.0.1:1", Networks: networks})
	w.SetInfo(&worker.Info{Engine: "vllm", Version: version})
	return w.Ranks[0]
}

func handleOf(engine, request, port string) []byte {
	return fmt.Appendf(nil, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":%q,"remote_request_id":%q,"remote_host":"127.0.0.1","remote_port":%s,"tp_size":1,"transfer_mode":"pull"}`, engine, request, port)
}

// TestRealSideChannel: abandoned handles are released, open leases are renewed, and handles
// that were passed on receive neither. The metadata of a restarted engine is loaded again, and
// the new engine receives no message for requests of its predecessor.
func TestRealSideChannel(t *testing.T) {
	ours, err := nixl.Open(t.Context(), nixl.Config{Name: "router", Search: realNIXL(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	rank := prefillRank("0.32.0+cpu")
	var met sync.Map // engine ids reported at the rank's own host
	k, err := New(Options{Agent: func() *nixl.Agent { return ours }, Release: true, renewInterval: 30 * time.Millisecond,
		OnEngineID: func(r *worker.Rank, engine string, asked time.Time) {
			if r != rank || asked.IsZero() || time.Since(asked) < 0 {
				t.Errorf("met %q of %v, asked at %v", engine, r, asked)
			}
			met.Store(engine, true)
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	e := startEngine(t, "e1", "*")

	k.Acquire(rank, handleOf("e1", "cmpl-passed-0-aa", e.port)).StopRenewal()
	began := time.Now()
	k.Acquire(rank, handleOf("e1", "cmpl-gone-0-aa", e.port)).Abandon()
	testwait.Until(t, "the abandoned one is released", func() bool { h := e.heard(); return len(h) == 1 && h[0] == "cmpl-gone-0-aa:1" })
	t.Logf("first release after %s, side channel and metadata included", time.Since(began))
	began = time.Now()
	k.Acquire(rank, handleOf("e1", "cmpl-gone-1-aa", e.port)).Abandon()
	testwait.Until(t, "the second is released", func() bool { return len(e.heard()) == 2 })
	t.Logf("second after %s", time.Since(began))

	held, other := k.Acquire(rank, handleOf("e1", "cmpl-held-0-aa", e.port)), k.Acquire(rank, handleOf("e1", "cmpl-held-1-aa", e.port))
	testwait.Until(t, "the held ones are renewed twice", func() bool {
		n := 0
		for _, m := range e.heard() {
			if ids, ok := strings.CutPrefix(m, "HB:"); ok && strings.Contains(ids, "cmpl-held-0-aa") && strings.Contains(ids, "cmpl-held-1-aa") {
				n++
			}
		}
		return n >= 2
	})
	over, far := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if left := time.Until(held.Until(over, 30*time.Second)); left < 10*time.Second || left > 20*time.Second {
		t.Errorf("a lease of 30 s, just renewed, has %s left; want two thirds", left)
	}
	if !held.Until(far, 30*time.Second).Equal(far) || !(*Lease)(nil).Until(over, 30*time.Second).Equal(over) {
		t.Error("a renewal shortens a lease, or nobody's renewal lengthens one")
	}
	held.StopRenewal()
	held.Abandon() // no effect: the decode engine has the handle
	other.StopRenewal()
	for _, m := range e.heard() {
		if strings.Contains(m, "held-0-aa:1") || strings.Contains(m, "passed") {
			t.Errorf("released %q of a handle that decode has", m)
		}
	}
	e.mu.Lock()
	if e.queries != 1 || e.garbage != "" {
		t.Errorf("asked %d times, junk %s; want once", e.queries, e.garbage)
	}
	e.mu.Unlock()

	// The engine restarts at the same port with another id.
	port := e.port
	e.end()
	e2 := startEngine(t, "e2", port)
	k.Acquire(rank, handleOf("e2", "cmpl-new-0-aa", port)).Abandon()
	testwait.Until(t, "the new process is notified", func() bool { h := e2.heard(); return len(h) == 1 && h[0] == "cmpl-new-0-aa:1" })
	_, _, before := k.Counts()
	k.Acquire(rank, handleOf("e0", "cmpl-old-0-aa", port)).Abandon()
	testwait.Until(t, "an older life's release fails", func() bool { _, _, f := k.Counts(); return f > before })
	if h := e2.heard(); len(h) != 1 {
		t.Errorf("the new life heard %q", h)
	}
	for _, id := range []string{"e1", "e2"} {
		if _, ok := met.Load(id); !ok {
			t.Errorf("it was not notified that %s was met", id)
		}
	}
	if _, released, _ := k.Counts(); released != 3 {
		t.Errorf("%d released, want 3", released)
	}
}

func TestSupportedEngines(t *testing.T) {
	in := netip.MustParsePrefix("127.0.0.0/8")
	for _, c := range []struct {
		name string
		rank *worker.Rank
		h    []byte
		ok   bool
	}{
		{"0.32", prefillRank("0.32.0"), handleOf("e", "r", "5600"), true},
		{"0.22", prefillRank("0.22.1rc2"), handleOf("e", "r", "5600"), true},
		{"0.21 has no leases", prefillRank("0.21.0"), handleOf("e", "r", "5600"), false},
		{"0.34 is not known", prefillRank("0.34.0"), handleOf("e", "r", "5600"), false},
		{"1.0 is not known", prefillRank("1.22.0"), handleOf("e", "r", "5600"), false},
		{"no version", prefillRank(""), handleOf("e", "r", "5600"), false},
		{"inside the networks", prefillRank("0.32.0", in), handleOf("e", "r", "5600"), true},
		{"outside", prefillRank("0.32.0", netip.MustParsePrefix("10.0.0.0/8")), handleOf("e", "r", "5600"), false},
		{"push", prefillRank("0.32.0"), bytes.Replace(handleOf("e", "r", "5600"), []byte(`"pull"`), []byte(`"push"`), 1), false},
		{"no request", prefillRank("0.32.0"), handleOf("e", "", "5600"), false},
		{"a request that would name two", prefillRank("0.32.0"), handleOf("e", "a,b", "5600"), false},
		{"an escape", prefillRank("0.32.0"), handleOf("e", `a\u002cb`, "5600"), false},
		{"a port too many", prefillRank("0.32.0"), handleOf("e", "r", "70000"), false},
		{"ranks too many", prefillRank("0.32.0"), bytes.Replace(handleOf("e", "r", "5600"), []byte(`"tp_size":1`), []byte(`"tp_size":1000`), 1), false},
		{"ranks whose product is nought", prefillRank("0.32.0"), bytes.Replace(handleOf("e", "r", "5600"), []byte(`"tp_size":1`), []byte(`"tp_size":4294967296,"pp_size":4294967296`), 1), false},
		{"a name without end", prefillRank("0.32.0"), handleOf(strings.Repeat("e", 513), "r", "5600"), false},
		{"another host's way", prefillRank("0.32.0"), bytes.Replace(handleOf("e", "r", "5600"), []byte(`127.0.0.1`), []byte(`a;b`), 1), false},
		{"nothing", prefillRank("0.32.0"), []byte(`{}`), false},
	} {
		if _, ok := readHandle(c.rank, c.h); ok != c.ok {
			t.Errorf("%s: %v, want %v", c.name, ok, c.ok)
		}
	}
	var k *Manager
	k.Acquire(prefillRank("0.32.0"), handleOf("e", "r", "1")).Abandon()
	k.Close()
}

// TestHandleHost checks when a handle's host is the rank's own, from which the manager learns engine ids.
func TestHandleHost(t *testing.T) {
	for _, c := range []struct {
		url, host string
		own       bool
	}{
		{"http://127.0.0.1:8100", "127.0.0.1", true}, {"http://127.0.0.1:8100", "127.0.0.2", false},
		{"http://[::1]:8100", "::1", true}, {"http://[::1]", "::1", true}, {"http://[::1]:8100", "::2", false},
	} {
		rank := prefillRank("0.32.0")
		rank.URL = c.url
		h, ok := readHandle(rank, bytes.Replace(handleOf("e", "r", "5600"), []byte("127.0.0.1"), []byte(c.host), 1))
		if !ok || h.ownHost != c.own {
			t.Errorf("%s, handle of %s: own host %v, want %v (readable %v)", c.url, c.host, h.ownHost, c.own, ok)
		}
	}
}

// TestWire uses bytes from a real engine's serializer (vLLM 0.33.0's msgspec classes).
func TestWire(t *testing.T) {
	if got, want := appendQuery(0, 1, true), "\x93\xc4\x0cget_meta_msg\x00\x01"; string(got) != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := appendQuery(0, 1, false), "\x92\xc4\x0cget_meta_msg\x01"; string(got) != want {
		t.Errorf("%q, want %q", got, want)
	}
	frame, err := os.ReadFile("testdata/nixl_handshake_payload_0.33.0.bin")
	if err != nil {
		t.Fatal(err)
	}
	engine, metadata, err := readAnswer(frame)
	if err != nil || engine == "" || len(metadata) == 0 {
		t.Errorf("engine %q, %d bytes: %v", engine, len(metadata), err)
	}
	for i := range frame {
		readAnswer(frame[:i]) // must not panic
	}
	if _, _, err := readAnswer([]byte("\x80")); !errors.Is(err, errAnswer) {
		t.Errorf("%v", err)
	}
}

// TestSilentSideChannel: a side channel that does not answer costs its timeout and does not
// block the router.
func TestSilentSideChannel(t *testing.T) {
	k, err := New(Options{Agent: func() *nixl.Agent { return nil }, Release: true})
	if err != nil {
		t.Fatal(err)
	}
	k.Acquire(prefillRank("0.32.0"), handleOf("e", "r", "1")).Abandon()
	testwait.Until(t, "the failure is counted", func() bool { _, _, f := k.Counts(); return f == 1 })
	k.Close()
}

// TestRealSilentEngine: an engine that accepts connections and never answers does not delay
// messages to other engines.
func TestRealSilentEngine(t *testing.T) {
	ours, err := nixl.Open(t.Context(), nixl.Config{Name: "router", Search: realNIXL(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	k, err := New(Options{Agent: func() *nixl.Agent { return ours }, Release: true})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	_, port, _ := net.SplitHostPort(silent.Addr().String())
	e, rank := startEngine(t, "e1", "*"), prefillRank("0.32.0+cpu")
	for i := range 8 {
		k.Acquire(rank, handleOf(fmt.Sprintf("silent%d", i), "cmpl-x-0-aa", port)).Abandon()
	}
	k.Acquire(rank, handleOf("e1", "cmpl-gone-0-aa", e.port)).Abandon()
	testwait.Until(t, "the other engine's blocks are released", func() bool { return len(e.heard()) == 1 })
	if _, _, failed := k.Counts(); failed > 0 {
		t.Errorf("%d silent engines were waited for first", failed)
	}
}
