package front

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/dataplane/fieldrules"
	"sluice/dataplane/relay"
)

// rawCase is a request as raw bytes, and the expected result.
type rawCase struct {
	name        string
	raw         string
	handlerRuns bool // the handler runs once, with hello as its body
	status      int
	keepsConn   bool // the connection serves a request that follows
}

const (
	hello     = `{"model":"m"}`
	probeBody = `{"model":"probe"}`
	// inner is a whole request that some bodies carry: it must never run.
	inner     = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n" + `{"model":"smuggled"}`
	innerPage = "GET /x HTTP/1.1\r\nHost: a\r\n\r\n"

	requestLine = "POST /v1/chat/completions HTTP/1.1\r\n"
	atHost      = requestLine + "Host: a\r\n"
	chunkedHead = atHost + "Transfer-Encoding: chunked\r\n\r\n"
	helloChunks = "d\r\n" + hello + "\r\n0\r\n\r\n"
)

// helloPost is a request with these header lines before a good Content-Length.
func helloPost(lines string) string {
	return atHost + lines + "Content-Length: 13\r\n\r\n" + hello
}

// target is a request with this target.
func target(s string) string { return strings.Replace(helloPost(""), chat, s, 1) }

// length is a request with this Content-Length value.
func length(value string) string {
	return atHost + "Content-Length: " + value + "\r\n\r\n" + hello
}

// encoded is a chunked request with this Transfer-Encoding value.
func encoded(value string) string {
	return atHost + "Transfer-Encoding:" + value + "\r\n\r\n" + helloChunks
}

func accepted() []rawCase {
	cases := []rawCase{
		{name: "content length", raw: helloPost("")},
		{name: "content length with white space", raw: length("\t 13 \t")},
		{name: "content length with leading zeros", raw: length("0013")},
		{name: "lower-case names", raw: requestLine + "host: a\r\ncontent-length: 13\r\n\r\n" + hello},
		{name: "chunked", raw: chunkedHead + helloChunks},
		{name: "chunked in capitals", raw: encoded(" CHUNKED")},
		{name: "chunked without a space", raw: encoded("chunked")},
		{name: "chunk size in capitals", raw: chunkedHead + "D\r\n" + hello + "\r\n0\r\n\r\n"},
		{name: "chunk size with leading zeros", raw: chunkedHead + "000d\r\n" + hello + "\r\n000\r\n\r\n"},
		{name: "chunk extension", raw: chunkedHead + "d;a=b\r\n" + hello + "\r\n0;c\r\n\r\n"},
		{name: "chunk trailer", raw: chunkedHead + "d\r\n" + hello + "\r\n0\r\nX-Sum: 1\r\n\r\n"},
		{name: "one byte a chunk", raw: chunkedHead + oneByteChunks(hello) + "0\r\n\r\n"},
		{name: "chunk extensions, quoted", raw: chunkedHead + "d;a=\"b;\\\"c\" ; d\r\n" + hello + "\r\n0\r\n\r\n"},
		{name: "chunk size of 15 digits", raw: chunkedHead + "00000000000000d\r\n" + hello + "\r\n0\r\n\r\n"},
		{name: "chunk trailers", raw: chunkedHead + "d\r\n" + hello + "\r\n0\r\nX-Sum:\r\nX: \t\xc3\xa9 \r\n\r\n"},
		{name: "empty line before the request", raw: "\r\n" + helloPost("")},
		{name: "absolute target", raw: target("http://a" + chat)},
		{name: "absolute target with https", raw: target("https://a" + chat)},
		{name: "absolute target with a scheme in capitals", raw: target("HTTP://a" + chat)},
		{name: "absolute target with a port", raw: target("http://a:8000" + chat)},
		{name: "absolute target with an empty port", raw: target("http://a:" + chat)},
		{name: "absolute target with IPv6", raw: target("http://[::1]:80" + chat)},
		{name: "absolute target of another host", raw: target("http://b.example" + chat)}, // RFC 9112 3.2.2
		{name: "absolute target with a query", raw: target("http://a" + chat + "?b=/c")},
		{name: "query with a question mark", raw: target(chat + "?a?b=/%zz")},
		{name: "query", raw: strings.Replace(helloPost(""), " HTTP", "?a=b HTTP", 1)},
		{name: "empty header value", raw: helloPost("X-A:\r\n")},
		{name: "bytes over 127 in a value", raw: helloPost("X-A: \xc3\xa9\xff\r\n")},
		{name: "tab in a value", raw: helloPost("X-A: a\tb\r\n")},
		{name: "content type with a parameter", raw: helloPost("Content-Type: Application/JSON ; charset=utf-8\r\n")},
		{name: "identity content encoding", raw: helloPost("Content-Encoding: identity\r\n")},
		{name: "upgrade asked for", raw: helloPost("Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n")},
		{name: "expect 100-continue", raw: helloPost("Expect: 100-continue\r\n")},
		{name: "HTTP/1.0 with keep-alive", raw: strings.Replace(helloPost("Connection: keep-alive\r\n"), "/1.1", "/1.0", 1)},
	}
	for i := range cases {
		cases[i].handlerRuns, cases[i].status, cases[i].keepsConn = true, 200, true
	}
	closing := []rawCase{
		{name: "connection close", raw: helloPost("Connection: close\r\n")},
		{name: "connection close among others", raw: helloPost("Connection: X-A , Close\r\n")},
		{name: "connection close on a second line", raw: helloPost("Connection: keep-alive\r\nConnection: close\r\n")},
		{name: "connection close before keep-alive", raw: helloPost("Connection: close\r\nConnection: keep-alive\r\n")},
		{name: "HTTP/1.0", raw: strings.Replace(helloPost(""), "/1.1", "/1.0", 1)},
		{name: "HTTP/1.0 without a host", raw: "POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 13\r\n\r\n" + hello},
	}
	for i := range closing {
		closing[i].handlerRuns, closing[i].status = true, 200
	}
	return append(cases, closing...)
}

func oneByteChunks(s string) string {
	var b strings.Builder
	for i := range len(s) {
		b.WriteString(chunk(s[i : i+1]))
	}
	return b.String()
}

// refusedHeads get a 400, and the connection is closed, because nobody knows where such a request
// ends.
func refusedHeads() []rawCase {
	cases := []rawCase{
		{name: "length +", raw: length("+13")},
		{name: "length -", raw: length("-13")},
		{name: "length hex", raw: length("0x0d")},
		{name: "length underscore", raw: length("1_3")},
		{name: "length empty", raw: length("")},
		{name: "length 2^64+13", raw: length("18446744073709551629")},
		{name: "length 2^63", raw: length("9223372036854775808")},
		{name: "length list", raw: length("13, 13")},
		{name: "length two words", raw: length("13 13")},
		{name: "length fraction", raw: length("13.0")},
		{name: "length exponent", raw: length("1e1")},
		{name: "length VT", raw: length("\v13")},
		{name: "length quoted", raw: length(`"13"`)},
		{name: "length twice the same", raw: helloPost("Content-Length: 13\r\n")},
		{name: "length twice, different", raw: helloPost("content-length: 5\r\n")},
		{name: "length with space before the colon", raw: atHost + "Content-Length : 13\r\n\r\n" + hello},
		{name: "length with tab before the colon", raw: atHost + "Content-Length\t: 13\r\n\r\n" + hello},
		{name: "length folded", raw: atHost + "Content-Length:\r\n 13\r\n\r\n" + hello},

		{name: "length and encoding", raw: atHost + "Content-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n" + helloChunks},
		{name: "encoding and length", raw: atHost + "Transfer-Encoding: chunked\r\nContent-Length: 13\r\n\r\n" + helloChunks},
		{name: "encoding and length hiding a request", raw: atHost + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + inner},
		{name: "encoding with space before the colon", raw: atHost + "Transfer-Encoding : chunked\r\n\r\n" + helloChunks},
		{name: "encoding x", raw: encoded(" xchunked")},
		{name: "encoding list", raw: encoded(" gzip, chunked")},
		{name: "encoding list the other way", raw: encoded(" chunked, gzip")},
		{name: "encoding twice chunked", raw: encoded(" chunked, chunked")},
		{name: "encoding on two lines", raw: atHost + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + helloChunks},
		{name: "encoding chunked and identity on two lines", raw: atHost + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + helloChunks},
		{name: "encoding VT", raw: encoded(" \vchunked")},
		{name: "encoding FF", raw: encoded(" \fchunked")},
		{name: "encoding NEL", raw: encoded(" \x85chunked")},
		{name: "encoding NUL", raw: encoded(" chunked\x00")},
		{name: "encoding identity", raw: atHost + "Transfer-Encoding: identity\r\n\r\n"},
		{name: "encoding identity and length", raw: helloPost("Transfer-Encoding: identity\r\n")},
		{name: "encoding empty", raw: encoded("")},
		{name: "encoding parameter", raw: encoded(" chunked;q=1")},
		{name: "encoding quoted", raw: encoded(` "chunked"`)},
		{name: "encoding comma", raw: encoded(" chunked,")},
		{name: "encoding folded", raw: encoded("\r\n chunked")},
		{name: "encoding on HTTP/1.0", raw: strings.Replace(chunkedHead+helloChunks, "/1.1", "/1.0", 1)},

		{name: "fold", raw: helloPost("X-A: a\r\n b\r\n")},
		{name: "fold by tab", raw: helloPost("X-A: a\r\n\tb\r\n")},
		{name: "fold of nothing", raw: helloPost("X-A: a\r\n \r\n")},
		{name: "space before the first name", raw: requestLine + " Host: a\r\nContent-Length: 13\r\n\r\n" + hello},
		{name: "more lines than any client sends", raw: helloPost(strings.Repeat("A:\r\n", 256))},
		{name: "no colon", raw: helloPost("X-A\r\n")},
		{name: "empty name", raw: helloPost(": a\r\n")},
		{name: "name with a space", raw: helloPost("X A: a\r\n")},
		{name: "name with a parenthesis", raw: helloPost("X(A): a\r\n")},
		{name: "name with a NUL", raw: helloPost("X\x00A: a\r\n")},
		{name: "name with a byte over 127", raw: helloPost("X\xe9: a\r\n")},
		{name: "value with a NUL", raw: helloPost("X-A: a\x00b\r\n")},
		{name: "value with a bare CR", raw: helloPost("X-A: a\rb\r\n")},
		{name: "value with ESC", raw: helloPost("X-A: \x1b[2J\r\n")},
		{name: "value with DEL", raw: helloPost("X-A: \x7f\r\n")},
		{name: "bare LF behind a header", raw: requestLine + "Host: a\nContent-Length: 13\r\n\r\n" + hello},
		{name: "bare LF hiding a length", raw: requestLine + "Host: a\r\nX-A: b\nContent-Length: 13\r\n\r\n" + hello},
		{name: "bare LF as the empty line", raw: atHost + "Content-Length: 13\r\n\n" + hello},
		{name: "two bare LFs inside the head", raw: requestLine + "Host: a\n\nContent-Length: 13\r\n\r\n" + hello},
		{name: "bare CR as the empty line", raw: atHost + "Content-Length: 13\r\n\rX: y\r\n\r\n" + hello},

		{name: "no host", raw: requestLine + "Content-Length: 13\r\n\r\n" + hello},
		{name: "two hosts", raw: helloPost("Host: a\r\n")},
		{name: "two hosts, other case", raw: helloPost("hOST: b\r\n")},
		{name: "empty host", raw: requestLine + "Host:\r\nContent-Length: 13\r\n\r\n" + hello},
		{name: "host with a space", raw: requestLine + "Host: a b\r\nContent-Length: 13\r\n\r\n" + hello},
		{name: "host with a slash", raw: requestLine + "Host: a/b\r\nContent-Length: 13\r\n\r\n" + hello},
		{name: "host with user info", raw: requestLine + "Host: u@b\r\nContent-Length: 13\r\n\r\n" + hello},

		{name: "control in the method", raw: "PO\x01ST" + helloPost("")[4:]},
		{name: "method with a slash", raw: "PO/ST" + helloPost("")[4:]},
		{name: "method empty", raw: helloPost("")[4:]},
		{name: "two spaces before the target", raw: strings.Replace(helloPost(""), "POST ", "POST  ", 1)},
		{name: "space in the target", raw: strings.Replace(helloPost(""), "/chat", "/ chat", 1)},
		{name: "tab in the target", raw: strings.Replace(helloPost(""), "/chat", "/\tchat", 1)},
		{name: "NUL in the target", raw: strings.Replace(helloPost(""), "/chat", "/\x00chat", 1)},
		{name: "absolute target with a fragment", raw: target("http://a" + chat + "#b")},
		{name: "absolute target whose fragment holds the path", raw: target("http://x#" + chat)},
		{name: "fragment", raw: target(chat + "#")},
		{name: "fragment in a query", raw: target(chat + "?a#b")},
		{name: "byte above 127 in a query", raw: target(chat + "?\xc3\xa9")},
		{name: "absolute target without a host", raw: target("http://" + chat)},
		{name: "absolute target with nothing but a port", raw: target("http://:80" + chat)},
		{name: "absolute target with a user", raw: target("http://u@a" + chat)},
		{name: "absolute target with a user and a password", raw: target("http://u:p@a" + chat)},
		{name: "absolute target with a bad port", raw: target("http://a:8o" + chat)},
		{name: "absolute target with two ports", raw: target("http://a:1:2" + chat)},
		{name: "absolute target with a bad IPv6", raw: target("http://[::g]" + chat)},
		{name: "absolute target with half an IPv6", raw: target("http://[::1" + chat)},
		{name: "absolute target with bad percent encoding", raw: target("http://a%2" + chat)},
		{name: "absolute target with one slash", raw: target("http:/a" + chat)},
		{name: "absolute target without slashes", raw: target("http:a" + chat)},
		{name: "file", raw: target("file://a" + chat)},
		{name: "ftp", raw: target("ftp://a" + chat)},
		{name: "scheme of one letter", raw: target("x://a" + chat)},
		{name: "no scheme", raw: target("://a" + chat)},
		{name: "asterisk", raw: target("*")},
		{name: "authority", raw: target("a:80")},
		{name: "bare LF behind the request line", raw: strings.Replace(helloPost(""), "\r\n", "\n", 1)},
		{name: "bare LFs throughout", raw: strings.ReplaceAll(helloPost(""), "\r\n", "\n")},
		{name: "target without a slash", raw: strings.Replace(helloPost(""), "/v1", "v1", 1)},
		{name: "HTTP/0.9", raw: "GET /livez\r\n\r\n"},
		{name: "HTTP/9.9", raw: strings.Replace(helloPost(""), "/1.1", "/9.9", 1)},
		{name: "HTTP/2.0", raw: strings.Replace(helloPost(""), "/1.1", "/2.0", 1)},
		{name: "HTTP/1.2", raw: strings.Replace(helloPost(""), "/1.1", "/1.2", 1)},
		{name: "HTTP/0.9 in words", raw: strings.Replace(helloPost(""), "/1.1", "/0.9", 1)},
		{name: "HTTP/01.1", raw: strings.Replace(helloPost(""), "/1.1", "/01.1", 1)},
		{name: "http in small letters", raw: strings.Replace(helloPost(""), "HTTP", "http", 1)},
		{name: "space behind the version", raw: strings.Replace(helloPost(""), "/1.1", "/1.1 ", 1)},
		{name: "HTTP/2 preface", raw: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
		{name: "TLS alert", raw: "\x15\x03\x01\x00\x02\x02\x28\r\n\r\n"}, // of a hello: TestTLSOnPlaintextPort
	}
	for i := range cases {
		cases[i].status = 400
	}
	return cases
}

// refusedBodies are requests with a valid head and an invalid body.
func refusedBodies() []rawCase {
	chunks := func(s string) string { return chunkedHead + s }
	size := func(s string) string { return chunks(s + hello + "\r\n0\r\n\r\n") }
	trailer := func(s string) string { return chunks("d\r\n" + hello + "\r\n0\r\n" + s) }
	broken := []rawCase{
		{name: "chunk size 0x", raw: chunks("0xd\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size +", raw: chunks("+d\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size -", raw: chunks("-d\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size too large", raw: chunks("fffffffffffffffff\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size 2^64+13", raw: chunks("1000000000000000d\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size empty", raw: chunks("\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size missing before an extension", raw: chunks(";a\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size with space before", raw: chunks(" d\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size no hex", raw: chunks("g\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size underscore", raw: chunks("0_d\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "chunk size with bare LF", raw: chunks("d\n" + hello + "\r\n0\r\n\r\n")},
		{name: "LF in a chunk extension", raw: chunks("d;a\nb\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "bare CR in a chunk extension", raw: chunks("d;a\rb\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "bare CR behind a chunk", raw: chunks("d\r\n" + hello + "\r0\r\n\r\n")},
		{name: "no CRLF behind a chunk", raw: chunks("d\r\n" + hello + "0\r\n\r\n")},
		{name: "bare LF behind a chunk", raw: chunks("d\r\n" + hello + "\n0\r\n\r\n")},
		{name: "chunk longer than its size", raw: chunks("c\r\n" + hello + "\r\n0\r\n\r\n")},
		{name: "length in the trailer", raw: chunks("d\r\n" + hello + "\r\n0\r\nContent-Length: 5\r\n\r\n")},
		{name: "encoding in the trailer", raw: chunks("d\r\n" + hello + "\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n")},
		{name: "trailer without a colon", raw: chunks("d\r\n" + hello + "\r\n0\r\nX-A\r\n\r\n")},
		{name: "trailer with a space in front", raw: chunks("d\r\n" + hello + "\r\n0\r\n X-A: b\r\n\r\n")},
		{name: "trailer folded", raw: trailer("X-A: b\r\n c\r\n\r\n")},
		{name: "trailer with a space before the colon", raw: trailer("X-A : b\r\n\r\n")},
		{name: "trailer without a name", raw: trailer(": b\r\n\r\n")},
		{name: "trailer with a NUL", raw: trailer("X-A: \x00\r\n\r\n")},
		{name: "trailer with a bare CR", raw: trailer("X-A: b\rc\r\n\r\n")},
		{name: "trailer ended by a bare LF", raw: trailer("X-A: b\n\r\n")},
		{name: "trailers ended by a bare LF, a request behind", raw: trailer("\n" + inner)},
		{name: "trailers ended by a bare CR, a request behind", raw: trailer("\r" + inner)},
		{name: "trailer that is a request", raw: trailer(inner)},
		{name: "trailers without end", raw: trailer(strings.Repeat("X-A: b\r\n", 4<<10))},
		{name: "trailer that is the client's address", raw: trailer("x-forwarded-for: 10.0.0.1\r\n\r\n")},
		{name: "last chunk with bare LFs, a request behind", raw: chunks("d\r\n" + hello + "\r\n0\n\n" + inner)},
		{name: "chunk size with space behind", raw: size("d \r\n")},
		{name: "chunk size with tab behind", raw: size("d\t\r\n")},
		{name: "chunk size with space before an extension", raw: size("d ;a\r\n")},
		{name: "chunk size of 16 digits", raw: size("000000000000000d\r\n")},
		{name: "chunk size with a comma", raw: size("d,d\r\n")},
		{name: "chunk size with bare CR", raw: size("d\r")},
		{name: "last chunk with space behind", raw: chunks("d\r\n" + hello + "\r\n0 \r\n\r\n")},
		{name: "chunk extension of 257 bytes", raw: size("d;" + strings.Repeat("a", 256) + "\r\n")},
		{name: "chunk extension without end", raw: chunks("d;" + strings.Repeat("a", 64<<10))},
		{name: "NUL in a chunk extension", raw: size("d;a\x00b\r\n")},
		{name: "a chunk a byte too short", raw: chunks(fmt.Sprintf("%x\r\n", len(inner)-1) + inner + "\r\n0\r\n\r\n")},
	}
	for i := range broken {
		broken[i].status = 400
	}
	pad := strings.Repeat(" ", 8<<10)
	body := func(line, fields, body string) string {
		return fmt.Sprintf("%s\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n%s", line, fields, len(body), body)
	}
	big := strings.Repeat(inner, (drainBytes+100<<10)/len(inner))
	inside := func(lines string) string {
		return lines + "Transfer-Encoding: chunked\r\n\r\n" + chunk(pad) + chunk(inner) + "0\r\n\r\n"
	}
	kept := []rawCase{
		{name: "wrong type, a request inside", status: 415, raw: body("POST "+chat+" HTTP/1.1", "Content-Type: text/plain\r\n", pad+inner)},
		{name: "unknown coding, a request inside", status: 415, raw: body("POST "+chat+" HTTP/1.1", "Content-Encoding: br\r\n", pad+inner)},
		{name: "not the coding it says, a request inside", status: 400, raw: body("POST "+chat+" HTTP/1.1", "Content-Encoding: gzip\r\n", pad+inner)},
		{name: "absolute target without a path", status: 404, raw: body("POST http://a HTTP/1.1", "", pad+innerPage)},
		{name: "absolute target with its path in the query", status: 404, raw: body("POST http://x?"+chat+" HTTP/1.1", "", pad+innerPage)},
		{name: "two slashes before the path", status: 404, raw: body("POST /"+chat+" HTTP/1.1", "", pad+innerPage)},
		{name: "percent-encoded path", status: 404, raw: body("POST "+strings.Replace(chat, "chat", "%63hat", 1)+" HTTP/1.1", "", pad+innerPage)},
		{name: "unknown path, a request inside", status: 404, raw: body("POST /nothing HTTP/1.1", "", pad+innerPage)},
		{name: "unknown path, a request at once", status: 404, raw: body("POST /nothing HTTP/1.1", "", inner)},
		{name: "wrong method, a request inside", status: 405, raw: body("PUT "+chat+" HTTP/1.1", "", pad+inner)},
		{name: "method in small letters", status: 405, raw: body("post "+chat+" HTTP/1.1", "", inner)},
		{name: "page with a body", status: 200, raw: body("GET /livez HTTP/1.1", "", pad+inner)},
		{name: "page with a chunked body", status: 200, raw: "GET /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(pad+inner) + "0\r\n\r\n"},
		{name: "no JSON, a request inside", status: 400, raw: body("POST "+chat+" HTTP/1.1", "", inner)},
		{name: "no body at all", status: 400, raw: "POST " + chat + " HTTP/1.1\r\nHost: a\r\n\r\n"},
		{name: "empty body", status: 400, raw: length("0")[:len(length("0"))-len(hello)]},
		{name: "not the coding it says, chunked", status: 400, raw: inside(atHost + "Content-Encoding: gzip\r\n")},
		{name: "unknown path, chunked", status: 404, raw: inside("POST /nothing HTTP/1.1\r\nHost: a\r\n")},
		{name: "wrong method, chunked", status: 405, raw: inside("PUT " + chat + " HTTP/1.1\r\nHost: a\r\n")},
		{name: "empty body, chunked", status: 400, raw: chunks("0\r\n\r\n")},
		{name: "wrong type, chunked, a request inside", status: 415, raw: atHost + "Content-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(pad) + chunk(inner) + "0\r\n\r\n"},
	}
	for i := range kept {
		kept[i].keepsConn = true
	}
	tooBig := []rawCase{
		{name: "unknown path, more than is drained", status: 404, raw: body("POST /nothing HTTP/1.1", "", big)},
		{name: "wrong type, more than is drained, chunked", status: 415, raw: atHost + "Content-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(big) + "0\r\n\r\n"},
		{name: "over the limit, requests inside", status: 413, raw: body("POST "+chat+" HTTP/1.1", "", strings.Repeat(big, 4))},
		{name: "a chunk over the limit", status: 413, raw: chunks(chunk(hello) + "fffffffffffffff\r\n" + inner)},
		{name: "over the limit, chunked", status: 413, raw: chunks(chunk(strings.Repeat(big, 4)) + "0\r\n\r\n")},
	}
	return slices.Concat(broken, kept, tooBig)
}

// The handler runs once for each request that the framing delimits, and never for a request inside
// a body. Each case is followed by another request. Sent in the same write it is pipelined, and
// is refused with its own id if the server found it where the framing says. Sent after the
// response it is served.
func TestRawCorpus(t *testing.T) {
	var mu sync.Mutex
	var bodies []string
	r := start(t, Options{MaxBodyBytes: 1 << 20}, func(x Exchange) {
		mu.Lock()
		bodies = append(bodies, string(x.Request().Doc.Body))
		mu.Unlock()
		echo(x)
	})
	cases := slices.Concat(accepted(), refusedHeads(), refusedBodies())
	if len(cases) < 60 {
		t.Fatalf("only %d cases", len(cases))
	}
	t.Logf("reliability 1: %d raw cases, each with a request behind it", len(cases))
	for _, k := range cases {
		for _, early := range []bool{true, false} {
			if !early && !k.keepsConn {
				continue
			}
			t.Run(fmt.Sprintf("%s/early=%v", k.name, early), func(t *testing.T) {
				mu.Lock()
				bodies = nil
				mu.Unlock()
				c := r.dial()
				c.t = t
				raw, probe := k.raw, chatPost(probeBody, "Connection: close", "X-Request-Id: the-probe")
				if early {
					raw += probe
				}
				// The server may close before all of it is written.
				_, _ = c.Write([]byte(raw))
				resp, body := c.readResponse()
				if resp.StatusCode != k.status {
					t.Fatalf("status %d, want %d: %s", resp.StatusCode, k.status, body)
				}
				if id := resp.Header.Get("X-Request-Id"); !fieldrules.ValidRequestID([]byte(id)) {
					t.Errorf("X-Request-Id %q", id)
				}
				if k.status >= 400 {
					contains(t, body, `{"error":{"message":"`)
					if resp.Header.Get("X-Sluice-Reason") == "" {
						t.Error("no X-Sluice-Reason")
					}
				}
				var want []string
				if k.handlerRuns {
					want = append(want, hello)
				}
				switch {
				case !k.keepsConn:
					if !resp.Close {
						t.Error("closed without saying so")
					}
				case early:
					c.expectPipelinedRefusal("the-probe")
				default:
					want = append(want, probeBody)
					c.send(probe)
					if resp, body := c.readResponse(); resp.StatusCode != 200 || body != probeBody {
						t.Errorf("probe: %d %q", resp.StatusCode, body)
					}
				}
				c.expectClosed()
				mu.Lock()
				defer mu.Unlock()
				if !slices.Equal(bodies, want) {
					t.Errorf("the handler ran with %q, want %q", bodies, want)
				}
			})
		}
	}
}

// An accepted request reaches the engine as one request in the router's own framing.
func TestEngineSeesOurFraming(t *testing.T) {
	type seen struct {
		length   int64
		encoding []string
		body     string
		expect   string
	}
	var mu sync.Mutex
	var requests []seen
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		body, _ := io.ReadAll(req.Body)
		mu.Lock()
		requests = append(requests, seen{req.ContentLength, req.TransferEncoding, string(body), req.Header.Get("Expect")})
		mu.Unlock()
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 256)
	// Some heads have no end: they are answered at the head timeout.
	r := start(t, Options{HeadTimeout: 2 * time.Second}, relayTo(e, endHook(ends)))
	for _, k := range slices.Concat(accepted(), refusedHeads(), refusedBodies()) {
		mu.Lock()
		requests = nil
		mu.Unlock()
		c := r.dial()
		_, _ = c.Write([]byte(k.raw))
		c.readResponse()
		_ = c.Close()
		want := 0
		if k.handlerRuns {
			want = 1
			<-ends
		}
		mu.Lock()
		if len(requests) != want {
			t.Errorf("%s: the engine saw %d requests, want %d", k.name, len(requests), want)
		}
		for _, s := range requests {
			if s.length != int64(len(hello)) || s.encoding != nil || s.body != hello || s.expect != "" {
				t.Errorf("%s: the engine saw %+v", k.name, s)
			}
		}
		mu.Unlock()
	}
}

// A body that ends before its framing does never reaches the handler.
func TestTruncatedRequests(t *testing.T) {
	r := start(t, Options{}, echo)
	whole := []string{
		helloPost(""),
		chunkedHead + helloChunks,
		chunkedHead + "d\r\n" + hello + "\r\n0\r\nX-A: b\r\n\r\n",
	}
	// The bytes sent of these are a complete document, but not the complete body.
	for _, n := range []int{14, 9 << 10, 100 << 10} {
		whole = append(whole, fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s ", atHost, n, hello))
	}
	whole = append(whole, chunkedHead+"d\r\n"+hello+"\r\n5\r\n ")
	for _, raw := range whole {
		for cut := range len(raw) {
			c := r.dial()
			c.send(raw[:cut])
			if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite()
			}
			for {
				if _, err := c.br.ReadByte(); err != nil {
					break
				}
			}
			_ = c.Close()
		}
	}
	if n := r.calls.Load(); n != 0 {
		t.Errorf("the handler ran %d times on truncated requests", n)
	}
}
