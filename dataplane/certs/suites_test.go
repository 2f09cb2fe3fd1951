package certs

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestSuites offers each cipher suite that crypto/tls knows for TLS 1.2, one at a time, to
// a server of this package, and lets its client connect to servers that accept only one. With certificates of
// both kinds only ECDHE suites with AEAD are agreed on.
func TestSuites(t *testing.T) {
	a := newAuthority(t)
	root := filepath.Join(t.TempDir(), "ca.pem")
	write(t, root, a.pem)
	agreed := map[uint16]bool{}
	for _, kind := range []string{"ECDSA", "RSA"} {
		dir := t.TempDir()
		a.issue(dir, "engine.test")
		if kind == "RSA" {
			issueRSA(t, a, dir)
		}
		k, err := New(Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ours, err := k.ServerConfig(tls.VersionTLS12)
		if err != nil {
			t.Fatal(err)
		}
		client, err := New(Files{CA: root}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
		if err != nil {
			t.Fatal(err)
		}
		for _, suite := range slices.Concat(tls.CipherSuites(), tls.InsecureCipherSuites()) {
			if !slices.Contains(suite.SupportedVersions, tls.VersionTLS12) {
				continue
			}
			wanted := slices.Contains(Suites, suite.ID)
			only := &tls.Config{MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{suite.ID}}
			theirs := only.Clone()
			theirs.InsecureSkipVerify = true
			if ok := handshake(t, ours, theirs); ok && !wanted {
				t.Errorf("%s: our server takes %s", kind, suite.Name)
			} else if ok {
				agreed[suite.ID] = true
			}
			other := only.Clone()
			other.Certificates = []tls.Certificate{pair}
			if ok := handshake(t, other, client.ClientConfig("engine.test")); ok && !wanted {
				t.Errorf("%s: our client takes %s", kind, suite.Name)
			}
		}
	}
	if len(agreed) != len(Suites) {
		t.Errorf("%d of %d suites were agreed on", len(agreed), len(Suites))
	}
}

// handshake says whether a TLS handshake between the two succeeds.
func handshake(t *testing.T, server, client *tls.Config) bool {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	_ = near.SetDeadline(time.Now().Add(10 * time.Second))
	_ = far.SetDeadline(time.Now().Add(10 * time.Second))
	done := make(chan error, 1)
	go func() { done <- tls.Server(far, server).Handshake(); far.Close() }()
	err := tls.Client(near, client).Handshake()
	near.Close()
	return (<-done == nil) && err == nil
}

// issueRSA replaces the certificate in dir by one with an RSA key.
func issueRSA(t *testing.T, a *authority, dir string) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "cert.pem"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "cert.pem"), pemOf("CERTIFICATE", der))
	write(t, filepath.Join(dir, "key.pem"), pemOf("PRIVATE KEY", raw))
}
