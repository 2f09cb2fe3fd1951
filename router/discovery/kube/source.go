package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"time"

	"sluice/dataplane/backoff"
	"sluice/router/config"
	"sluice/router/discovery"
)

// Source watches the pods that match one selector.
type Source struct {
	conf            config.Kube
	namespace       string // "": all namespaces
	server          string // URL of the API server, for errors
	creds           *credentials
	responseTimeout time.Duration // limit of a whole list, and of the time until a watch is answered
}

const (
	defaultResponseTimeout = 30 * time.Second
	// The server ends a watch after a time between watchLength and twice that. If it does not, the
	// connection may be dead, and the client ends it watchGrace later.
	watchLength = 5 * time.Minute
	watchGrace  = 30 * time.Second
	// maxEvent bounds one event of a watch. Kubernetes limits objects to less.
	maxEvent = 8 << 20
	// Failed calls, and watches that end at once, are repeated after delays between these.
	minRetry, maxRetry = 500 * time.Millisecond, 30 * time.Second
	// shortWatch is the shortest watch that is repeated without a delay.
	shortWatch = time.Second
)

// New reads the credentials from a kubeconfig, or those of the pod that the router runs in. It
// makes no calls: Run reports a cluster that it cannot reach.
func New(conf config.Kube) (*Source, error) {
	s := &Source{conf: conf, namespace: conf.Namespace, responseTimeout: defaultResponseTimeout}
	if !selectorForm.MatchString(conf.Selector) {
		return nil, fmt.Errorf("kube: cannot use kube.selector %q; want one as kubectl -l takes, such as app in (prefill,decode)", conf.Selector)
	}
	var own string
	var err error
	if conf.Kubeconfig == "" {
		s.creds, own, err = podCredentials(conf.Namespace == "")
	} else if s.creds, own, err = fileCredentials(conf.Kubeconfig); err != nil {
		err = fmt.Errorf("kube: cannot use kube.kubeconfig %q: %w", conf.Kubeconfig, err)
	}
	if err != nil {
		return nil, err
	}
	switch s.namespace {
	case "*":
		s.namespace = ""
	case "":
		s.namespace = own
	}
	s.server = s.creds.server.Scheme + "://" + s.creds.server.Host // without user and password
	return s, nil
}

// Name implements discovery.Source.
func (s *Source) Name() string { return "kube " + s.conf.Selector }

// Run lists and watches pods until ctx ends. It lists them again when the server has discarded the
// watch's position (410 Gone), and resumes at the last position after any other end of a watch.
func (s *Source) Run(ctx context.Context, set *discovery.Set) error {
	st := newStore(&s.conf, s.namespace == "", set)
	var retry backoff.Backoff
	var c *client
	version, listed := "", false // version is the position of the watch, "" if pods must be listed
	for ctx.Err() == nil {
		progress, gone := false, false
		var err error
		if c == nil {
			c, err = newClient(ctx, s.creds, s.namespace, s.responseTimeout)
		}
		switch {
		case err != nil:
		case version == "":
			if version, err = s.list(ctx, c, st, !listed); err == nil {
				listed, progress = true, true
			}
		default:
			version, progress, err = s.watch(ctx, c, st, version)
			if gone = hasCode(err, http.StatusGone); gone {
				version = ""
			}
		}
		if err != nil && !gone && ctx.Err() == nil {
			set.Failed(s.describeError(err))
			if s.creds.exec != nil && hasCode(err, http.StatusUnauthorized) {
				s.creds.exec.valid = false
			}
			if c != nil { // its certificates may have been replaced
				c.http.CloseIdleConnections()
				c = nil
			}
		}
		if progress {
			retry.Reset()
		}
		if err != nil || !progress {
			backoff.Sleep(ctx, backoff.Jitter(retry.Next(minRetry, maxRetry)))
		}
	}
	if c != nil {
		c.http.CloseIdleConnections()
	}
	return nil
}

// list replaces the pods by a new list and returns its position.
func (s *Source) list(ctx context.Context, c *client, st *store, cached bool) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.responseTimeout)
	defer cancel()
	pods, version, err := c.list(ctx, s.conf.Selector, cached)
	if err != nil {
		return "", err
	}
	st.replace(pods)
	return version, nil
}

// watch follows the pods from a position until the watch ends and returns the position reached, "" if
// it cannot be continued. Without progress, which is an event or a watch that lasted, and after an
// error the next one waits.
func (s *Source) watch(ctx context.Context, c *client, st *store, version string) (reached string, progress bool, err error) {
	length := watchLength + rand.N(watchLength)
	ctx, cancel := context.WithTimeout(ctx, length+watchGrace)
	defer cancel()
	resp, err := c.watch(ctx, s.conf.Selector, version, length)
	if err != nil {
		return version, false, err
	}
	defer resp.Body.Close()
	st.clearError()
	began := time.Now()
	body := &io.LimitedReader{R: resp.Body}
	for events := json.NewDecoder(body); ; progress = true {
		var e event
		var p pod
		body.N = maxEvent
		err := events.Decode(&e)
		var invalid *json.SyntaxError
		var mistyped *json.UnmarshalTypeError
		switch {
		case err != nil && body.N == 0:
			return "", progress, fmt.Errorf("the watch sent an event of more than %d bytes", maxEvent)
		case errors.As(err, &invalid), errors.As(err, &mistyped):
			return "", progress, fmt.Errorf("cannot read the watch: %w", err)
		case err != nil: // the watch or its connection ended, which is not a failure if the next one begins
			return version, progress || time.Since(began) > shortWatch, nil
		case e.Type == "ERROR":
			st := status{Message: "the watch ended with an error that it does not describe"}
			_ = json.Unmarshal(e.Object, &st)
			return "", progress, &apiError{st.Code, st.Message}
		}
		if err := json.Unmarshal(e.Object, &p); err != nil {
			return "", progress, fmt.Errorf("cannot read a pod of the watch: %w", err)
		}
		if p.Metadata.ResourceVersion != "" {
			version = p.Metadata.ResourceVersion
		}
		st.apply(e.Type, &p) // a BOOKMARK has a position only
	}
}

// describeError returns an error that says which pods the source cannot watch and where. If the
// credentials are not sufficient, it names them and the missing permission. The result holds no
// secret, because neither this package's errors nor the API server's do. The same cause gives the
// same text, so the Set logs it once.
func (s *Source) describeError(err error) error {
	in, credentials := "all namespaces", "this pod"
	if s.namespace != "" {
		in = "namespace " + s.namespace
	}
	if s.conf.Kubeconfig != "" {
		credentials = fmt.Sprintf("kube.kubeconfig %q", s.conf.Kubeconfig)
	}
	what := fmt.Sprintf("kube: cannot follow pods with %s in %s at %s", s.conf.Selector, in, s.server)
	var call *url.Error
	if errors.As(err, &call) {
		err = call.Err // without the URL, which differs between calls
	}
	var network *net.OpError
	switch {
	case call != nil && call.Timeout() && !errors.As(err, &network):
		return fmt.Errorf("%s: no answer for %s", what, s.responseTimeout)
	case hasCode(err, http.StatusUnauthorized):
		return fmt.Errorf("%s: the credentials of %s are not accepted (401): %w; want a valid token or certificate", what, credentials, err)
	case hasCode(err, http.StatusForbidden):
		return fmt.Errorf("%s: the account of %s may not (403): %w; want a role for it that allows list and watch of pods", what, credentials, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
