package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"
)

const (
	maxPage   = 256 << 20 // bounds one page of a list
	maxStatus = 64 << 10  // bounds the description of a failure
	pageSize  = "500"
	// An HTTP/2 connection without a byte for pingAfter is checked, and closed if the server does not
	// answer within pingTimeout: a watch may be silent for minutes.
	pingAfter   = 30 * time.Second
	pingTimeout = 15 * time.Second
	dialTimeout = 10 * time.Second
)

// apiError is a failure that the API server describes.
type apiError struct {
	code    int
	message string
}

func (e *apiError) Error() string { return e.message }

// hasCode reports whether err is the API server's failure of that status code.
func hasCode(err error, code int) bool {
	var e *apiError
	return errors.As(err, &e) && e.code == code
}

// client calls the API server with one reading of the certificates. The source makes a new one after
// each failure, so it follows certificates that are replaced in their files.
type client struct {
	http  *http.Client
	creds *credentials
	pods  string // URL of the pods
}

// newClient reads the certificates. A call whose response does not begin within timeout fails.
func newClient(ctx context.Context, c *credentials, namespace string, timeout time.Duration) (*client, error) {
	ca, err1 := c.ca.read()
	cert, err2 := c.cert.read()
	key, err3 := c.key.read()
	if err := cmp.Or(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("cannot read a certificate or key: %w", err)
	}
	if c.exec != nil {
		if err := c.runPlugin(ctx); err != nil {
			return nil, err
		}
		if c.exec.cert != "" {
			cert, key = []byte(c.exec.cert), []byte(c.exec.key)
		}
	}
	conf := &tls.Config{ServerName: c.serverName, InsecureSkipVerify: c.insecure}
	if len(ca) > 0 {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(ca) {
			return nil, errors.New("the certificate authority has no certificate; want PEM")
		}
	}
	if len(cert) > 0 || len(key) > 0 {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cannot use the client certificate: %w", err)
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	proxy := http.ProxyFromEnvironment
	if c.proxy != nil {
		proxy = http.ProxyURL(c.proxy)
	}
	path := "/api/v1/pods"
	if namespace != "" {
		path = "/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods"
	}
	return &client{creds: c, pods: c.server.JoinPath(path).String(), http: &http.Client{Transport: &http.Transport{
		Proxy: proxy, TLSClientConfig: conf, ForceAttemptHTTP2: true,
		DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext, TLSHandshakeTimeout: dialTimeout,
		ResponseHeaderTimeout: timeout, IdleConnTimeout: 90 * time.Second,
		HTTP2: &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
	}}}, nil
}

// get sends one request. It reads the token each time, because tokens of service accounts are
// replaced in their file before they expire. The caller closes the body.
func (c *client) get(ctx context.Context, query url.Values) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.pods+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "sluice")
	token, err := c.creds.bearer(ctx)
	switch {
	case err != nil:
		return nil, err
	case token != "":
		req.Header.Set("Authorization", "Bearer "+token)
	case c.creds.user != "":
		req.SetBasicAuth(c.creds.user, c.creds.password)
	}
	resp, err := c.http.Do(req)
	if err != nil || resp.StatusCode == http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	var st status
	if json.NewDecoder(io.LimitReader(resp.Body, maxStatus)).Decode(&st) != nil || st.Message == "" {
		st.Message = "status " + resp.Status
	}
	return nil, &apiError{resp.StatusCode, st.Message}
}

// list returns all pods, and the position from which to watch them. With cached the server may answer
// from its cache, which costs it less and may be behind.
func (c *client) list(ctx context.Context, selector string, cached bool) (pods []pod, version string, err error) {
	query := url.Values{"labelSelector": {selector}, "limit": {pageSize}}
	if cached {
		query.Set("resourceVersion", "0")
	}
	for {
		resp, err := c.get(ctx, query)
		if err != nil {
			return nil, "", err
		}
		var page podList
		err = json.NewDecoder(io.LimitReader(resp.Body, maxPage)).Decode(&page)
		resp.Body.Close()
		switch {
		case err != nil:
			return nil, "", fmt.Errorf("cannot read the list of pods: %w", err)
		case page.Metadata.ResourceVersion == "":
			return nil, "", errors.New("the list of pods has no resourceVersion")
		}
		pods = append(pods, page.Items...)
		if page.Metadata.Continue == "" {
			return pods, page.Metadata.ResourceVersion, nil
		}
		query.Set("continue", page.Metadata.Continue)
		query.Del("resourceVersion") // of the first page only
	}
}

// watch opens a watch from a position, which the server ends after about length.
func (c *client) watch(ctx context.Context, selector, version string, length time.Duration) (*http.Response, error) {
	return c.get(ctx, url.Values{"labelSelector": {selector}, "watch": {"true"}, "allowWatchBookmarks": {"true"},
		"resourceVersion": {version}, "timeoutSeconds": {fmt.Sprint(int(length.Seconds()))}})
}
