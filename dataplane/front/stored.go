package front

import (
	"bytes"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"

	"sluice/dataplane/jsonscan"
)

// StoredRequest is a request about a response that an engine has stored.
type StoredRequest struct {
	ID     string
	Method string // GET, DELETE, or POST to cancel
	Cancel bool
	Query  string // as the client wrote it, without the question mark
}

// Path returns the request target to use at an engine.
func (s *StoredRequest) Path() string {
	path := responsesPrefix + s.ID
	if s.Cancel {
		path += cancelSuffix
	}
	if s.Query != "" {
		path += "?" + s.Query
	}
	return path
}

// maxStoredID bounds the id of a response. Ids of engines have 37 bytes.
const maxStoredID = 128

// isStoredID reports whether an id may be sent to engines as a path segment. It must have only
// unreserved characters of RFC 3986, and must not begin with a dot: servers remove the
// segments "." and "..".
func isStoredID(id []byte) bool {
	if len(id) == 0 || len(id) > maxStoredID || bytes.HasPrefix(id, []byte{'.'}) {
		return false
	}
	for _, c := range id {
		if !('a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0) {
			return false
		}
	}
	return true
}

// serveWithoutBody admits a request about a stored response or a session and runs the Handler. It
// discards a body, because no such request has a meaningful one.
func (x *httpExchange) serveWithoutBody() {
	if !x.admit() || x.awaitsContinue {
		return
	}
	x.setDrainTarget()
	if x.srv.drainExpired.Load() {
		x.rejectDraining()
		return
	}
	if err := x.Doc.Scan([]byte("{}"), jsonscan.Limits{MaxDepth: 1}); err != nil {
		x.Error(Internal, "", err.Error(), 0)
		return
	}
	x.closeConn = !x.body.drain(x.c)
	if o := x.srv.initial.Observer; o != nil {
		o.Accepted()
	}
	x.handle()
}

// modelEntry is a model in the response to GET /v1/models.
type modelEntry struct {
	id  string
	raw json.RawMessage
}

// modelsFor returns the entries of Pages.Models that the request's API key may use. If there is
// no list it answers and returns false.
func (x *httpExchange) modelsFor() (entries []modelEntry, ok bool) {
	status, body := x.srv.initial.Pages.Models()
	if status != 200 {
		x.showJSON(status, body)
		return nil, false
	}
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		x.Error(UpstreamInvalid, "", "the engine's list of models is not valid JSON", 0)
		return nil, false
	}
	for _, raw := range list.Data {
		var model struct {
			ID string `json:"id"`
		}
		if json.Unmarshal(raw, &model) == nil && (x.Principal == nil || x.Principal.Allows(model.ID)) {
			entries = append(entries, modelEntry{model.ID, raw})
		}
	}
	return entries, true
}

// showModels answers GET /v1/models with the models that the request's API key may use.
func (x *httpExchange) showModels() {
	if x.Principal == nil || x.Principal.Allows(anyModel) {
		x.showJSON(x.srv.initial.Pages.Models())
		return
	}
	entries, ok := x.modelsFor()
	if !ok {
		return
	}
	body := []byte(`{"object":"list","data":[`)
	for i, e := range entries {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, e.raw...)
	}
	x.showJSON(200, append(body, "]}\n"...))
}

// showModel answers GET /v1/models/{id} with the model's entry in the list of GET /v1/models. It
// asks no engine, because not every engine has this page and none knows the models of others.
func (x *httpExchange) showModel() {
	name := string(x.head.Path[len(modelsPrefix):])
	if decoded, err := url.PathUnescape(name); err == nil {
		name = decoded // clients may or may not escape a slash
	}
	entries, ok := x.modelsFor()
	if !ok {
		return
	}
	var known []string
	for _, e := range entries {
		if e.id == name {
			x.showJSON(200, e.raw)
			return
		}
		known = append(known, strconv.Quote(e.id))
	}
	x.Error(UnknownModel, "model", "the model "+quotedForError([]byte(name))+" does not exist here; known models: "+strings.Join(known, ", "), 0)
}
