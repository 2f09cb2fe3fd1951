package engineapi

import (
	"context"
	be "encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/dataplane/wire"
	"sluice/router/admin"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
)

// TestEngineAPIHotRestart: a hot restart passes the framed socket to the new process like the other
// sockets. The new process serves new connections at once while streams of the old one continue.
// The test restarts twice.
func TestEngineAPIHotRestart(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	dir, path := t.TempDir(), harness.SocketIn(t)
	env := []string{"XDG_RUNTIME_DIR=" + dir}
	port := harness.FreePort(t)
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain", "120s", "--engine", e.URL(),
		"--set", "engine_api.unix_socket="+path, "--set", fmt.Sprintf("engine_api.listen=127.0.0.1:%d", port))
	r.Ready(t)
	addrs := []string{"unix://" + path, fmt.Sprintf("tcp://127.0.0.1:%d", port)}
	var pids []int
	t.Cleanup(func() {
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond, Body: "routed-long"})
	type active struct {
		c *client.Client
		s *client.Stream
	}
	var old []active // streams of all replaced processes
	for range 2 {
		before := harness.RuntimeOf(t, dir)
		for _, addr := range addrs {
			c := harness.DialRetry(t, addr)
			long := harness.EngineAPIRequest(harness.TokenIDs(40, 1), 50_000)
			long.Extra = map[string]any{"mark": "routed-long"}
			s := harness.StartEngineAPI(t, c, long)
			firstTokens(t, s)
			old = append(old, active{c, s})
		}
		harness.DropIdle()
		cmd := exec.Command(harness.BuiltBinary(t), "restart")
		cmd.Env = append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("restart: %v\n%s", err, out)
		}
		var now admin.Runtime // the new process writes it a moment after it serves
		testwait.UntilWithin(t, harness.TestTimeout, "the runtime file is the new process's", func() bool { now = harness.RuntimeOf(t, dir); return now.PID != before.PID })
		pids = append(pids, now.PID)
		for _, addr := range addrs {
			// One attempt suffices, because a process listens at any time.
			ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
			c, err := client.Dial(ctx, addr, client.Options{})
			cancel()
			if err != nil {
				t.Fatalf("%s after the restart: %v", addr, err)
			}
			if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(40, 2), 5)); a.Failure != nil || a.Err != nil || len(a.Tokens[0]) != 5 {
				t.Errorf("%s after the restart: %v %v", addr, a.Failure, a.Err)
			}
			c.Close()
		}
		for i, h := range old { // earlier streams continue
			firstTokens(t, h.s)
			testwait.UntilWithin(t, harness.TestTimeout, "the old process takes no new requests", func() bool {
				s, err := h.c.Generate(harness.EngineAPIRequest(harness.TokenIDs(40, 3), 2))
				if err == nil {
					err = harness.ReadEngineAPI(context.Background(), s).Err
				}
				var e *wire.Error
				return errors.As(err, &e) && e.Code == wire.CodeDraining
			})
			if !harness.IsRunning(before.PID) {
				t.Errorf("stream %d: process %d has ended over it", i, before.PID)
			}
		}
	}
	e.ClearFaults()
	for _, h := range old {
		h.s.Kill()
	}
	for _, pid := range []int{r.Cmd.Process.Pid, pids[0]} {
		testwait.UntilWithin(t, harness.TestTimeout, "a process that was replaced ends with its streams", func() bool { return !harness.IsRunning(pid) })
	}
	// No replaced process removed the socket file.
	for _, addr := range addrs {
		if a := harness.GenerateEngineAPI(t, harness.DialRetry(t, addr), harness.EngineAPIRequest(harness.TokenIDs(40, 4), 5)); a.Failure != nil || a.Err != nil {
			t.Errorf("%s when the old ones are gone: %v %v", addr, a.Failure, a.Err)
		}
	}
	syscall.Kill(pids[1], syscall.SIGTERM)
	testwait.UntilWithin(t, harness.TestTimeout, "the last process has ended", func() bool { return !harness.IsRunning(pids[1]) })
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the last process left the socket's file: %v", err)
	}
}

// TestEngineAPIStoppedProcess: the router process is stopped for several heartbeats. Afterwards it
// does not close callers whose heartbeats it could not read meanwhile.
func TestEngineAPIStoppedProcess(t *testing.T) {
	const heartbeat = 200 * time.Millisecond
	e := harness.StartSim(t, nil)
	path := harness.SocketIn(t)
	env, _ := harness.ServeEnv(t)
	r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--engine", e.URL(),
		"--set", "engine_api.unix_socket="+path, "--set", "engine_api.heartbeat="+heartbeat.String(), "--set", "health.timeout=20s")
	r.Ready(t)
	harness.DialRetry(t, "unix://"+path).Close()
	// A handwritten caller that answers pings and sends no requests: the client package would
	// itself close the connection to a silent router.
	nc, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	send := func(kind byte, stream uint32, payload string) {
		t.Helper()
		frame := append(be.BigEndian.AppendUint32(nil, uint32(len(payload))), kind)
		frame = append(be.BigEndian.AppendUint32(frame, stream), payload...)
		if _, err := nc.Write(frame); err != nil {
			t.Fatal(err)
		}
	}
	send(1, 0, "\x84\xa8protocol\xadsluice-routed\xa7version\x01\xa6oldest\x01\xa6window\xce\x00\x01\x00\x00") // as in docs/wire.md
	read := func() (kind byte, payload string) {
		t.Helper()
		_ = nc.SetReadDeadline(time.Now().Add(harness.TestTimeout))
		var head [9]byte
		if _, err := io.ReadFull(nc, head[:]); err != nil {
			t.Fatalf("the connection ended: %v", err)
		}
		body := make([]byte, be.BigEndian.Uint32(head[:]))
		if _, err := io.ReadFull(nc, body); err != nil {
			t.Fatal(err)
		}
		return head[4], string(body)
	}
	heartbeats := func(n int) {
		t.Helper()
		for n > 0 {
			switch kind, payload := read(); kind {
			case 9:
				send(10, 0, payload)
				n--
			case 12:
				t.Fatalf("the router closes: %q", payload)
			}
		}
	}
	heartbeats(2)
	for range 2 {
		if err := syscall.Kill(r.Cmd.Process.Pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		testwait.Pace(8 * heartbeat)
		if err := syscall.Kill(r.Cmd.Process.Pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		heartbeats(3)
	}
	send(3, 1, "\x82\xa9token_ids\x93\x01\x02\x03\xafstop_conditions\x81\xaamax_tokens\x02")
	for got := ""; !strings.Contains(got, "completion_usage"); {
		kind, payload := read()
		switch kind {
		case 4:
			got += payload
		case 9:
			send(10, 0, payload)
		case 5, 12:
			t.Fatalf("the stream ended with %q behind %q", payload, got)
		}
	}
}
