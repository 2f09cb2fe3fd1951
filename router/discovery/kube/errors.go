package kube

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// describeError says which pods cannot be followed and where, and of credentials that are
// not enough which ones and what would be. It holds no secret: neither client-go's errors
// nor the API server's do. The same cause gives the same text, which is logged once.
func (s *Source) describeError(err error) error {
	in := "all namespaces"
	if s.namespace != "" {
		in = "namespace " + s.namespace
	}
	var call *url.Error // its URL differs from one call to the next
	if errors.As(err, &call) {
		err = call.Err
	}
	what := fmt.Sprintf("kube: cannot follow pods with %s in %s at %s", s.conf.Selector, in, s.server)
	switch {
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%s: the credentials of %s are not valid there (401): %w; want a token or certificate that is", what, s.credentialsName(), err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%s: the account of %s may not (403): %w; want a role for it that allows list and watch of pods", what, s.credentialsName(), err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// credentialsName is whose credentials are in use.
func (s *Source) credentialsName() string {
	if s.conf.Kubeconfig != "" {
		return fmt.Sprintf("kube.kubeconfig %q", s.conf.Kubeconfig)
	}
	return "this pod"
}

// reflectorRecovers says whether the reflector knows how to go on from an answer: what it stood at is
// forgotten (410), or, where a list was asked for as a stream, the server is an older one
// that cannot (422, 400), and is asked for it plainly then.
func reflectorRecovers(err error, streamed bool) bool {
	var status interface{ Status() metav1.Status }
	if !errors.As(err, &status) {
		return false
	}
	switch status.Status().Code {
	case http.StatusGone:
		return true
	case http.StatusUnprocessableEntity, http.StatusBadRequest:
		return streamed
	}
	return false
}

// shown is an API server's address as it may stand in a log, without a user and a
// password; ok is false where it is none.
func shown(host string) (addr string, ok bool) {
	if !strings.Contains(host, "://") {
		host = "https://" + host
	}
	u, err := url.Parse(host)
	if err != nil || u.Host == "" {
		return "", false
	}
	return u.Scheme + "://" + u.Host, true
}
