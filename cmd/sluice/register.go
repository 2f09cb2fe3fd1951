package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sluice/dataplane/certs"
	"sluice/router/config"
	"sluice/router/discovery/registration"
	"sluice/router/obs"
	"sluice/router/worker"
)

const registerLong = `Registers an engine with a router and renews its lease until SIGTERM, then removes it. The worker
is given by one of --engine, --prefill and --decode, as for serve, or by --json FILE with an
announcement (docs/discovery.md). A host of * means the address from which this machine calls.

The token is read from --token-file or from the variable SLUICE_REGISTRATION_TOKEN.`

const registerExample = `
  sluice register --router http://10.0.0.1:8081 --id prefill-a --token-file /etc/sluice/token --prefill http://*:8000
  sluice register --router https://10.0.0.1:8081 --ca ca.pem --cert me.pem --key me.key --id d0 --decode 'http://*:8000,ranks=4,kv_events=tcp://*:5557'`

// registerFlags are the values of the command's flags.
type registerFlags struct {
	router, id, tokenFile, ca, cert, key, file string

	lease  time.Duration
	worker *registration.Announcement // of --engine, --prefill or --decode; nil without
}

func registerCommand() *cobra.Command {
	var o registerFlags
	cmd := newCommand(cobra.Command{
		Use: "register --router URL --id NAME [flags]", GroupID: groupRun, Short: "register a worker with a router and renew its lease", Long: registerLong, Example: registerExample,
		Annotations: map[string]string{notes: workerKeyNotes()},
	}, "0 removed again, 1 the router refuses the worker", func(cmd *cobra.Command, _ []string) int {
		return runRegister(cmd.Context(), &o, cmd.ErrOrStderr())
	})
	fs := cmd.Flags()
	fs.StringVar(&o.router, "router", "", "`URL` of the router's registration listener; required")
	fs.StringVar(&o.id, "id", "", "`NAME` of the worker, unique in the fleet (default: the key id, or this machine's name and the role)")
	fs.StringVar(&o.tokenFile, "token-file", "", "`FILE` with the token (default: the variable SLUICE_REGISTRATION_TOKEN)")
	fs.StringVar(&o.ca, "ca", "", "PEM `FILE` with the CA of the router's certificate (default: the system's CAs)")
	fs.StringVar(&o.cert, "cert", "", "PEM `FILE` with the worker's certificate")
	fs.StringVar(&o.key, "key", "", "PEM `FILE` with the key of --cert")
	fs.DurationVar(&o.lease, "lease", 0, "`DURATION` of the lease to request, in whole seconds (default: the router's registration.lease)")
	fs.StringVar(&o.file, "json", "", "`FILE` with an announcement, - for standard input")
	for name, role := range map[string]worker.Role{"engine": worker.Aggregated, "prefill": worker.Prefill, "decode": worker.Decode} {
		fs.Func(name, "`URL[,key=value]...` of the worker, of role "+role.String(), func(s string) error {
			if o.worker != nil {
				return errors.New("one call registers one worker")
			}
			w, err := config.ParseWorker(role, s)
			if err != nil {
				return err
			}
			if o.id == "" {
				o.id = w.ID
			}
			o.worker, err = registration.Announce(&w)
			return err
		})
	}
	return cmd
}

// runRegister keeps one worker registered with a router until ctx ends.
func runRegister(ctx context.Context, o *registerFlags, stderr io.Writer) int {
	a := o.worker
	wrong := func(what string) int {
		fmt.Fprintf(stderr, "sluice register: %s; `sluice register --help` shows the usage\n", what)
		return 2
	}
	switch {
	case o.router == "":
		return wrong("no --router is given")
	case (a == nil) == (o.file == ""):
		return wrong("want one of --engine, --prefill, --decode and --json")
	case (o.cert == "") != (o.key == ""):
		return wrong("--cert and --key belong together")
	case o.lease%time.Second != 0 || o.lease < 0:
		return wrong("--lease must be in whole seconds")
	}
	fail := func(err error) int {
		fmt.Fprintln(stderr, "sluice register:", err)
		return 1
	}
	var err error
	if o.file != "" {
		if a, err = readAnnouncement(o.file); err != nil {
			return fail(err)
		}
	}
	if o.lease > 0 {
		a.LeaseSeconds = int(o.lease / time.Second)
	}
	c := &registration.Client{Router: o.router, ID: o.id, Token: registrationToken(os.Getenv, stderr)}
	if c.ID == "" {
		host, err := os.Hostname()
		if err != nil {
			return fail(fmt.Errorf("cannot determine the host name: %w; want --id", err))
		}
		c.ID = host + "-" + strings.TrimPrefix(a.Role, "-")
	}
	if o.tokenFile != "" {
		text, err := os.ReadFile(o.tokenFile)
		if err != nil {
			return fail(err)
		}
		c.Token = strings.TrimSpace(string(text))
	}
	if c.HTTP, err = registerHTTP(o.ca, o.cert, o.key); err != nil {
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
