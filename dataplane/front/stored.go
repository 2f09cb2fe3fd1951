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

// Path is the request's target at an engine.
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

// maxStoredID bounds the id of a response; engines' have 37 bytes.
const maxStoredID = 128

// isStoredID says whether an id may be sent to engines as a segment of a path: unreserved
// characters of RFC 3986 only, and not a segment that path handling removes.
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

// retrieve admits a request about a stored response and runs the Handler. A body is read
// away: none of these requests has one that means anything.
func (x *Exchange) retrieve() {
	if !x.admit() || x.awaitsContinue {
		return
	}
	h := &x.ctx.Request.Header
	x.Stored.Method = string(h.Method())
	_, query, _ := bytes.Cut(h.RequestURI(), []byte{'?'})
	x.Stored.Query = string(query)
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

// modelEntry is a model in the answer to GET /v1/models.
type modelEntry struct {
	id  string
	raw json.RawMessage
}

// modelsFor are the entries of Pages.Models that the request's key may use. It answers and
// returns false where there is no list.
func (x *Exchange) modelsFor() (entries []modelEntry, ok bool) {
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
		if json.Unmarshal(raw, &model) == nil && (x.principal == nil || x.principal.Allows(model.ID)) {
			entries = append(entries, modelEntry{model.ID, raw})
		}
	}
	return entries, true
}

// showModels answers GET /v1/models with the models that the request's key may use.
func (x *Exchange) showModels() {
	if x.principal == nil || x.principal.Allows(anyModel) {
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

// showModel answers GET /v1/models/{id} with the model's entry in the list of GET
// /v1/models: not every engine has such a page, and none knows of the others' models.
func (x *Exchange) showModel() {
	name := string(x.head.path[len(modelsPrefix):])
	if decoded, err := url.PathUnescape(name); err == nil {
		name = decoded // a slash may be written either way
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
