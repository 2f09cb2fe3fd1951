package upstream

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"sluice/dataplane/certs"
)

// testCA is a certificate authority of a test.
type testCA struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newTestCA(t *testing.T, name string, parent *testCA) *testCA {
	t.Helper()
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	ca := &testCA{t: t}
	if parent == nil {
		parent = ca
	}
	var der []byte
	der, ca.key = parent.sign(tmpl)
	ca.cert, _ = x509.ParseCertificate(der)
	return ca
}

// sign makes a key and a certificate of it. A testCA that has no certificate yet signs its own.
func (ca *testCA) sign(tmpl *x509.Certificate) ([]byte, *ecdsa.PrivateKey) {
	ca.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		ca.t.Fatal(err)
	}
	tmpl.SerialNumber, _ = rand.Int(rand.Reader, big.NewInt(1<<62))
	parent, by := ca.cert, ca.key
	if parent == nil {
		parent, by = tmpl, key
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &key.PublicKey, by)
	if err != nil {
		ca.t.Fatal(err)
	}
	return der, key
}

// certSpec describes a certificate; its zero value is one of this hour without a name.
type certSpec struct {
	dns   []string
	ips   []string
	cn    string
	from  time.Duration // from now
	until time.Duration // from now [an hour]
	use   x509.ExtKeyUsage
	chain []*testCA // intermediates, sent with it
}

func (ca *testCA) issue(l certSpec) tls.Certificate {
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: l.cn}, DNSNames: l.dns, ExtKeyUsage: []x509.ExtKeyUsage{l.use},
		NotBefore: time.Now().Add(l.from - time.Minute), NotAfter: time.Now().Add(l.until)}
	if l.until == 0 {
		tmpl.NotAfter = time.Now().Add(time.Hour)
	}
	for _, ip := range l.ips {
		tmpl.IPAddresses = append(tmpl.IPAddresses, net.ParseIP(ip))
	}
	der, key := ca.sign(tmpl)
	c := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	for _, between := range l.chain {
		c.Certificate = append(c.Certificate, between.cert.Raw)
	}
	return c
}

func writePEM(t *testing.T, path, kind string, der ...[]byte) {
	t.Helper()
	var out []byte
	for _, d := range der {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: d})...)
	}
	if err := os.WriteFile(path, out, 0o600); err != nil {
		t.Fatal(err)
	}
}

// files writes a certificate and its key.
func files(t *testing.T, c tls.Certificate) certs.Files {
	t.Helper()
	dir := t.TempDir()
	f := certs.Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	key, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, f.Cert, "CERTIFICATE", c.Certificate...)
	writePEM(t, f.Key, "PRIVATE KEY", key)
	return f
}

// httpsEngine answers over TLS at addr until the test ends.
func httpsEngine(t *testing.T, addr string, conf *tls.Config) (port string) {
	t.Helper()
	ln, err := tls.Listen("tcp", addr, conf)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ErrorLog: log.New(io.Discard, "", 0), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "served") })}
	go srv.Serve(ln)
	t.Cleanup(func() { srv.Close() })
	_, port, _ = net.SplitHostPort(ln.Addr().String())
	return port
}

// systemRoots names the file that the system's roots are read from in a child process:
// crypto/x509 reads them once.
const systemRoots = "SLUICE_TEST_SYSTEM_ROOTS"

// TestTLSMatrix connects to engines by name and by address, with certificates that are and
// are not theirs, trusted by a configured CA or by the system's roots, and with and without
// a certificate of this package. A server that is not trusted is refused in the handshake, before a
// byte of a request is sent.
func TestTLSMatrix(t *testing.T) {
	t.Run("CA file", func(t *testing.T) { tlsMatrix(t, newTestCA(t, "root", nil), false) })
	t.Run("system roots", func(t *testing.T) {
		dir := t.TempDir()
		ca := newTestCA(t, "root", nil)
		key, err := x509.MarshalPKCS8PrivateKey(ca.key)
		if err != nil {
			t.Fatal(err)
		}
		writePEM(t, filepath.Join(dir, "ca.pem"), "CERTIFICATE", ca.cert.Raw)
		writePEM(t, filepath.Join(dir, "ca.key"), "PRIVATE KEY", key)
		child := exec.Command(os.Args[0], "-test.run=^TestTLSMatrixSystemRoots$", "-test.v", "-test.timeout=60s")
		child.Env = append(os.Environ(), systemRoots+"="+dir, "SSL_CERT_FILE="+filepath.Join(dir, "ca.pem"), "SSL_CERT_DIR="+t.TempDir())
		if out, err := child.CombinedOutput(); err != nil {
			t.Errorf("%v:\n%s", err, out)
		}
	})
}

// TestTLSMatrixSystemRoots is the part of TestTLSMatrix that needs a process of its own.
func TestTLSMatrixSystemRoots(t *testing.T) {
	dir := os.Getenv(systemRoots)
	if dir == "" {
		t.Skip("runs in a child process of TestTLSMatrix")
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		t.Fatalf("a %T", pair.PrivateKey)
	}
	tlsMatrix(t, &testCA{t, pair.Leaf, key}, true)
}

func tlsMatrix(t *testing.T, ca *testCA, system bool) {
	other := newTestCA(t, "other", nil)
	between := newTestCA(t, "intermediate", ca)
	server, client := x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth
	kinds := []struct {
		kind, host, addr string
		right            certSpec
	}{
		{"DNS name", "localhost", "127.0.0.1:0", certSpec{dns: []string{"localhost"}}},
		{"IPv4", "127.0.0.1", "127.0.0.1:0", certSpec{ips: []string{"127.0.0.1"}}},
	}
	if ln, err := net.Listen("tcp", "[::1]:0"); err == nil {
		ln.Close()
		kinds = append(kinds, kinds[0])
		last := &kinds[len(kinds)-1]
		last.kind, last.host, last.addr, last.right = "IPv6", "[::1]", "[::1]:0", certSpec{ips: []string{"::1"}}
	}
	of := func(l certSpec, mod func(*certSpec)) certSpec { l.use = server; mod(&l); return l }
	for _, k := range kinds {
		same := func(*certSpec) {}
		for _, c := range []struct {
			name string
			by   *testCA
			leaf certSpec
			ok   bool
		}{
			{"right", ca, of(k.right, same), true},
			{"right, among others", ca, of(k.right, func(l *certSpec) { l.dns = append(l.dns, "a.test"); l.ips = append(l.ips, "10.0.0.1") }), true},
			{"right, by an intermediate", between, of(k.right, func(l *certSpec) { l.chain = []*testCA{between} }), true},
			{"right, its intermediate not sent", between, of(k.right, same), false},
			{"another name", ca, of(certSpec{dns: []string{"other.test"}}, same), false},
			{"another address", ca, of(certSpec{ips: []string{"127.0.0.2", "::2"}}, same), false},
			{"an address written as a name", ca, of(certSpec{dns: []string{"127.0.0.1", "::1", "*"}}, same), false},
			{"in its common name only", ca, of(certSpec{cn: k.host}, same), false},
			{"expired", ca, of(k.right, func(l *certSpec) { l.from, l.until = -2*time.Hour, -time.Hour }), false},
			{"not yet valid", ca, of(k.right, func(l *certSpec) { l.from = 30 * time.Minute }), false},
			{"of another CA", other, of(k.right, same), false},
			{"a client's", ca, of(k.right, func(l *certSpec) { l.use = client }), false},
		} {
			for _, ours := range []struct {
				name  string
				want  tls.ClientAuthType
				shown *testCA // CA of the client certificate; nil: no certificate is sent
				ok    bool
			}{
				{"none asked", tls.NoClientCert, nil, true},
				{"ours asked and shown", tls.RequireAndVerifyClientCert, ca, true},
				{"ours of another CA", tls.RequireAndVerifyClientCert, other, false},
				{"ours asked, none there", tls.RequireAndVerifyClientCert, nil, false},
			} {
				t.Run(k.kind+"/"+c.name+"/"+ours.name, func(t *testing.T) {
					believed := x509.NewCertPool()
					believed.AddCert(ca.cert)
					port := httpsEngine(t, k.addr, &tls.Config{Certificates: []tls.Certificate{c.by.issue(c.leaf)}, ClientAuth: ours.want, ClientCAs: believed})
					var f certs.Files
					if ours.shown != nil {
						f = files(t, ours.shown.issue(certSpec{use: client, dns: []string{"router.test"}}))
					}
					if !system {
						f.CA = filepath.Join(t.TempDir(), "ca.pem")
						writePEM(t, f.CA, "CERTIFICATE", ca.cert.Raw)
					}
					keeper, err := certs.New(f, nil)
					if err != nil {
						t.Fatal(err)
					}
					wantServed(t, k.host, port, keeper, c.ok && ours.ok)
				})
			}
		}
	}
	if !system {
		for _, k := range kinds {
			t.Run(k.kind+"/its CA is taken out of the file", func(t *testing.T) { testRevokedByReload(t, k.host, k.addr, ca, other, of(k.right, func(*certSpec) {})) })
		}
	}
}

// wantServed asks an engine, and says what it may and may not be.
func wantServed(t *testing.T, host, port string, keeper *certs.Reloader, ok bool) {
	t.Helper()
	e, err := NewEndpoint("https://"+host+":"+port, Options{TLS: keeper.ClientConfig, ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	got, err := request(e, post("x"), nil)
	if ok && (err != nil || got != "served") {
		t.Errorf("%q, %v; want it served", got, err)
	}
	var failed *Error
	if !ok && (err == nil || !errors.As(err, &failed)) {
		t.Errorf("%q, %v; want it refused", got, err)
	}
}

// testRevokedByReload replaces the CA in its file: what it signed is refused from the next
// connection on, and accepted again when it is back.
func testRevokedByReload(t *testing.T, host, addr string, ca, other *testCA, right certSpec) {
	port := httpsEngine(t, addr, &tls.Config{Certificates: []tls.Certificate{ca.issue(right)}})
	path := filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, path, "CERTIFICATE", ca.cert.Raw)
	keeper, err := certs.New(certs.Files{CA: path}, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantServed(t, host, port, keeper, true)
	for i, step := range []struct {
		roots [][]byte
		ok    bool
	}{{[][]byte{other.cert.Raw}, false}, {[][]byte{other.cert.Raw, ca.cert.Raw}, true}} {
		writePEM(t, path, "CERTIFICATE", step.roots...)
		// The keeper looks at its files once a second; a time of its own shows the change
		// on file systems whose clock is coarse.
		at := time.Now().Add(time.Duration(i+1) * time.Second)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1100 * time.Millisecond)
		wantServed(t, host, port, keeper, step.ok)
	}
}

// TestTLSNeedsAName: a configuration that was made without a name believes nobody.
func TestTLSNeedsAName(t *testing.T) {
	ca := newTestCA(t, "root", nil)
	path := filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, path, "CERTIFICATE", ca.cert.Raw)
	keeper, err := certs.New(certs.Files{CA: path}, nil)
	if err != nil {
		t.Fatal(err)
	}
	port := httpsEngine(t, "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{ca.issue(certSpec{ips: []string{"127.0.0.1"}})}})
	conf := keeper.ClientConfig("")
	if nc, err := tls.Dial("tcp", "127.0.0.1:"+port, conf); err == nil {
		nc.Close()
		t.Error("a server was believed without a name to check")
	}
	if got := fmt.Sprint(keeper.ClientConfig("127.0.0.1").ServerName); got != "127.0.0.1" {
		t.Errorf("ServerName %q", got)
	}
}
