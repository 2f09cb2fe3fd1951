package front

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestBehindHAProxy lets a real haproxy name the client in each way it supports: PROXY headers of
// both versions, with its health checks (LOCAL), X-Forwarded-For, and Forwarded. The client
// connects from 127.0.0.5, haproxy from 127.0.0.9.
func TestBehindHAProxy(t *testing.T) {
	path, err := exec.LookPath("haproxy")
	if err != nil {
		if path = "/usr/sbin/haproxy"; !isFile(path) {
			t.Skip("haproxy is not installed (scripts/bootstrap.sh --bench installs it)")
		}
	}
	for _, k := range []struct {
		name, mode, server string
		proxies            Proxies
		client             string
	}{
		{"version 1", "tcp", "send-proxy", Proxies{ProxyProtocol: ProxyProtocolRequired}, "127.0.0.5"},
		{"version 2", "tcp", "send-proxy-v2 check inter 200ms", Proxies{ProxyProtocol: ProxyProtocolRequired}, "127.0.0.5"},
		{"version 2 with TLVs", "tcp", "send-proxy-v2 proxy-v2-options unique-id,crc32c\n  unique-id-format %[uuid()]", Proxies{ProxyProtocol: ProxyProtocolRequired}, "127.0.0.5"},
		{"X-Forwarded-For", "http", "\n  option forwardfor", Proxies{Forwarded: ForwardedX}, "127.0.0.5"},
		{"Forwarded", "http", "\n  http-request set-header Forwarded for=%[src]", Proxies{Forwarded: ForwardedRFC}, "127.0.0.5"},
		{"not believed", "http", "\n  option forwardfor", Proxies{}, "127.0.0.9"},
	} {
		t.Run(k.name, func(t *testing.T) {
			k.proxies.Trusted = networks(t, "127.0.0.9")
			r := start(t, Options{Proxies: k.proxies}, clientIPHandler)
			addr := startHAProxy(t, path, fmt.Sprintf("  mode %s\n  server s %s source 127.0.0.9 %s\n", k.mode, r.addr, k.server))
			for range 3 {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 5)}}
				nc, err := d.Dial("tcp", addr)
				if err != nil {
					t.Fatal(err)
				}
				defer nc.Close()
				_ = nc.SetDeadline(time.Now().Add(testTimeout))
				c := newClient(t, nc)
				c.send(chatPost(hello, "X-Forwarded-For: 6.6.6.6"))
				if resp, body := c.readResponse(); resp.StatusCode != 200 || body != `"`+k.client+`"` {
					t.Errorf("%d %s, want client %s", resp.StatusCode, body, k.client)
				}
			}
			if strings.Contains(k.server, "check") {
				testwait.Holds(t, 500*time.Millisecond, "no health check is refused", func() bool { return r.observed.refusals(BadProxyHeader) == 0 })
			}
			if n := r.observed.refusals(BadProxyHeader); n > 0 {
				t.Errorf("%d connections refused", n)
			}
		})
	}
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// startHAProxy runs haproxy on a listener that the test has opened, so that no other process can
// get the port in between.
func startHAProxy(t *testing.T, path, section string) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	file, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	conf := filepath.Join(t.TempDir(), "haproxy.cfg")
	text := "global\n  maxconn 100\ndefaults\n  timeout connect 20s\n  timeout client 60s\n  timeout server 60s\nlisten l\n  bind fd@3\n" + section
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var out logLines
	cmd := exec.Command(path, "-db", "-f", conf)
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("haproxy said:\n%s\nof\n%s", out.String(), text)
		}
	})
	return ln.Addr().String()
}
