package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Files name PEM files.
type Files struct {
	Cert, Key string // what we show; both or none
	CA        string // who must have signed what the other side shows; "": see Server and Client
}

// checkInterval is how often, at most, the files are looked at. They are looked at when
// a connection is made: a process without connections needs no new certificate.
const checkInterval = time.Second

// Reloader holds what the files said when they last could be read. Safe for
// concurrent use.
type Reloader struct {
	files Files
	log   *slog.Logger

	now         atomic.Pointer[loaded]
	checkedAt   atomic.Int64 // when, Unix nanoseconds
	mu          sync.Mutex   // of a look
	lastFailure string       // the last failure told, so that it is told once
}

// loaded is one reading of the files. It is never changed.
type loaded struct {
	versions [3]fileVersion
	cert     *tls.Certificate // nil: none
	roots    *x509.CertPool   // nil: none
	server   *tls.Config      // made once, so that session tickets outlive a connection
}

// fileVersion tells one version of a file from another.
type fileVersion struct {
	size int64
	at   time.Time
}

// New reads the files; log is told when later they change, or cannot be read.
func New(files Files, log *slog.Logger) (*Reloader, error) {
	if (files.Cert == "") != (files.Key == "") {
		return nil, fmt.Errorf("certs: cannot use a certificate (%q) without its key (%q)", files.Cert, files.Key)
	}
	k := &Reloader{files: files, log: log}
	if log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	s, err := k.read()
	if err != nil {
		return nil, err
	}
	k.now.Store(s)
	k.checkedAt.Store(time.Now().UnixNano())
	return k, nil
}

func (k *Reloader) fileNames() [3]string { return [3]string{k.files.Cert, k.files.Key, k.files.CA} }

// fileVersions looks at the files without reading them.
func (k *Reloader) fileVersions() (all [3]fileVersion, err error) {
	for i, name := range k.fileNames() {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return all, fmt.Errorf("certs: cannot look at %q: %w", name, errors.Unwrap(err))
		}
		all[i] = fileVersion{info.Size(), info.ModTime()}
	}
	return all, nil
}

func (k *Reloader) read() (*loaded, error) {
	// Before the reading: what is changed in between is read again next time.
	stamps, err := k.fileVersions()
	if err != nil {
		return nil, err
	}
	s := &loaded{versions: stamps}
	if k.files.Cert != "" {
		cert, err := tls.LoadX509KeyPair(k.files.Cert, k.files.Key)
		if err != nil {
			return nil, fmt.Errorf("certs: cannot use certificate %q with key %q: %w", k.files.Cert, k.files.Key, err)
		}
		s.cert = &cert
	}
	if k.files.CA != "" {
		pem, err := os.ReadFile(k.files.CA)
		if err != nil {
			return nil, fmt.Errorf("certs: cannot read %q: %w", k.files.CA, errors.Unwrap(err))
		}
		s.roots = x509.NewCertPool()
		if !s.roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("certs: cannot use %q: there is no PEM certificate in it", k.files.CA)
		}
	}
	return s, nil
}

// current is the state, read again where the files have changed. What cannot be
// read leaves the old one in place: half a renewal must not end the service.
func (k *Reloader) current() *loaded {
	s, now := k.now.Load(), time.Now().UnixNano()
	if now-k.checkedAt.Load() < int64(checkInterval) || !k.mu.TryLock() {
		return s
	}
	defer k.mu.Unlock()
	k.checkedAt.Store(now)
	stamps, err := k.fileVersions()
	if err == nil && stamps == s.versions {
		k.lastFailure = ""
		return s
	}
	var next *loaded
	if err == nil {
		next, err = k.read()
	}
	if err != nil {
		if text := err.Error(); text != k.lastFailure {
			k.lastFailure = text
			k.log.Error("the certificates cannot be read again, those from before stay in use", "error", err)
		}
		return s
	}
	k.lastFailure = ""
	if s.server != nil {
		next.server = k.serverConfig(next, s.server.MinVersion)
	}
	k.now.Store(next)
	k.log.Info("certificates read again", "cert", k.files.Cert, "ca", k.files.CA, "expires", next.notAfter())
	return next
}

func (s *loaded) notAfter() time.Time {
	if s.cert == nil || s.cert.Leaf == nil {
		return time.Time{}
	}
	return s.cert.Leaf.NotAfter
}

// NotAfter is when the certificate that is shown ends; zero without one.
func (k *Reloader) NotAfter() time.Time { return k.now.Load().notAfter() }

// ServerConfig is for a listener: it shows the certificate, which there must be, and with
// a CA takes only clients that show one signed by it. minVersion is at least
// tls.VersionTLS12. Called once, before use.
func (k *Reloader) ServerConfig(minVersion uint16) (*tls.Config, error) {
	s := *k.now.Load()
	if s.cert == nil {
		return nil, errors.New("certs: cannot serve TLS without a certificate")
	}
	s.server = k.serverConfig(&s, max(minVersion, tls.VersionTLS12))
	k.now.Store(&s)
	outer := s.server.Clone()
	outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return k.current().server, nil }
	return outer, nil
}

func (k *Reloader) serverConfig(s *loaded, minVersion uint16) *tls.Config {
	c := &tls.Config{MinVersion: minVersion, CipherSuites: Suites, NextProtos: []string{"http/1.1"}, Certificates: []tls.Certificate{*s.cert}}
	if s.roots != nil {
		c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, s.roots
	}
	return c
}

// ClientConfig is for connections to the server whose host is serverName, a DNS name or an IP
// address, never empty. The config presents the certificate where the server asks for one,
// and accepts servers whose certificate is valid for serverName and signed by the CA, or
// without a CA by an authority of the system.
func (k *Reloader) ClientConfig(serverName string) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS12, CipherSuites: Suites, ServerName: serverName}
	if k.files.Cert != "" {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return k.current().cert, nil }
	}
	if k.files.CA != "" {
		// A pool in the Config would stay the one of today. So the standard check is
		// made here, against the current pool; on resumed sessions too. The name is not
		// taken from ConnectionState: crypto/tls leaves it empty for IP addresses, and
		// x509 checks no name then.
		c.InsecureSkipVerify = true
		c.VerifyConnection = func(cs tls.ConnectionState) error { return k.verifyServer(cs.PeerCertificates, serverName) }
	}
	return c
}

// verifyServer checks the chain that a server presented against the CA, and its name.
func (k *Reloader) verifyServer(chain []*x509.Certificate, serverName string) error {
	switch {
	case serverName == "":
		return errors.New("certs: cannot verify a server without its name")
	case len(chain) == 0:
		return errors.New("certs: the server presents no certificate")
	}
	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{DNSName: serverName, Roots: k.current().roots, Intermediates: between})
	return err
}
