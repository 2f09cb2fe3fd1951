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

// describeError returns an error that says which pods the source cannot watch and where. If the
// credentials are not sufficient, it names them and the missing permission. The result holds no
// secret, because neither client-go's errors nor the API server's do. The same cause gives the
// same text, so the Set logs it once.
func (s *Source) describeError(err error) error {
	in := "all namespaces"
	if s.namespace != "" {
		in = "namespace " + s.namespace
	}
	var call *url.Error // its URL differs between calls
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

// credentialsName names the credentials in use, for errors.
func (s *Source) credentialsName() string {
	if s.conf.Kubeconfig != "" {
		return fmt.Sprintf("kube.kubeconfig %q", s.conf.Kubeconfig)
	}
	return "this pod"
}

// reflectorRecovers reports whether the reflector handles an error response by itself. After 410
// (Gone) it lists the pods again. If it requested a list as a stream and an older API server does
// not support this (422, 400), it sends an ordinary list request.
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

// shown returns the address of an API server without user and password, for logs and errors; ok is
// false if host is not an address.
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
