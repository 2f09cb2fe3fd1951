package upstream

import (
	"strconv"
	"time"
)

// Field is one header line.
type Field struct{ Name, Value string }

// Request is one HTTP/1.1 request. Host, Content-Length and the hop-by-hop
// headers are the endpoint's own to write; Fields that hold them are dropped.
// A Path, name or value that could end its line is an error, in PhaseDial.
type Request struct {
	Method string
	Path   string // with query, beginning with "/"
	Fields []Field
	Body   [][]byte // written by one writev with the head; borrowed until Do returns
	// HeadTimeout bounds the wait from the request's last byte to the
	// response head; 0 means no bound but Deadline.
	HeadTimeout time.Duration
	// Deadline bounds the whole call, body included; zero means none.
	Deadline time.Time
	// Grace is how long behind the response head, at most, a connection that is given
	// up stays open while no byte of the body has come: by a Cut, a HalfClose, a Deadline,
	// a Release. It is for engines that send the head of a stream before they have taken
	// the request in. Nobody reads what comes then; the first byte ends it. 0 means none.
	Grace time.Duration
	// Group, where set, has the Call while it is under way. Tokens is how many prompt
	// tokens the engine may have to compute before it answers; 0: none, or unknown.
	// Prefill says that its answer comes as soon as it has computed them.
	Group   *Group
	Tokens  int
	Prefill bool
	// Redirects accepts an answer with a status of 3xx, for probes, which look at the status
	// alone. Without it such an answer is ErrRedirect. It must be false where a client
	// gets the answer.
	Redirects bool
}

// check refuses what would not be one well-formed request.
func (r *Request) check() error {
	if !validToken(r.Method) {
		return badRequest("method %q: want letters only", r.Method)
	}
	if len(r.Path) == 0 || r.Path[0] != '/' || !validTarget(r.Path) {
		return badRequest("path %q: want one that begins with / and holds no space or control character", r.Path)
	}
	for i := range r.Fields {
		f := &r.Fields[i]
		if !validToken(f.Name) {
			return badRequest("header name %q: want a token", f.Name)
		}
		if !validValue(f.Value) {
			return badRequest("value of header %q: want no control character", f.Name)
		}
	}
	return nil
}

// size is the body's length.
func (r *Request) size() int {
	n := 0
	for _, b := range r.Body {
		n += len(b)
	}
	return n
}

// deadline is Deadline on the package's clock, 0 for none.
func (r *Request) deadline() time.Duration {
	if r.Deadline.IsZero() {
		return 0
	}
	return max(r.Deadline.Sub(epoch), 1)
}

// appendHead renders the request head.
func (r *Request) appendHead(dst []byte, e *Endpoint, size int) []byte {
	dst = append(dst, r.Method...)
	dst = append(dst, ' ')
	dst = append(dst, e.prefix...)
	dst = append(dst, r.Path...)
	dst = append(dst, " HTTP/1.1\r\nHost: "...)
	dst = append(dst, e.host...)
	dst = append(dst, "\r\n"...)
	for i := range r.Fields {
		f := &r.Fields[i]
		if isConnectionField(f.Name) || e.opt.Key != "" && foldEqual(f.Name, "authorization") {
			continue
		}
		dst = append(dst, f.Name...)
		dst = append(dst, ": "...)
		dst = append(dst, f.Value...)
		dst = append(dst, "\r\n"...)
	}
	if e.opt.Key != "" {
		dst = append(dst, "Authorization: Bearer "...)
		dst = append(dst, e.opt.Key...)
		dst = append(dst, "\r\n"...)
	}
	if size > 0 || r.Method == "POST" || r.Method == "PUT" || r.Method == "PATCH" {
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, int64(size), 10)
		dst = append(dst, "\r\n"...)
	}
	return append(dst, "\r\n"...)
}

// isConnectionField says whether a header is the connection's business, not the
// request's: the endpoint writes it or leaves it out.
func isConnectionField(name string) bool {
	switch len(name) {
	case 4:
		return foldEqual(name, "host")
	case 6:
		return foldEqual(name, "expect")
	default:
		return hopByHop(name)
	}
}
