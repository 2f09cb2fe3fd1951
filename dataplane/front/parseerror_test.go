package front

import (
	"strings"
	"testing"
)

// The error message for an unreadable request names the header and what is accepted, and quotes
// nothing of the header's value.
func TestParseErrorMessages(t *testing.T) {
	s := pathServer(t)
	const head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
	for raw, want := range map[string]string{
		head + "Authorization: Bearer s3cret\x01\r\n\r\n":                            "the value of header Authorization holds a control character",
		head + "Content-Length: 5s3cret\r\n\r\n":                                     "Content-Length must be one number of decimal digits",
		head + "Transfer-Encoding: s3cret\r\n\r\n":                                   "Transfer-Encoding must be chunked",
		head + "s3cr et: x\r\n\r\n":                                                  "a header name is empty or holds a character that names may not have",
		head + "Host: s3cret\r\n\r\n":                                                "there must be exactly one Host header",
		head + "Content-Type: application/json\r\nContent-Type: s3cret\r\n\r\n":      "there must be at most one Content-Type header",
		head + "Connection: s3cret" + strings.Repeat(", x", 32) + "\r\n\r\n":         "the Connection header must name at most 32 other headers",
		chunkedHead + "0\r\nAuthorization: s3cret\r\n\r\n":                           "a trailer must not be a field that belongs in the head, as Authorization does",
		chunkedHead + "0\r\nX-A: s3cret\x01\r\n\r\n":                                 "its trailers are not well-formed header lines",
		chunkedHead + "0\r\ns3cret\r\n\r\n":                                          "its trailers are not well-formed header lines",
		"POST /v1/chat/completions HTTP/1.1\r\n\r\n":                                 "there must be exactly one Host header",
		"POST /v1/chat/completions HTTP/s3cret\r\nHost: a\r\n\r\n":                   "the protocol must be HTTP/1.1 or HTTP/1.0",
		"s3cret\r\nHost: a\r\n\r\n":                                                  "the request line must be a method, a target and HTTP/1.1",
		"POST /s3cret\x01 HTTP/1.1\r\nHost: a\r\n\r\n":                               "the request target",
		"P{}ST / HTTP/1.1\r\nHost: a\r\nAuthorization: s3cret\r\n\r\n":               "the method must be a token such as GET or POST",
		"POST http://a:s3cret/v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n":       "",
		"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nCookie: s3cret\rx\r\n\r\n": "header",
	} {
		_, got := onBothPaths(t, s, []byte(raw))
		if !strings.Contains(got, want) || strings.Contains(got, "s3cret") || want != "" && !strings.Contains(got, "bad_http") {
			t.Errorf("%q\nis answered %q", raw, got)
		}
	}
}

// Both paths accept the same Host headers.
func TestPathsAgreeOnHosts(t *testing.T) {
	s := pathServer(t)
	for host, accepted := range map[string]bool{
		"a": true, "a.example:8443": true, "127.0.0.1:80": true, "[::1]": true, "[::1]:80": true, "a_b-c.d~e": true, "a:": true,
		"x:80:90": false, "x:abc": false, "[::1": false, "[": false, "]": false, "%": false, "%20": false, "a%41": false, "::::": false,
		":80": false, "": false, "u@a": false, "a/b": false, "a b": false, "[fe80::1%25lo]": false, "::1": false, "[::1]a": false, "a,b": true,
	} {
		plain, fast := onBothPaths(t, s, []byte(strings.Replace(helloPost(""), "Host: a\r\n", "Host: "+host+"\r\n", 1)))
		for _, got := range []string{plain, fast} {
			if strings.HasPrefix(got, "HTTP/1.1 200 ") != accepted || !accepted && !strings.HasPrefix(got, "HTTP/1.1 400 ") {
				t.Errorf("Host: %q, accepted %v: answered %.80q", host, accepted, got)
			}
		}
	}
}

// A request whose connection ends in the middle gets the same error message on both paths.
func TestClosedRequestHasItsPhrase(t *testing.T) {
	s := pathServer(t)
	s.initial.Handler = handlerFunc(func(x Exchange) { x.Error(ClientGone, "", "gone", 0) })
	plain, fast := onBothPaths(t, s, []byte(helloPost("")))
	for _, got := range []string{plain, fast} {
		if !strings.HasPrefix(got, "HTTP/1.1 499 Client Closed Request\r\n") {
			t.Errorf("answered %q", got)
		}
	}
}
