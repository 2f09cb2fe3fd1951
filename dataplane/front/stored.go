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
	if !x.admit() || x.expects {
		return
	}
	h := &x.ctx.Request.Header
	x.Stored.Method = string(h.Method())
	_, query, _ := bytes.Cut(h.RequestURI(), []byte{'?'})
	x.Stored.Query = string(query)
	x.opens()
	if x.srv.cutting.Load() {
		x.tooLate()
		return
	}
	if err := x.Doc.Scan([]byte("{}"), jsonscan.Limits{MaxDepth: 1}); err != nil {
		x.Error(Internal, "", err.Error(), 0)
		return
	}
	x.untrusted = !x.body.drain(x.c)
	if o := x.srv.opt.Observer; o != nil {
		o.Accepted()
	}
	x.handle()
}

// showModel answers GET /v1/models/{id} with the model's entry in the list of GET
// /v1/models: not every engine has such a page, and none knows of the others' models.
func (x *Exchange) showModel() {
	name := string(x.head.path[len(modelsPrefix):])
	if decoded, err := url.PathUnescape(name); err == nil {
		name = decoded // a slash may be written either way
	}
	status, body := x.srv.opt.Pages.Models()
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if status != 200 || json.Unmarshal(body, &list) != nil {
		x.showJSON(status, body)
		return
	}
	var known []string
	for _, entry := range list.Data {
		var model struct {
			ID string `json:"id"`
		}
		switch err := json.Unmarshal(entry, &model); {
		case err != nil:
		case model.ID == name:
			x.showJSON(200, entry)
			return
		default:
			known = append(known, strconv.Quote(model.ID))
		}
	}
	x.Error(UnknownModel, "model", "the model "+shown([]byte(name))+" does not exist here; known models: "+strings.Join(known, ", "), 0)
}
