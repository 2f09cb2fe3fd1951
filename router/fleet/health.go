package fleet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"sluice/dataplane/upstream"
)

// healthBody bounds the bytes of a health probe's response body that are read. A longer body is not
// needed: the status decides.
const healthBody = 64 << 10

// The paths of health probes by kind of engine, the best first.
//
// SGLang's /health generates a token and checks for the result once a second, so its servers are
// probed at /ready or /ping. Engines without any of these (Ollama, llama-cpp-python and other
// OpenAI-compatible servers) are probed at /v1/models, which all engines have: without it the
// router could not know what they serve.
var (
	commonHealthPaths = []string{"/health", "/ping", ModelsPath}
	sglangHealthPaths = []string{"/ready", "/ping", "/health", ModelsPath}
)

// ModelsPath is the list of models, and the last path that is tried for health.
const ModelsPath = "/v1/models"

// healthPaths returns the paths at which a server's health may be probed. named is the configured
// path, "" if there is none; a configured path is the only one.
func healthPaths(named string, sglang bool) []string {
	switch {
	case named != "":
		return []string{named}
	case sglang:
		return sglangHealthPaths
	}
	return commonHealthPaths
}

// checkHealth sends a health probe: GET paths[from], then the following paths, once around the
// list, as long as the server answers that it has no such path (404 or 405). It returns the index
// in paths of the last path, and nil if the response was 2xx. answered reports whether the last
// request was answered at all. This is the only definition of a healthy server: the prober, init
// and check use it. It takes at most timeout in total.
func (a *httpGetter) checkHealth(ep *upstream.Endpoint, paths []string, from int, timeout time.Duration) (at int, answered bool, err error) {
	deadline := time.Now().Add(timeout)
	for i := range paths {
		at = (from + i) % len(paths)
		status, err := a.status(ep, paths[at], deadline)
		switch {
		case err != nil:
			return at, false, err
		case status/100 == 2:
			return at, true, nil
		case status != 404 && status != 405:
			return at, true, fmt.Errorf("GET %s returned %d; want 200", paths[at], status)
		case len(paths) == 1:
			return at, true, fmt.Errorf("GET %s returned %d; want 200: set health.path, or health_path of the worker, to another path", paths[at], status)
		}
	}
	return at, true, fmt.Errorf("none of the paths %s exists (404 or 405); set health.path, or health_path of the worker, to another path", strings.Join(paths, ", "))
}

// InspectHealth inspects one engine server, as Inspect does, and probes its health as the prober of
// a Fleet does. healthPath is the configured path, "" if there is none. It takes at most three
// times timeout.
func InspectHealth(ctx context.Context, ep *upstream.Endpoint, healthPath string, timeout time.Duration) *EngineInfo {
	answer := Inspect(ctx, ep, timeout)
	var a httpGetter
	defer a.bindContext(ctx)()
	paths := healthPaths(healthPath, answer.Engine == SGLang)
	at, _, err := a.checkHealth(ep, paths, 0, timeout)
	switch {
	case err == nil:
		answer.HealthPath = paths[at]
	case answer.Err == nil:
		answer.Err = fmt.Errorf("not healthy: %s", short(err))
	}
	return answer
}

// httpGetter sends GET requests one after another without allocating per request. Its zero value is
// ready for use. One goroutine at a time uses it.
type httpGetter struct {
	call upstream.Call
	req  upstream.Request
	buf  []byte
}

// bindContext ends the current request and all later ones when ctx ends. The returned function
// releases its resources.
func (a *httpGetter) bindContext(ctx context.Context) (release func() bool) {
	return context.AfterFunc(ctx, a.call.Cancel)
}

// get fetches path until the deadline. The body is borrowed until the next request; a body over
// limit bytes is upstream.ErrTooLarge.
func (a *httpGetter) get(ep *upstream.Endpoint, path string, deadline time.Time, limit int) (status int, body []byte, err error) {
	a.req = upstream.Request{Method: "GET", Path: path, Deadline: deadline, Redirects: true}
	resp, err := ep.Do(&a.req, &a.call)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Release()
	a.buf, err = resp.ReadAll(a.buf[:0], limit)
	return resp.Status, a.buf, err
}

// status returns the status of a GET of path. The connection is kept if the body is not over
// healthBody.
func (a *httpGetter) status(ep *upstream.Endpoint, path string, deadline time.Time) (int, error) {
	status, _, err := a.get(ep, path, deadline, healthBody)
	if errors.Is(err, upstream.ErrTooLarge) {
		err = nil
	}
	if cap(a.buf) > maxKeptBuffer {
		a.buf = nil
	}
	return status, err
}

// maxKeptBuffer bounds the buffer in bytes that a getter keeps between health probes: there is one
// per server.
const maxKeptBuffer = 4 << 10
