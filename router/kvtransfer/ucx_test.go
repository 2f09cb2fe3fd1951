package kvtransfer

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
)

// loopback are the networks of a router whose engines run on the same machine.
var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

// startOverUCX starts UCX from the NIXL wheel of a Python installation, with ZMQ as the next
// tier.
func startOverUCX(t *testing.T, python string, logs *strings.Builder) *Watcher {
	t.Helper()
	wheel(t, python)
	w := start(t, Options{
		UCX: &UCX{Settings: map[string]string{"TCP_PORT_RANGE": "24870-24899"}}, Search: nixl.Search{Python: []string{filepath.Dir(filepath.Dir(python))}},
		Endpoint: "tcp://127.0.0.1:*", Networks: loopback, Slots: 64, Log: slog.New(slog.NewTextHandler(logs, nil)),
	})
	testwait.Until(t, "UCX is up", func() bool { return w.Up(nixl.TierUCX) })
	if !listening(t, 24870, 24899) {
		t.Error("UCX listens on none of the configured ports")
	}
	return w
}

// listening returns whether a socket of this machine listens on one of the ports on a loopback
// address.
func listening(t *testing.T, from, to uint64) bool {
	b, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(b)) {
		f := strings.Fields(l)
		if len(f) < 4 || f[3] != "0A" || !strings.HasPrefix(f[1], "0100007F:") {
			continue
		}
		if port, err := strconv.ParseUint(f[1][9:], 16, 16); err == nil && port >= from && port <= to {
			return true
		}
	}
	return false
}

// TestRealConnectorOverUCX sends every kind of report over UCX from the connector's own
// package, by ctypes. When the worker dies, reports go over ZMQ, and over UCX again when the
// worker is back.
func TestRealConnectorOverUCX(t *testing.T) {
	py := python(t, "zmq, nixl_cu12")
	var logs strings.Builder
	w := startOverUCX(t, py, &logs)
	if s := w.Status(); s.Active != nixl.TierUCX || !strings.Contains(s.Reason, "nixl is off") && !strings.Contains(s.Reason, "UCX 1.") {
		t.Errorf("%+v", s)
	}
	url := listen(t, w, &logs)
	r := startReporter(t, py, url, "auto")
	reportAll(t, w, r, "ucx")

	before, _ := w.Document(netip.Addr{})
	w.ucx.Agent().Close() // simulates a failure
	testwait.Until(t, "the worker is seen to be dead", func() bool { return !w.Up(nixl.TierUCX) })
	if s := w.Status(); s.Active != nixl.TierZMQ && s.Active != nixl.TierUCX { // UCX may be up again already
		t.Errorf("active is %s: %s", s.Active, s.Reason)
	}
	wait := w.Open("between", time.Now())
	wait.AcquireSlot(time.Minute)
	r.send(fmt.Sprintf(`recv ok 1 1 cmpl-between-0-0badcafe {"sluice":%s}`, wait.AppendSlot(nil)))
	testwait.Until(t, "the report after the worker's death", func() bool { return wait.expected.Result().State == completion.Done })
	wait.Close()
	testwait.Until(t, "the worker is back", func() bool { return w.Up(nixl.TierUCX) })
	after, _ := w.Document(netip.Addr{})
	if after.UCX == nil || after.Epoch == before.Epoch {
		t.Fatal("the new worker is not offered")
	}
	w.Close()
	if strings.Contains(logs.String(), before.UCX.Secret) || strings.Contains(fmt.Sprintf("%v %+v", before, w.Status()), before.UCX.Secret) {
		t.Error("the secret is in the log or in what is printed")
	}
}

// TestRealUCXForgers: messages from a sender that knows the worker's address but not the secret
// are ignored and counted, and so are reports from a sender that knows the secret and guesses
// slots.
func TestRealUCXForgers(t *testing.T) {
	py := python(t, "zmq, nixl_cu12")
	var logs strings.Builder
	w := startOverUCX(t, py, &logs)
	d, err := w.Document(netip.Addr{})
	if err != nil || d.UCX == nil {
		t.Fatalf("%v, %v", d, err)
	}
	to := func(name string) func(string) {
		t.Helper()
		a, err := nixl.OpenUCX(t.Context(), nixl.UCXConfig{Agent: nixl.Config{Name: name, Parameters: map[string]string{"TLS": "tcp", "NET_DEVICES": "lo"}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		var major, minor byte
		fmt.Sscanf(d.UCX.Version, "%d.%d", &major, &minor)
		p, err := a.LoadPeer(t.Context(), append([]byte{'S', 'L', 'U', 'C', 'X', 1, major, minor, 1, 'r'}, d.UCX.Address...), "")
		if err != nil {
			t.Fatal(err)
		}
		return func(m string) {
			t.Helper()
			if err := a.Notify(t.Context(), p, []byte(m)); err != nil {
				t.Fatal(err)
			}
		}
	}
	wait := w.Open("mine", time.Now())
	defer wait.Close()
	forger, insider := to("0123456789abcdef0123456789abcdef"), to(d.UCX.Secret)
	for range 100 {
		forger(string(line("recv", "failed", "mine", 0, 0)))
	}
	testwait.Until(t, "the forger is counted", func() bool { return w.Reports()["unauthenticated"] == 100 })
	wait.AcquireSlot(time.Minute)
	rec := nixl.CompletionSlot{Index: wait.slot.Index, Sequence: wait.slot.Sequence, Nonce: wait.slot.Nonce + 1, Request: wait.slot.Request}.Record(nixl.Completion{Request: wait.slot.Request, Status: 1})
	insider(fmt.Sprintf("SLB1%c\x00\x00\x00%s", wait.slot.Index, rec[:]))
	testwait.Until(t, "the guessed completion slot is counted", func() bool { return w.Reports()["refused"] == 1 })
	insider(string(line("recv", "failed", "mine", 1, 1))) // names no slot although the request has one
	testwait.Until(t, "the line without a completion slot is counted", func() bool { return w.Reports()["refused"] == 2 })
	if wait.LostReason() != "" {
		t.Errorf("a forged report was believed: %s", wait.LostReason())
	}
	insider(fmt.Sprintf("SLUICE1 recv ok %d %016x 1 1 0/0/1 d0 cmpl-mine-0-0badcafe", wait.slot.Index, wait.slot.Nonce))
	testwait.Until(t, "the right report counts", func() bool { return wait.expected.Result().State == completion.Done })
}

func TestUCXWithoutADevice(t *testing.T) {
	w := start(t, Options{UCX: &UCX{}, Networks: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}, Slots: 64})
	testwait.Until(t, "the tier is off", func() bool { s, _ := w.ucx.Status(); return s == nixl.TierOff })
	if s := w.Status(); s.Active != nixl.TierHTTP || !strings.Contains(s.Reason, "203.0.113.0/24") || !strings.Contains(s.Reason, "ucx_devices") {
		t.Errorf("%+v; want what would help named", s)
	}
	if d, _ := w.Document(netip.Addr{}); d.UCX != nil {
		t.Error("it is offered")
	}
}

func TestDevicesIn(t *testing.T) {
	if got, err := devicesIn(loopback); err != nil || len(got) != 1 || got[0] != "lo" {
		t.Errorf("%v, %v; want lo", got, err)
	}
}
