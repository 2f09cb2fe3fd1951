package upstream

import (
	"strconv"
	"time"

	"sluice/dataplane/ascii"
	"sluice/dataplane/monotime"
)

// Field is one header line.
type Field struct{ Name, Value string }

// Request is one HTTP/1.1 request. The Endpoint writes Host, Content-Length and the hop-by-hop
// headers; Fields with these names are dropped. A Path, name or value that could end its line is an
// error in PhaseDial.
type Request struct {
	Method string
	Path   string // with the query, begins with "/"
	Fields []Field
	Body   [][]byte // written together with the head; borrowed until Do returns
	// HeadTimeout bounds the time from the request's last byte to the response head; 0: only
	// Deadline does.
	HeadTimeout time.Duration
	// Deadline bounds the whole call, including the body; zero: no bound.
	Deadline time.Time
	// Grace is how long after the response head a connection that is given up (by Cancel,
	// HalfClose, Deadline or Release) stays open while no byte of the body has come. It is for
	// engines that send the head of a stream before they have accepted the request. Nobody reads
	// what comes then; the first byte ends the grace time. 0: none.
	Grace time.Duration
	// Group, if set, contains the Call while it runs. Tokens is how many prompt tokens the engine
	// may have to compute before it answers; 0: none or unknown. Prefill: the response comes as
	// soon as they are computed.
	Group   *Group
	Tokens  int
	Prefill bool
	// Redirects accepts a response with a 3xx status, for probes, which only use the status.
	// Otherwise such a response is ErrRedirect. It must be false if a client gets the response.
	Redirects bool
}

// check rejects what would not be one well-formed request.
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

// size returns the length of the body.
func (r *Request) size() int {
	n := 0
	for _, b := range r.Body {
		n += len(b)
	}
	return n
}

// deadline returns Deadline by the package's clock; 0: none.
func (r *Request) deadline() time.Duration {
	if r.Deadline.IsZero() {
		return 0
	}
	return max(time.Duration(monotime.Of(r.Deadline)), 1)
}

// appendHead appends the request head.
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
		if isConnectionField(f.Name) || e.opt.Key != "" && ascii.EqualFold(f.Name, "authorization") {
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

// isConnectionField reports whether a header belongs to the connection and not to the request. The
// Endpoint writes it or leaves it out.
func isConnectionField(name string) bool {
	switch len(name) {
	case 4:
		return ascii.EqualFold(name, "host")
	case 6:
		return ascii.EqualFold(name, "expect")
	default:
		return hopByHop(name)
	}
}
