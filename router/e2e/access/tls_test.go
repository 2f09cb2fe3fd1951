package access

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// startTLSEngine starts an engine that accepts only HTTPS, and returns it with the file of its
// certificate.
func startTLSEngine(t *testing.T, left chan<- struct{}) (*httptest.Server, string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model"}]}`)
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !bytes.Contains(body, []byte(`"stream":true`)) {
			harness.ReplyJSON(w, 200, `{"choices":[{"text":"whole"}]}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, word := range []string{"one ", "two ", "three"} {
			io.WriteString(w, `data: {"choices":[{"text":"`+word+"\"}]}\n\n")
			w.(http.Flusher).Flush()
			testwait.Pace(time.Millisecond)
		}
		if bytes.Contains(body, []byte("forever")) {
			<-r.Context().Done()
			left <- struct{}{}
			return
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})
	e := httptest.NewTLSServer(mux)
	t.Cleanup(func() { e.CloseClientConnections(); e.Close() })
	ca := filepath.Join(t.TempDir(), "engines.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: e.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return e, ca
}

// TestTLSOnBothSides alternates streamed and other requests over one connection, with TLS to the client
// and to the engine.
func TestTLSOnBothSides(t *testing.T) {
	left := make(chan struct{}, 1)
	e, ca := startTLSEngine(t, left)
	cert, key := harness.WriteCert(t, t.TempDir())
	r := harness.StartRouter(t, func(c *config.Config) {
		c.TLS = config.TLS{Cert: cert, Key: key, MinVersion: "1.2"}
		c.EngineTLS.CA = ca
	}, config.Worker{ID: "e", URL: e.URL, Role: worker.Aggregated})
	pem, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	nc, err := tls.Dial("tcp", r.Addr(), &tls.Config{RootCAs: roots, ServerName: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	br := bufio.NewReader(nc)
	send := func(body string) *http.Response {
		t.Helper()
		_ = nc.SetDeadline(time.Now().Add(20 * time.Second))
		req, _ := http.NewRequest("POST", "https://a/v1/completions", strings.NewReader(body))
		if err := req.Write(nc); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(br, req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	for i := range 6 {
		body, want := harness.KeyBody, "whole"
		if i%2 == 1 {
			body, want = strings.Replace(harness.KeyBody, "{", `{"stream":true,`, 1), "one two three"
		}
		resp := send(body)
		got, err := io.ReadAll(resp.Body)
		a := &harness.Answer{Status: resp.StatusCode, Header: resp.Header, Body: got}
		if err != nil || a.Status != 200 || a.Text(t) != want {
			t.Fatalf("request %d: %d %s, %v", i, a.Status, a.Body, err)
		}
	}
	resp := send(`{"stream":true,"model":"sim","prompt":"forever"}`)
	if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	nc.Close()
	select {
	case <-left:
	case <-time.After(10 * time.Second):
		t.Error("the engine's leg goes on although the client has left")
	}

	// Plain HTTP to the HTTPS listener, and a client that sends nothing.
	idle, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	plain, err := http.Get(strings.Replace(r.URL, "https", "http", 1) + "/livez")
	if err != nil {
		t.Fatal(err)
	}
	hint, _ := io.ReadAll(plain.Body)
	plain.Body.Close()
	if plain.StatusCode != 400 || !strings.Contains(string(hint), "https://") {
		t.Errorf("%d %s", plain.StatusCode, hint)
	}
	old := &tls.Config{RootCAs: roots, ServerName: "127.0.0.1", MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}
	if nc, err := tls.Dial("tcp", r.Addr(), old); err == nil {
		nc.Close()
		t.Error("TLS 1.1 was taken")
	}
}

func TestClientCertificatesAreRequired(t *testing.T) {
	e := harness.StartSim(t, nil)
	cert, key := harness.WriteCert(t, t.TempDir())
	r := harness.StartRouter(t, func(c *config.Config) { c.TLS = config.TLS{Cert: cert, Key: key, ClientCA: cert, MinVersion: "1.3"} }, harness.SimWorker(e, worker.Aggregated, "e"))
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(pair.Leaf)
	for _, shown := range [][]tls.Certificate{nil, {pair}} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: shown}}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		req, _ := http.NewRequestWithContext(ctx, "GET", "https://"+r.Addr()+"/readyz", nil)
		resp, err := tr.RoundTrip(req)
		if err == nil {
			resp.Body.Close()
		}
		if (err == nil) != (shown != nil) {
			t.Errorf("with %d certificates: %v", len(shown), err)
		}
		tr.CloseIdleConnections()
		cancel()
	}
}

func TestUnusableTLSFiles(t *testing.T) {
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen = "127.0.0.1:0", "off"
	cfg.Workers = []config.Worker{{ID: "e", URL: "http://127.0.0.1:1"}}
	cfg.TLS.Cert, cfg.TLS.Key = "/nonexistent/cert.pem", "/nonexistent/key.pem"
	if _, err := app.New(app.Options{Config: cfg}); err == nil || !strings.Contains(err.Error(), "tls: certs: cannot stat") {
		t.Errorf("%v", err)
	}
}

// TestEngineCertificateForOtherAddress: an engine with an IP address in its URL needs a certificate for
// that address. A certificate of the configured CA for another host is not accepted.
func TestEngineCertificateForOtherAddress(t *testing.T) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"other.test"}, IPAddresses: []net.IP{net.IPv4(10, 9, 9, 9)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	served, refused := make(chan string, 1), make(chan error, 100)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			c := tls.Server(nc, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: k}}})
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			if line, err := bufio.NewReader(c).ReadString('\n'); err == nil {
				served <- line
			} else {
				refused <- err
			}
			c.Close()
		}
	}()
	r := harness.LaunchRouter(t, func(c *config.Config) { c.EngineTLS.CA = ca }, config.Worker{ID: "e", URL: "https://" + ln.Addr().String(), Role: worker.Aggregated})
	for range 3 {
		select {
		case line := <-served:
			t.Fatalf("the router trusts it and sends %q", line)
		case <-refused:
		case <-time.After(20 * time.Second):
			t.Fatal("the router does not connect")
		}
	}
	if status, _ := r.Pages.Ready(true); status == 200 {
		t.Error("the router is ready over an engine that is not the one it names")
	}
}
