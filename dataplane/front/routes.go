package front

import (
	"bytes"
	"strings"
	"time"

	"sluice/dataplane/ascii"
	"sluice/dataplane/compression"
)

// page is a route that does not lead to an engine.
type page struct {
	path     string
	render   func(*httpExchange)
	needsKey bool // the page requires an API key if the server requires keys
}

// pages are served for GET and HEAD.
var pages = []page{
	{"/v1/models", (*httpExchange).showModels, true},
	{"/livez", func(x *httpExchange) { x.show(200, "text/plain; charset=utf-8", []byte("ok\n")) }, false},
	{"/readyz", func(x *httpExchange) { x.showJSON(x.srv.initial.Pages.Ready(x.seesDetails())) }, false},
	{"/health", func(x *httpExchange) { x.showJSON(x.srv.initial.Pages.Health(x.seesDetails())) }, false},
	{"/version", func(x *httpExchange) { x.showJSON(x.srv.initial.Pages.Version()) }, false},
	{"/metrics", (*httpExchange).showMetrics, false},
}

// route is the target of a path: an endpoint or a page.
type route struct {
	endpoint *Endpoint
	page     func(*httpExchange)
	needsKey bool
	methods  string // in the form of the Allow header
	stored   StoredRequest
	session  string // the session's id, escaped
}

// The values of route.methods.
const (
	methodsPage   = "GET, HEAD"
	methodsPost   = "POST"
	methodsStored = "GET, DELETE"
)

// allows reports whether the route accepts a method.
func (r *route) allows(method []byte) bool {
	for m := range strings.SplitSeq(r.methods, ", ") {
		if string(method) == m {
			return true
		}
	}
	return false
}

// routes finds a route by its path. known lists all routes for the 404 message.
type routes struct {
	byPath map[string]route
	known  string
	pages  bool
}

func newRoutes(withPages bool) routes {
	r := routes{byPath: make(map[string]route)}
	var known []string
	for i := range Endpoints {
		r.byPath[Endpoints[i].Path] = route{endpoint: &Endpoints[i], methods: methodsPost}
		if former := Endpoints[i].FormerPath; former != "" {
			r.byPath[former] = r.byPath[Endpoints[i].Path]
		}
		known = append(known, "POST "+Endpoints[i].Path)
	}
	for _, p := range pages {
		if !withPages && p.path != "/livez" {
			continue
		}
		r.byPath[p.path] = route{page: p.render, needsKey: p.needsKey, methods: methodsPage}
		known = append(known, "GET "+p.path)
	}
	if r.pages = withPages; withPages {
		known = append(known, "GET "+modelsPrefix+"{id}")
	}
	known = append(known, "GET and DELETE "+responsesPrefix+"{id}", "POST "+responsesPrefix+"{id}"+cancelSuffix, "POST "+SessionEndpoint.Path)
	r.known = strings.Join(known, ", ")
	return r
}

// Paths that name one model, response or session.
const (
	modelsPrefix    = "/v1/models/"
	responsesPrefix = "/v1/responses/"
	cancelSuffix    = "/cancel"
	sessionsPrefix  = "/v1/sessions/"
	finishSuffix    = "/finish"
)

// find returns the route of a path: one with exactly this path, or one that names a model, a session
// or a stored response.
func (r *routes) find(path []byte) (found route, ok bool) {
	if found, ok = r.byPath[string(path)]; ok {
		return found, true
	}
	if name, ok := bytes.CutPrefix(path, []byte(modelsPrefix)); ok && len(name) > 0 && r.pages {
		return route{page: (*httpExchange).showModel, needsKey: true, methods: methodsPage}, true
	}
	if rest, ok := bytes.CutPrefix(path, []byte(sessionsPrefix)); ok {
		id, ok := bytes.CutSuffix(rest, []byte(finishSuffix))
		if !ok || len(id) == 0 || bytes.IndexByte(id, '/') >= 0 {
			return route{}, false
		}
		return route{endpoint: &SessionEndpoint, methods: methodsPost, session: string(id)}, true
	}
	id, ok := bytes.CutPrefix(path, []byte(responsesPrefix))
	if !ok {
		return route{}, false
	}
	found = route{endpoint: &StoredEndpoint, methods: methodsStored}
	if of, ok := bytes.CutSuffix(id, []byte(cancelSuffix)); ok {
		id, found.methods, found.stored.Cancel = of, methodsPost, true
	}
	if !isStoredID(id) {
		return route{}, false
	}
	found.stored.ID = string(id)
	return found, true
}

// dispatch makes the route's endpoint or page answer the request.
func (x *httpExchange) dispatch(found route) {
	switch {
	case found.endpoint == &StoredEndpoint, found.endpoint == &SessionEndpoint:
		x.Endpoint, x.Stored, x.SessionID = found.endpoint, found.stored, found.session
		x.serveWithoutBody()
		return
	case found.page == nil:
		x.Endpoint = found.endpoint
		x.infer()
		return
	}
	if !found.needsKey || x.authenticate(false) {
		found.page(x)
	}
}

// admit reports whether a request to an engine is accepted by its head. If not, it has answered.
func (x *httpExchange) admit() bool {
	if x.srv.draining.Load() {
		x.rejectDraining()
		return false
	}
	if x.c.usesReservedFD {
		x.Error(TooManyConnections, "", "this router has no file descriptors left; try again later", time.Second)
		return false
	}
	return x.checkHops() && x.acquireForwardedIP() && x.authenticate(!x.awaitsContinue)
}

// infer admits a request to an inference endpoint and runs the Handler.
func (x *httpExchange) infer() {
	if !x.admit() {
		return
	}
	if !isJSON(x.head.Find("Content-Type")) {
		x.Error(WrongContentType, "", "Content-Type must be application/json, got "+quotedForError(x.head.Find("Content-Type")), 0)
		return
	}
	encoded, ok := compression.Parse(x.head.FindAll("Content-Encoding"))
	if !ok {
		x.SetHeader("Accept-Encoding", compression.Known) // RFC 7694
		x.Error(WrongContentType, "", "Content-Encoding must be one of "+compression.Known+", identity, got "+quotedForError(x.head.FindAll("Content-Encoding")), 0)
		return
	}
	if x.awaitsContinue {
		if x.head.Length > x.srv.options().MaxBodyBytes {
			x.rejectTooLarge()
		}
		return
	}
	x.setDrainTarget()
	// This check follows setDrainTarget: a drain that did not find this exchange is seen here.
	if x.srv.drainExpired.Load() {
		x.rejectDraining()
		return
	}
	if !x.readBody() || !x.decode(encoded) || !x.scan() || !x.authorizeModel() {
		return
	}
	if o := x.srv.initial.Observer; o != nil {
		o.Accepted()
	}
	x.handle()
}

// handle runs the Handler. If it does not answer, the client gets a 500.
func (x *httpExchange) handle() {
	x.srv.initial.Handler.ServeInference(x)
	if x.responseState == responsePending {
		x.Log().Error("the handler returned without a response", "endpoint", x.Endpoint.Path)
		x.Error(Internal, "", "the router did not answer this request", 0)
	}
}

// rejectDraining refuses a request during a drain.
func (x *httpExchange) rejectDraining() {
	x.Error(Draining, "", "this router is shutting down; send the request again, another router will serve it", drainRetry)
}

// isJSON reports whether a Content-Type is application/json, with any parameters, or missing.
func isJSON(value []byte) bool { return len(value) == 0 || namesJSON(value) }

// namesJSON reports whether a Content-Type is application/json, with any parameters.
func namesJSON(value []byte) bool {
	media, _, _ := bytes.Cut(value, []byte{';'})
	return ascii.EqualFold(bytes.TrimRight(media, " \t"), "application/json")
}

// quotedForError quotes up to 80 bytes of a client's input for an error message. appendJSONString
// escapes them later.
func quotedForError(b []byte) string {
	if len(b) > 80 {
		return `"` + string(b[:80]) + `…"`
	}
	return `"` + string(b) + `"`
}

func (x *httpExchange) showJSON(status int, body []byte) { x.show(status, "application/json", body) }

func (x *httpExchange) show(status int, contentType string, body []byte) {
	x.beginResponse(status)
	x.path.addHeader("Content-Type", contentType)
	x.setCompressedBody(body)
}

func (x *httpExchange) showMetrics() {
	var text bytes.Buffer
	contentType := x.srv.initial.Pages.Metrics(&text, string(x.Header("Accept")))
	x.show(200, contentType, text.Bytes())
}
