package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestHealthCommand asks servers that run, that are not ready, and that are gone.
func TestHealthCommand(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/livez" {
			w.Write([]byte("ok\n"))
			return
		}
		w.WriteHeader(503)
		w.Write([]byte(`{"ready":false,"reason":"no worker"}`))
	}))
	defer server.Close()
	_, port, _ := strings.Cut(server.Listener.Addr().String(), ":")
	ask := func(args ...string) (string, int) {
		var out bytes.Buffer
		code := run(t.Context(), append([]string{"health"}, args...), &out, &out)
		return out.String(), code
	}
	for _, host := range []string{"127.0.0.1", "0.0.0.0", ""} {
		if out, code := ask("--engine", "http://127.0.0.1:1", "--listen", host+":"+port); code != 0 || out != "ok\n" {
			t.Errorf("a router that runs, listen %q: %d %s", host, code, out)
		}
	}
	if out, code := ask("--engine", "http://127.0.0.1:1", "--listen", "127.0.0.1:"+port, "--ready"); code != 1 || !strings.Contains(out, "no worker") {
		t.Errorf("a router that is not ready: %d %s", code, out)
	}
	server.Close()
	if out, code := ask("--engine", "http://127.0.0.1:1", "--listen", "127.0.0.1:"+port); code != 1 || !strings.Contains(out, "refused") {
		t.Errorf("no router: %d %s", code, out)
	}
}

// TestHealthCommandTLS asks a server whose certificate names another host.
func TestHealthCommandTLS(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("ok\n")) }))
	defer server.Close()
	var out bytes.Buffer
	code := run(t.Context(), []string{"health", "--engine", "http://127.0.0.1:1", "--listen", server.Listener.Addr().String(), "--set", "tls.cert=a.pem", "--set", "tls.key=b.pem"}, &out, &out)
	if code != 0 || out.String() != "ok\n" {
		t.Errorf("%d %s", code, out.String())
	}
}
