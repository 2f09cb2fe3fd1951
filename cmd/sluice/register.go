package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"sluice/dataplane/certs"
	"sluice/router/config"
	"sluice/router/discovery/registration"
	"sluice/router/obs"
	"sluice/router/worker"
)

const registerUsage = `Usage: sluice register --router URL --id NAME [--token-file FILE] WORKER

Registers an engine with a router and renews its lease until SIGTERM, then takes
it out. WORKER is one of --engine, --prefill and --decode, as serve takes them,
or --json FILE with an announcement (docs/discovery.md). A host of * stands for
the address this machine calls from.

Flags:
`

const registerExample = `
Examples:
  sluice register --router http://10.0.0.1:8081 --id prefill-a --token-file /etc/sluice/token --prefill http://*:8000
  sluice register --router https://10.0.0.1:8081 --ca ca.pem --cert me.pem --key me.key --id d0 --decode 'http://*:8000,ranks=4,kv_events=tcp://*:5557'

The token may also be given by $SLUICE_REGISTRATION_TOKEN. Exit code: 0 taken out
again, 1 the router will never take it, 2 called wrongly.
`

// runRegister keeps one worker registered with a router until ctx ends.
func runRegister(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice register", flag.ContinueOnError)
	fs.SetOutput(stderr)
	router := fs.String("router", "", "`URL` of the router's registration listener")
	id := fs.String("id", "", "`NAME` of the worker, unique in the fleet [the key id, else this machine's name and the role]")
	tokenFile := fs.String("token-file", "", "`FILE` with the token [$SLUICE_REGISTRATION_TOKEN]")
	ca := fs.String("ca", "", "PEM `FILE` with the authority of the router's certificate [the system's]")
	cert, key := fs.String("cert", "", "PEM `FILE` with the worker's certificate"), fs.String("key", "", "PEM `FILE` with its key")
	lease := fs.Duration("lease", 0, "lease to request, in whole seconds [the router's default]")
	file := fs.String("json", "", "`FILE` with an announcement, - for standard input")
	var a *registration.Announcement
	for name, role := range map[string]worker.Role{"engine": worker.Aggregated, "prefill": worker.Prefill, "decode": worker.Decode} {
		fs.Func(name, "the worker: `URL[,key=value…]`", func(s string) error {
			if a != nil {
				return errors.New("one worker is registered by one call")
			}
			w, err := config.ParseWorker(role, s)
			if err != nil {
				return err
			}
			if *id == "" {
				*id = w.ID
			}
			a, err = registration.Announce(&w)
			return err
		})
	}
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), registerUsage)
		fs.PrintDefaults()
		fmt.Fprintf(fs.Output(), "\nKeys of a worker (after its URL, by commas):\n%s%s", config.KeyTable(), registerExample)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	wrong := func(what string) int {
		fmt.Fprintf(stderr, "sluice register: %s; `sluice register --help` shows how\n", what)
		return 2
	}
	switch {
	case *router == "":
		return wrong("no --router is given")
	case (a == nil) == (*file == ""):
		return wrong("want one of --engine, --prefill, --decode and --json")
	case (*cert == "") != (*key == ""):
		return wrong("--cert and --key belong together")
	case *lease%time.Second != 0 || *lease < 0:
		return wrong("--lease must be in whole seconds")
	}
	fail := func(err error) int {
		fmt.Fprintln(stderr, "sluice register:", err)
		return 1
	}
	var err error
	if *file != "" {
		if a, err = readAnnouncement(*file); err != nil {
			return fail(err)
		}
	}
	if *lease > 0 {
		a.LeaseSeconds = int(*lease / time.Second)
	}
	c := &registration.Client{Router: *router, ID: *id, Token: registrationToken(os.Getenv, stderr)}
	if c.ID == "" {
		host, err := os.Hostname()
		if err != nil {
			return fail(fmt.Errorf("cannot tell this machine's name: %w; want --id", err))
		}
		c.ID = host + "-" + strings.TrimPrefix(a.Role, "-")
	}
	if *tokenFile != "" {
		text, err := os.ReadFile(*tokenFile)
		if err != nil {
			return fail(err)
		}
		c.Token = strings.TrimSpace(string(text))
	}
	if c.HTTP, err = registerHTTP(*ca, *cert, *key); err != nil {
		return fail(err)
	}
	log, _, err := obs.NewLogger(stderr, "info", "text")
	if err != nil {
		return fail(err)
	}
	state := ""
	c.OnResult = func(l *registration.Lease, err error) {
		switch {
		case err != nil:
			log.Warn("not registered", "worker", c.ID, "error", err)
			state = ""
		case l.State != state || l.Changed:
			log.Info("registered", "worker", c.ID, "state", l.State, "reason", l.Reason, "lease", l.LeaseSeconds)
			state = l.State
		}
	}
	if err := c.Run(ctx, a); err != nil {
		return fail(err)
	}
	return 0
}

func readAnnouncement(path string) (*registration.Announcement, error) {
	text, err := os.ReadFile(path)
	if path == "-" {
		text, err = io.ReadAll(io.LimitReader(os.Stdin, 1<<20))
	}
	if err != nil {
		return nil, err
	}
	a, err := registration.Decode(text) // as strict as the router
	if err != nil {
		return nil, fmt.Errorf("cannot use %q: %w", path, err)
	}
	return a, nil
}

// registerHTTP returns an HTTP client that trusts the CA file and presents the certificate of
// the cert and key files. An empty name selects the system's CAs or no client certificate.
func registerHTTP(ca, cert, key string) (*http.Client, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, CipherSuites: certs.Suites}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no PEM certificate", ca)
		}
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, err
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: conf, IdleConnTimeout: time.Minute}}, nil
}

// registrationToken returns the token from the environment. SLUICE_REGISTER_TOKEN is the old
// name of the variable, which is accepted for one release with a warning on stderr.
func registrationToken(getenv func(string) string, stderr io.Writer) string {
	const name, old = "SLUICE_REGISTRATION_TOKEN", "SLUICE_REGISTER_TOKEN"
	token := getenv(name)
	if was := getenv(old); token == "" && was != "" {
		fmt.Fprintf(stderr, "sluice register: %s is now named %s; the old name is accepted in this release only\n", old, name)
		token = was
	}
	return token
}
