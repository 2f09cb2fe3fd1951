package certs

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// clientCert is a certificate for clients that a signed, after mod changed its template.
func (a *authority) clientCert(mod func(*x509.Certificate)) *tls.Certificate {
	a.t.Helper()
	tmpl := &x509.Certificate{DNSNames: []string{"client.test"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	der, key := a.signFor(tmpl, mod)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// connectTwice makes two connections, the second of which may resume the session of the
// first, and returns the errors of both.
func connectTwice(addr string, conf *tls.Config) (errs [2]error, resumed bool) {
	for i := range errs {
		nc, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", addr, conf)
		if err == nil {
			err = echoes(nc) // in TLS 1.3 a client learns of its refusal by the first read
			resumed = resumed || nc.ConnectionState().DidResume
			nc.Close()
		}
		errs[i] = err
	}
	return errs, resumed
}

// TestClientCertificateMatrix connects to a listener that asks for certificates with such as
// are and are not to be accepted, by TLS 1.2 and 1.3, with sessions that are resumed. Both of
// the router's listeners, for clients and for registrations, take their configuration here.
func TestClientCertificateMatrix(t *testing.T) {
	dir, ca, other := t.TempDir(), newAuthority(t), newAuthority(t)
	ca.issue(dir, "router.test")
	f := filesIn(dir)
	f.CA = filepath.Join(dir, "clients.pem")
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	same := func(*x509.Certificate) {}
	right := ca.clientCert(same)
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		write(t, f.CA, ca.pem)
		keeper, err := New(f, nil)
		if err != nil {
			t.Fatal(err)
		}
		conf, err := keeper.ServerConfig(tls.VersionTLS12)
		if err != nil {
			t.Fatal(err)
		}
		addr := serve(t, conf)
		with := func(c *tls.Certificate) *tls.Config {
			conf := &tls.Config{RootCAs: roots, ServerName: "router.test", MaxVersion: version, ClientSessionCache: tls.NewLRUClientSessionCache(4)}
			if c != nil {
				// Shown whatever authorities the listener asks for.
				conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return c, nil }
			}
			return conf
		}
		for _, c := range []struct {
			name string
			cert *tls.Certificate
			ok   bool
		}{
			{"right", right, true},
			{"none", nil, false},
			{"of another CA", other.clientCert(same), false},
			{"expired", ca.clientCert(func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
			}), false},
			{"not yet valid", ca.clientCert(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(30 * time.Minute) }), false},
			{"a server's", ca.clientCert(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), false},
		} {
			errs, resumed := connectTwice(addr, with(c.cert))
			for i, err := range errs {
				if (err == nil) != c.ok {
					t.Errorf("TLS %#x, %s, connection %d: %v", version, c.name, i, err)
				}
			}
			if c.ok && !resumed {
				t.Errorf("TLS %#x, %s: the second connection resumed no session, so this shows nothing of resumption", version, c.name)
			}
		}

		// The CA is removed from the file: a session from before does not admit the client either.
		conn := with(right)
		if errs, _ := connectTwice(addr, conn); errs[0] != nil {
			t.Fatal(errs)
		}
		write(t, f.CA, other.pem)
		keeper.expireCheck()
		if errs, resumed := connectTwice(addr, conn); errs[0] == nil || errs[1] == nil {
			t.Errorf("TLS %#x: accepted (resumed: %v) though its CA is no longer trusted", version, resumed)
		}
	}
}
