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

// Files are the paths of PEM files.
type Files struct {
	Cert, Key string // the certificate to present; both or none
	CA        string // must have signed the peer's certificate; "": see ServerConfig and ClientConfig
}

// checkInterval is the shortest time between two checks of the files. The files are checked
// when a connection is made: a process without connections needs no new certificate.
const checkInterval = time.Second

// Reloader has the contents of the files as of the last successful read. It is safe for
// concurrent use.
type Reloader struct {
	files Files
	log   *slog.Logger

	now         atomic.Pointer[loaded]
	checkedAt   atomic.Int64 // of the last check, in Unix nanoseconds
	mu          sync.Mutex   // held during a check
	lastFailure string       // the last logged failure, so that it is logged once
}

// loaded is the result of one read of the files. It is immutable.
type loaded struct {
	versions [3]fileVersion
	cert     *tls.Certificate // nil: none
	roots    *x509.CertPool   // nil: none
	server   *tls.Config      // shared by connections, so that session tickets stay valid
}

// fileVersion identifies one version of a file.
type fileVersion struct {
	size int64
	at   time.Time
}

// New reads the files. It fails if one of them cannot be read or used. Later reloads and
// failures are logged to log, which may be nil.
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

// fileVersions returns the versions of the files without reading them.
func (k *Reloader) fileVersions() (all [3]fileVersion, err error) {
	for i, name := range k.fileNames() {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return all, fmt.Errorf("certs: cannot stat %q: %w", name, errors.Unwrap(err))
		}
		all[i] = fileVersion{info.Size(), info.ModTime()}
	}
	return all, nil
}

func (k *Reloader) read() (*loaded, error) {
	// The versions are taken before the read: a change in between is read at the next check.
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
			return nil, fmt.Errorf("certs: cannot use %q as CA: it contains no PEM certificate", k.files.CA)
		}
	}
	return s, nil
}

// current returns the state and reloads it first if the files have changed. If they cannot be
// read the old state stays in use: half a renewal must not end the service.
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
			k.log.Error("cannot reload certificates; the old ones stay in use", "error", err)
		}
		return s
	}
	k.lastFailure = ""
	if s.server != nil {
		next.server = k.serverConfig(next, s.server.MinVersion)
	}
	k.now.Store(next)
	k.log.Info("certificates reloaded", "cert", k.files.Cert, "ca", k.files.CA, "expires", next.notAfter())
	return next
}

func (s *loaded) notAfter() time.Time {
	if s.cert == nil || s.cert.Leaf == nil {
		return time.Time{}
	}
	return s.cert.Leaf.NotAfter
}

// NotAfter returns when the presented certificate expires, the zero time without one.
func (k *Reloader) NotAfter() time.Time { return k.now.Load().notAfter() }

// ServerConfig returns the config of a listener. The listener presents the certificate. With
// a CA it accepts only clients whose certificate the CA has signed. The minimum TLS version
// is minVersion, but at least tls.VersionTLS12. ServerConfig fails without a certificate. It
// must be called once, before the Reloader is used.
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

// ClientConfig returns the config of connections to the server whose host is serverName, a DNS name or an IP
// address, never empty. The config presents the certificate where the server asks for one,
// and accepts servers whose certificate is valid for serverName and signed by the CA, or
// without a CA by an authority of the system.
func (k *Reloader) ClientConfig(serverName string) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS12, CipherSuites: Suites, ServerName: serverName}
	if k.files.Cert != "" {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return k.current().cert, nil }
	}
	if k.files.CA != "" {
		// RootCAs in the Config could not be reloaded. Therefore the standard check is made
		// here, against the current pool, also on resumed sessions. The name does not come
		// from ConnectionState: crypto/tls leaves it empty for IP addresses, and x509 then
		// checks no name.
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
	intermediates := x509.NewCertPool()
	for _, cert := range chain[1:] {
		intermediates.AddCert(cert)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{DNSName: serverName, Roots: k.current().roots, Intermediates: intermediates})
	return err
}
