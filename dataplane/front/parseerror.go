package front

import (
	"bytes"
	"errors"
	"io"
	"strings"

	"sluice/dataplane/http1"

	"github.com/valyala/fasthttp"
)

// parseErrorText returns an error message for a request that fasthttp could not read. It does
// not use fasthttp's message, which quotes the client's input, including API keys.
func parseErrorText(h *fasthttp.RequestHeader, err error) string {
	text := err.Error()
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "the connection ended within the request (" + io.ErrUnexpectedEOF.Error() + ")"
	case errors.Is(err, fasthttp.ErrMissingRequestMethod), errors.Is(err, fasthttp.ErrExtraWhitespaceInRequestLine), hasErrorPrefix(text, "cannot find whitespace"):
		return "the request line must be a method, a target and HTTP/1.1, with one space between them"
	case errors.Is(err, fasthttp.ErrUnsupportedRequestMethod):
		return "the method must be a token such as GET or POST"
	case errors.Is(err, fasthttp.ErrEmptyRequestURI):
		return "the request target is empty"
	case hasErrorPrefix(text, "unsupported http version"):
		return "the protocol must be HTTP/1.1 or HTTP/1.0"
	case hasErrorPrefix(text, "invalid request uri"):
		return "the request target must be a path, beginning with /, or an absolute URL, without spaces and control characters"
	case hasErrorPrefix(text, "missing required host header"): // the request may have no header lines at all
		return "there must be exactly one Host header"
	}
	// The request line is valid. http1.Head names the header line at fault.
	if _, _, ofHead := strings.Cut(text, headErrorPrefix); ofHead {
		var own http1.Head
		if refused := own.Parse([]byte("POST"), []byte("/"), http11Suffix, rejectedHead(h)); refused != "" {
			return refused
		}
	}
	for _, of := range [...]string{"invalid url", "invalid host", "invalid port", "invalid character", "invalid uri", "error when parsing"} {
		if strings.Contains(text, of) {
			return badURL
		}
	}
	return "the request head is not well-formed HTTP/1.1"
}

// badURL is the message for a request that only fasthttp refuses, because it parses a URL from
// each request.
const badURL = "the request target and the Host header must make a valid URL"

// hasErrorPrefix reports whether text, a fasthttp error that is wrapped at most once, begins with
// words. It compares only the beginning, because the client's input follows it.
func hasErrorPrefix(text, words string) bool {
	_, inner, wrapped := strings.Cut(text, headErrorPrefix)
	return strings.HasPrefix(text, words) || wrapped && strings.HasPrefix(inner, words)
}

// headErrorPrefix is the prefix of fasthttp's errors about a head.
const headErrorPrefix = "error when reading request headers: "

// rejectedHead returns the header lines of the request that fasthttp has refused last. fasthttp
// has set their length to zero, but their bytes are still in the slice's capacity.
func rejectedHead(h *fasthttp.RequestHeader) []byte {
	raw := h.RawHeaders()
	raw = raw[:cap(raw)]
	if at := bytes.Index(raw, headEnd); at >= 0 {
		raw = raw[:at+len(headEnd)]
	}
	return raw
}
