package sim

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/testwait"
)

const streamBody = `{"prompt":[300,301],"max_tokens":20,"ignore_eos":true,"stream":true}`

func TestParseFault(t *testing.T) {
	f, err := faults.ParseFault("kind=status,path=/v1/,leg=prefill,n=3,skip=1,p=0.5,status=429,delay=2s,after=7")
	want := faults.Fault{Kind: faults.Status, Path: "/v1/", Leg: "prefill", N: 3, Skip: 1, P: 0.5, Status: 429, Delay: 2 * time.Second, After: 7}
	if err != nil || f != want {
		t.Errorf("%+v %v", f, err)
	}
	for former, now := range map[string]faults.Fault{"kind=cut": {Kind: faults.Truncate}, "kind=garbage": {Kind: faults.Malformed}, "kind=dead,leg=plain": {Kind: faults.Crash, Leg: "whole"}} {
		if f, err := faults.ParseFault(former); err != nil || f != now {
			t.Errorf("%q: %+v %v; want %+v", former, f, err, now)
		}
	}
	for _, bad := range []string{"", "kind", "kind=x", "path=/", "kind=status,status=200", "kind=slow,delay=x", "kind=slow,leg=x", "kind=slow,color=red"} {
		if _, err := faults.ParseFault(bad); err == nil || !strings.HasPrefix(err.Error(), "sim: cannot read fault") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestDeprecatedNames: each old name of the flags is accepted with one warning that gives the new one.
func TestDeprecatedNames(t *testing.T) {
	var o Options
	fs := flag.NewFlagSet("sim", flag.ContinueOnError)
	o.Flags(fs)
	if err := fs.Parse([]string{"--fault", "kind=dead,leg=plain", "--fault", "kind=cut,body=garbage", "--fault", "kind=slow", "--expired-handle", "garbage"}); err != nil {
		t.Fatal(err)
	}
	got, want := o.DeprecatedNames(), []string{"kind=crash", "leg=whole", "kind=truncate", "stale"}
	if len(got) != len(want) {
		t.Fatalf("%q, want one for each of %q", got, want)
	}
	for i, w := range want {
		if !strings.Contains(got[i], "now named "+w+";") {
			t.Errorf("%q, want the name %s", got[i], w)
		}
	}
}

func TestFaultStatus(t *testing.T) {
	e := fastOptions(t, Options{})
	e.Fault(faults.Fault{Kind: faults.Status, Status: 502, N: 2, Skip: 1, Path: "/v1/completions"})
	var got []int
	for range 4 {
		got = append(got, post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":1}`).status)
		if a := post(t, e, "/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"max_tokens":1}`); a.status != 200 {
			t.Errorf("another path: %d", a.status)
		}
	}
	if fmt.Sprint(got) != "[200 502 502 200]" {
		t.Errorf("statuses %v", got)
	}
	e.Fault(faults.Fault{Kind: faults.Status, Path: "/health"})
	if status, _ := get(t, e.URL()+"/health"); status != 503 {
		t.Errorf("health: %d, want 503", status)
	}
	e.ClearFaults()
	if status, _ := get(t, e.URL()+"/health"); status != 200 {
		t.Errorf("health after ClearFaults: %d", status)
	}
	if n := e.Stats().Faults; n != 3 {
		t.Errorf("%d faults counted, want 3", n)
	}
}

func TestFaultGarbage(t *testing.T) {
	e := fastOptions(t, Options{})
	e.Fault(faults.Fault{Kind: faults.Malformed, N: 1})
	if a := post(t, e, "/v1/completions", `{"prompt":[300]}`); a.status != 200 || a.json != nil {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestFaultRefuse(t *testing.T) {
	e := fastOptions(t, Options{})
	idle := dial(t, e.Addr())
	e.Fault(faults.Fault{Kind: faults.Refuse})
	if _, err := net.Dial("tcp", e.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v, want connection refused", err)
	}
	if _, err := idle.Read(make([]byte, 1)); err == nil {
		t.Error("idle connection was left open")
	}
	e.ClearFaults()
	if status, _ := get(t, e.URL()+"/health"); status != 200 {
		t.Errorf("health after: %d", status)
	}
	e.Fault(faults.Fault{Kind: faults.Refuse, Delay: time.Millisecond})
	testwait.Until(t, "listening again", func() bool { _, err := tryPost(e.URL()+"/ping", ""); return err == nil })
}

// wantNormal runs a stream under a fault and gives what came and how it ended.
func wantNormal(t *testing.T, e *Engine, f faults.Fault) (body string, err error) {
	t.Helper()
	e.Fault(f)
	c := dial(t, e.Addr())
	io.WriteString(c, request("/v1/completions", streamBody, "Connection: close"))
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestFaultMidStream(t *testing.T) {
	e := fastOptions(t, Options{})
	free := func() {
		t.Helper()
		testwait.Until(t, "blocks freed", func() bool { s := e.Stats().Sum(); return s.BlocksFree == s.BlocksTotal && s.Running == 0 })
	}
	body, err := wantNormal(t, e, faults.Fault{Kind: faults.Reset, After: 3, N: 1})
	if !errors.Is(err, syscall.ECONNRESET) || strings.Contains(body, "[DONE]") {
		t.Errorf("reset: %v %q", err, body)
	}
	free()
	body, err = wantNormal(t, e, faults.Fault{Kind: faults.Truncate, After: 3, N: 1})
	if n := strings.Count(body, "data: "); err != nil || n != 3 || strings.HasSuffix(body, "0\r\n\r\n") {
		t.Errorf("cut: %v, %d events, %q", err, n, body)
	}
	free()
	body, err = wantNormal(t, e, faults.Fault{Kind: faults.StreamFail, After: 3, N: 1})
	if n := strings.Count(body, "data: "); err != nil || n != 5 || !strings.Contains(body, `data: {"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}`) || !strings.HasSuffix(body, "0\r\n\r\n") {
		t.Errorf("streamfail: %v, %d events, %q", err, n, body)
	}
	free()
	body, err = wantNormal(t, e, faults.Fault{Kind: faults.Stall, After: 3, N: 1, Delay: 50 * time.Millisecond})
	if n := strings.Count(body, "data: "); err != nil || n != 21 {
		t.Errorf("stall that ends: %v, %d events", err, n)
	}
	start := time.Now()
	body, err = wantNormal(t, e, faults.Fault{Kind: faults.Slow, N: 1, Delay: 5 * time.Millisecond})
	if n := strings.Count(body, "data: "); err != nil || n != 21 || time.Since(start) < 100*time.Millisecond {
		t.Errorf("slow: %v, %d events in %v", err, n, time.Since(start))
	}
	free()
}

func TestFaultStallForEver(t *testing.T) {
	e := fastOptions(t, Options{})
	e.Fault(faults.Fault{Kind: faults.Stall, After: 2, N: 1})
	e.Fault(faults.Fault{Kind: faults.Stall, N: 1})
	c, _ := openStream(t, e.Addr(), "/v1/completions", streamBody, 2)
	silent := dial(t, e.Addr())
	io.WriteString(silent, request("/v1/completions", streamBody))
	for _, x := range []net.Conn{c, silent} {
		x.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if n, err := io.Copy(io.Discard, x); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("stalled connection gave %d bytes and %v", n, err)
		}
	}
	if a := post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":1}`); a.status != 200 {
		t.Errorf("other requests: %d", a.status)
	}
	c.Close()
	testwait.Until(t, "stalled request aborted", func() bool { return e.Stats().Sum().Aborted == 1 })
}

// A stall ends when its test says so, and the connection serves on.
func TestFaultStallUntil(t *testing.T) {
	e := fastOptions(t, Options{})
	until := make(chan struct{})
	e.Fault(faults.Fault{Kind: faults.Stall, N: 1, Until: until})
	nc := dial(t, e.Addr())
	ask := request("/v1/completions", `{"prompt":[300],"max_tokens":1}`)
	io.WriteString(nc, ask)
	nc.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
	if n, err := nc.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a stalled connection gave %d bytes and %v", n, err)
	}
	close(until)
	nc.SetReadDeadline(time.Now().Add(30 * time.Second))
	br := bufio.NewReader(nc)
	for range 2 {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
			t.Errorf("status %d, %v", resp.StatusCode, err)
		}
		io.WriteString(nc, ask)
	}
}

func TestFaultProbability(t *testing.T) {
	e := fastOptions(t, Options{FaultSeed: 1, Faults: []faults.Fault{{Kind: faults.Status, P: 0.3}}})
	bad := 0
	for range 200 {
		if post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":1}`).status == 503 {
			bad++
		}
	}
	if bad < 35 || bad > 85 {
		t.Errorf("%d of 200 failed at p=0.3", bad)
	}
}

// TestEngineDies: the request that kills gets its 500, streams an error event,
// then the port refuses; RestartAfter brings a new identity.
func TestEngineDies(t *testing.T) {
	e := fastOptions(t, Options{Speed: 1, Cost: cost.Model{Step: 2 * time.Millisecond}, RestartAfter: 50 * time.Millisecond})
	id := e.EngineID()
	_, br := openStream(t, e.Addr(), "/v1/completions", `{"prompt":[300],"max_tokens":100000,"ignore_eos":true,"stream":true}`, 2)
	a := post(t, e, "/v1/completions", `{"prompt":[300],"kv_transfer_params":{"do_remote_prefill":true}}`)
	if a.status != 500 || !strings.Contains(string(a.body), "EngineCore encountered an issue") {
		t.Errorf("killing request: %d %s", a.status, a.body)
	}
	rest, _ := io.ReadAll(br)
	if !strings.Contains(string(rest), `data: {"error":{"message":"EngineCore encountered`) || !strings.HasSuffix(string(rest), "0\r\n\r\n") {
		t.Errorf("stream ended with %q", lastBytes(string(rest), 300))
	}
	testwait.Until(t, "restarted", func() bool { return e.Alive() && e.EngineID() != id })
	if a := post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":1}`); a.status != 200 {
		t.Errorf("after restart: %d", a.status)
	}
	if s := e.Stats(); s.Crashes != 1 || s.Incarnations != 2 {
		t.Errorf("%+v", s)
	}
}

func TestDead(t *testing.T) {
	e := fastOptions(t, Options{})
	e.Fault(faults.Fault{Kind: faults.Crash, N: 1})
	select {
	case <-e.Dead():
		t.Fatal("dead before its time")
	default:
	}
	if a := post(t, e, "/v1/completions", `{"prompt":[300]}`); a.status != 500 {
		t.Errorf("status %d, want 500", a.status)
	}
	select {
	case <-e.Dead():
	case <-time.After(30 * time.Second):
		t.Fatal("not dead")
	}
}

func lastBytes(s string, n int) string { return s[max(0, len(s)-n):] }
