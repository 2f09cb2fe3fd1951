package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority signs certificates for tests.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	der, key := a.sign(&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	a.key, a.pem = key, pemOf("CERTIFICATE", der)
	a.cert, _ = x509.ParseCertificate(der)
	return a
}

func (a *authority) sign(tmpl *x509.Certificate) ([]byte, *ecdsa.PrivateKey) {
	a.t.Helper()
	return a.signFor(tmpl, func(*x509.Certificate) {})
}

// signFor is sign of a template that mod changes last.
func (a *authority) signFor(tmpl *x509.Certificate, mod func(*x509.Certificate)) ([]byte, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	tmpl.SerialNumber, _ = rand.Int(rand.Reader, big.NewInt(1<<62))
	tmpl.Subject = pkix.Name{CommonName: "test"}
	tmpl.NotBefore, tmpl.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	mod(tmpl)
	parent, by := a.cert, a.key
	if parent == nil {
		parent, by = tmpl, key
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	return der, key
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// issue writes a certificate for host and its key into dir, and gives its serial number.
func (a *authority) issue(dir, host string) *big.Int {
	a.t.Helper()
	tmpl := &x509.Certificate{DNSNames: []string{host}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, key := a.sign(tmpl)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	write(a.t, filepath.Join(dir, "cert.pem"), pemOf("CERTIFICATE", der))
	write(a.t, filepath.Join(dir, "key.pem"), pemOf("PRIVATE KEY", raw))
	return tmpl.SerialNumber
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func filesIn(dir string) Files {
	return Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
}

// expireCheck makes the keeper look at its files at the next handshake.
func (k *Reloader) expireCheck() { k.checkedAt.Store(0) }

// serve echoes over TLS until the test ends.
func serve(t *testing.T, conf *tls.Config) string {
	t.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", conf)
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
			go func() { _, _ = io.Copy(nc, nc); nc.Close() }()
		}
	}()
	return ln.Addr().String()
}

// roundTrip connects, sends a word and gives the connection and the server's serial.
func roundTrip(t *testing.T, addr string, conf *tls.Config) (*tls.Conn, *big.Int, error) {
	t.Helper()
	conf = conf.Clone()
	conf.ServerName = "engine.test"
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: conf}
	nc, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, nil, err
	}
	t.Cleanup(func() { nc.Close() })
	c := nc.(*tls.Conn)
	return c, c.ConnectionState().PeerCertificates[0].SerialNumber, echoes(c)
}

func echoes(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write([]byte("word")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 4))
	return err
}

func TestRenewal(t *testing.T) {
	dir, ca := t.TempDir(), newAuthority(t)
	first := ca.issue(dir, "engine.test")
	var logs bytes.Buffer
	k, err := New(filesIn(dir), slog.New(slog.NewTextHandler(&logs, nil)))
	if err != nil {
		t.Fatal(err)
	}
	conf, err := k.ServerConfig(0)
	if err != nil {
		t.Fatal(err)
	}
	addr := serve(t, conf)
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	client := &tls.Config{RootCAs: roots}
	old, got, err := roundTrip(t, addr, client)
	if err != nil || got.Cmp(first) != 0 {
		t.Fatal(got, err)
	}

	// Half a renewal: the certificate is there, its key not yet.
	key, err := os.ReadFile(filepath.Join(dir, "key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	second := ca.issue(dir, "engine.test")
	newKey, err := os.ReadFile(filepath.Join(dir, "key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "key.pem"), key)
	for range 2 {
		k.expireCheck()
		if _, got, err = roundTrip(t, addr, client); err != nil || got.Cmp(first) != 0 {
			t.Fatalf("half a renewal: %v, %v", got, err)
		}
	}
	if n := strings.Count(logs.String(), "stay in use"); n != 1 {
		t.Errorf("the failure is logged %d times:\n%s", n, logs.String())
	}
	write(t, filepath.Join(dir, "key.pem"), newKey)
	k.expireCheck()
	if _, got, err = roundTrip(t, addr, client); err != nil || got.Cmp(second) != 0 {
		t.Fatalf("after the renewal: %v, want %v, %v", got, second, err)
	}
	if err := echoes(old); err != nil {
		t.Errorf("the connection from before: %v", err)
	}
	if until := time.Until(k.NotAfter()); until < 50*time.Minute || until > time.Hour {
		t.Errorf("it ends in %s", until)
	}
}

// TestMutualTLS has each side verify the other, and the engines' authority change.
func TestMutualTLS(t *testing.T) {
	theirs, ours, ca, other := t.TempDir(), t.TempDir(), newAuthority(t), newAuthority(t)
	ca.issue(theirs, "engine.test")
	ca.issue(ours, "router.test")
	bundle := filepath.Join(t.TempDir(), "ca.pem")
	write(t, bundle, ca.pem)
	files := filesIn(theirs)
	files.CA = bundle
	engine, err := New(files, nil)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := engine.ServerConfig(tls.VersionTLS13)
	if err != nil {
		t.Fatal(err)
	}
	addr := serve(t, conf)
	files = filesIn(ours)
	files.CA = bundle
	router, err := New(files, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := roundTrip(t, addr, router.ClientConfig("engine.test")); err != nil {
		t.Fatal(err)
	}
	bare, err := New(Files{CA: bundle}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := roundTrip(t, addr, bare.ClientConfig("engine.test")); err == nil {
		t.Error("a client without a certificate was let in")
	}
	if nc, err := tls.Dial("tcp", addr, router.ClientConfig("another.test")); err == nil {
		nc.Close()
		t.Error("a server was believed under a name that is not its own")
	}
	older := router.ClientConfig("engine.test")
	older.MaxVersion = tls.VersionTLS12
	if nc, err := tls.Dial("tcp", addr, older); err == nil {
		nc.Close()
		t.Error("TLS 1.2 was taken where 1.3 is the least")
	}
	write(t, bundle, other.pem)
	router.expireCheck()
	if _, _, err := roundTrip(t, addr, router.ClientConfig("engine.test")); err == nil {
		t.Error("a server was believed whose authority is no longer trusted")
	}
	write(t, bundle, append(append([]byte(nil), other.pem...), ca.pem...))
	router.expireCheck()
	engine.expireCheck()
	if _, _, err := roundTrip(t, addr, router.ClientConfig("engine.test")); err != nil {
		t.Errorf("both authorities in one file: %v", err)
	}
}

func TestInvalidFiles(t *testing.T) {
	dir, ca := t.TempDir(), newAuthority(t)
	ca.issue(dir, "a")
	good := filesIn(dir)
	empty := filepath.Join(dir, "empty.pem")
	write(t, empty, nil)
	for want, files := range map[string]Files{
		"without its key":             {Cert: good.Cert},
		"no such file":                {Cert: good.Cert, Key: filepath.Join(dir, "nothing.pem")},
		"cannot use certificate":      {Cert: empty, Key: good.Key},
		"contains no PEM certificate": {CA: empty},
		"cannot stat \"/nonexistent":  {CA: "/nonexistent/ca.pem"},
	} {
		if _, err := New(files, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one that says %q", files, err, want)
		}
	}
	k, err := New(Files{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.ServerConfig(0); err == nil {
		t.Error("a listener without a certificate")
	}
}
