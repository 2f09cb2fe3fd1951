package front

import (
	"bytes"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"sluice/dataplane/clientwatch"

	"github.com/valyala/fasthttp"
)

// socketPair returns two connected sockets.
func socketPair(t testing.TB) (ours, theirs *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// onBothPaths returns all that a server answers to raw, after which the client closes: over a
// socket, where the fast path serves what it can, and over a recorded connection, where
// fasthttp serves everything.
func onBothPaths(t testing.TB, s *Server, raw []byte) (plain, fast string) {
	ours, theirs := socketPair(t)
	defer theirs.Close()
	if _, err := theirs.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := theirs.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	s.serveConn(s.admit(ours, remoteIP(ours)))
	var got bytes.Buffer
	if _, err := got.ReadFrom(theirs); err != nil {
		t.Fatal(err)
	}
	on := &recordedConn{Reader: bytes.NewReader(raw)}
	s.serveConn(s.admit(on, remoteIP(on)))
	if n, used := s.conns.len(), s.budget.Used(); n != 0 || used != 0 {
		t.Errorf("%d connections and %d bytes of the budget left", n, used)
	}
	return comparableResponse(got.String()), comparableResponse(on.out.String())
}

var varyingHeaders = regexp.MustCompile(`(?m)^Date: .*\r\n|[0-9a-f]{32}`)

// comparableResponse returns responses without dates and generated ids, with sorted header lines
// and lower-case names.
func comparableResponse(answers string) string {
	answers = varyingHeaders.ReplaceAllStringFunc(answers, func(s string) string {
		if strings.HasPrefix(s, "Date") {
			return ""
		}
		return "ID"
	})
	parts := strings.SplitAfter(answers, "\r\n\r\n")
	for i, head := range parts {
		if !strings.HasSuffix(head, "\r\n\r\n") {
			continue
		}
		lines := strings.SplitAfter(strings.TrimSuffix(head, "\r\n"), "\r\n")
		for j, line := range lines {
			if name, value, ok := strings.Cut(line, ": "); ok && !strings.Contains(name, " ") {
				lines[j] = strings.ToLower(name) + ": " + value
			}
		}
		slices.Sort(lines[1:])
		parts[i] = strings.Join(lines, "") + "\r\n"
	}
	return strings.Join(parts, "")
}

// pathCases are requests that the fast path serves, nearly serves, or must leave to fasthttp.
func pathCases() (raw []string) {
	for _, list := range [][]rawCase{accepted(), refusedHeads(), refusedBodies()} {
		for _, k := range list {
			if len(k.raw) < 4<<10 {
				raw = append(raw, k.raw, k.raw+helloPost(""), helloPost("")+k.raw)
			}
		}
	}
	for _, page := range pages {
		raw = append(raw, "GET "+page.path+" HTTP/1.1\r\nHost: a\r\n\r\n", "HEAD "+page.path+" HTTP/1.1\r\nHost: a\r\n\r\n", "GET "+page.path+"?a HTTP/1.1\r\nHost: a\r\n\r\n",
			"POST "+page.path+" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", "GET "+page.path+" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", "GET "+page.path+" HTTP/1.0\r\n\r\n")
	}
	for _, size := range []int{1, 5, 1000, 20 << 10} {
		for _, body := range []string{hello, probeBody, "{", doc(30 << 10), doc(70 << 10)} {
			if len(body)/size < 1000 {
				raw = append(raw, chunkBody(body, size)+helloPost(""), chunkBody(body, size, "Connection: close"),
					chunkBody(body, size, "Content-Type: a/b")+"\r\n", chunkBody(body, size, "Expect: 100-continue"),
					chunkBody(body, size, "X-Pad: "+strings.Repeat("p", readAheadSize-minReadAhead-100))+chunkBody(hello, 3))
			}
		}
	}
	return append(raw, "GET "+chat+" HTTP/1.1\r\nHost: a\r\n\r\n", "POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", "POST  HTTP/1.1\r\nHost: a\r\n\r\n", "POST HTTP/1.1\r\nHost: a\r\n\r\n",
		"POST "+chat+"  HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", "POST "+chat+" XHTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", "POST "+chat+" HTTP/1.1\nHost: a\nContent-Length: 2\n\n{}",
		"POST "+chat+"\rHTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", "post "+chat+" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
		helloPost("Connection: close\r\n"), helloPost("Connection: close\r\n")+helloPost(""), helloPost("Expect: 100-continue\r\n"), helloPost("expect: 200-no\r\n"), helloPost("X-Request-Id: mine\r\n"), helloPost("Accept-Encoding: gzip\r\n"),
		"\r\n"+helloPost(""), "\r\n\r\n"+helloPost(""), helloPost("")+"\r\n", helloPost("")+"\r\n\r\n"+helloPost(""), helloPost("")+"P", helloPost("")+helloPost("")[:30], helloPost("")[:30], helloPost("")[:len(helloPost(""))-3], "\x15\x03\x01", "P", "",
		chatPost(doc(30<<10)), chatPost(doc(3<<10))+chatPost(hello), chatPost(`{"a":`), chatPost(`{"kv_transfer_params":{}}`), post(chat, hello, "Content-Type: text/plain"), chatPost(hello, "X-Pad: "+strings.Repeat("p", 5000)), chatPost(hello, "X-Pad: "+strings.Repeat("p", 17000)))
}

func pathServer(t testing.TB) *Server {
	s, err := New(Options{Handler: handlerFunc(func(x Exchange) {
		switch string(x.Request().Doc.Body) {
		case hello:
			x.SetHeader("X-Sluice-Worker", "w")
			x.ReplyJSON(200, x.Request().Doc.Body)
		case probeBody:
			x.ReplyEvents([]byte("data: 1\n\n"))
		default:
			echo(x)
		}
	}), Pages: testPages{}, MaxBodyBytes: 64 << 10, CompressMin: 8 << 10})
	if err != nil {
		t.Fatal(err)
	}
	if s.clientWatcher, err = clientwatch.NewWatcher(); err != nil {
		t.Fatal(err)
	}
	return s
}

// The client gets the same response on either path.
func TestPathsAgree(t *testing.T) {
	s := pathServer(t)
	cases := pathCases()
	for _, raw := range cases {
		if plain, fast := onBothPaths(t, s, []byte(raw)); plain != fast {
			t.Errorf("to %.300q\nthe fast path answers %q\nfasthttp's           %q", raw, plain, fast)
		}
	}
	t.Logf("reliability 1: %d raw connections, answered alike by both paths", len(cases))
}

// A request for the fast path never reaches fasthttp, and its response is complete.
func TestPlainRequestsUseFastPath(t *testing.T) {
	s := pathServer(t)
	inner, reached := s.fh.Handler, 0
	s.fh.Handler = func(ctx *fasthttp.RequestCtx) { reached++; inner(ctx) }
	for _, k := range []struct {
		name, raw, answer string
		fast              int
	}{
		{"a short body", helloPost(""), hello, 0},
		{"a body longer than the read-ahead", chatPost(doc(30 << 10)), doc(30 << 10), 0},
		{"chunks", chunkBody(hello, 5), hello, 0},
		{"chunks longer than the read-ahead", chunkBody(doc(30<<10), 20<<10), doc(30 << 10), 0},
		{"small chunks longer than the read-ahead", chunkBody(doc(30<<10), 50), doc(30 << 10), 0},
		{"a refusal of chunks", chunkedHead + "x", "a chunk's size must be", 0},
		{"chunks behind a long head", chunkBody(hello, 5, "X-Pad: "+strings.Repeat("p", readAheadSize-minReadAhead)), hello, 1},
		{"a page", "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", "ok\n", 0},
		{"events", chatPost(probeBody), "data: 1\n\n", 0},
		{"a refusal", chatPost(`{"a":`), "invalid", 0},
		{"HTTP/1.0", "GET /livez HTTP/1.0\r\nHost: a\r\n\r\n", "ok\n", 1},
	} {
		reached = 0
		if plain, _ := onBothPaths(t, s, []byte(k.raw)); !strings.Contains(plain, k.answer) || reached != k.fast+1 {
			t.Errorf("%s: fasthttp saw %d requests besides its own, want %d; answered %.200q", k.name, reached-1, k.fast, plain)
		}
	}
}

// A request on the fast path allocates its id and nothing else, whatever its route.
func TestFastPathAllocates(t *testing.T) {
	if raceOn {
		t.Skip("the race detector makes pools forget")
	}
	s := pathServer(t)
	ours, theirs := socketPair(t)
	served := make(chan struct{})
	go func() { s.serveConn(s.admit(ours, remoteIP(ours))); close(served) }()
	answer := make([]byte, 64<<10)
	for _, k := range []struct {
		raw string
		max float64
	}{{helloPost("X-Request-Id: abc\r\n"), 1}, {helloPost(""), 1}, {chunkBody(doc(6000), 10), 1}, {chunkBody(doc(6000), 5000), 1},
		{chatPost(`{"a":`), 6}, {"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", 2}} {
		request := []byte(k.raw)
		n := testing.AllocsPerRun(300, func() {
			_, _ = theirs.Write(request)
			_, _ = theirs.Read(answer)
		})
		if n > k.max {
			t.Errorf("%.60q allocates %v times, want %v", k.raw, n, k.max)
		}
	}
	_ = theirs.Close()
	<-served
}

// A connection whose last response has been written is active until it is closed. If a drain cut
// it while the rest of the body is discarded, the client could lose the response.
func TestLastResponseIsBusy(t *testing.T) {
	s := pathServer(t)
	ours, theirs := socketPair(t)
	defer theirs.Close()
	c, served := s.admit(ours, remoteIP(ours)), make(chan struct{})
	go func() { s.serveConn(c); close(served) }()
	_, _ = io.WriteString(theirs, chatPost(doc(1 << 20))[:8<<10])
	var got bytes.Buffer
	if _, err := got.ReadFrom(theirs); err != nil || !strings.HasPrefix(got.String(), "HTTP/1.1 413 ") {
		t.Fatalf("%v, %q", err, got.String())
	}
	if !c.active.Load() {
		t.Error("a drain may cut it")
	}
	_ = theirs.Close()
	<-served
}

// FuzzPaths is TestPathsAgree for arbitrary input. Its seeds are one in fifteen of the test's
// cases: the fuzzing engine takes about 10 ms for each seed before it tries new input, so a short
// run with all of them would try none.
func FuzzPaths(f *testing.F) {
	for i, raw := range pathCases() {
		if i%15 == 0 {
			f.Add([]byte(raw))
		}
	}
	f.Add([]byte(chunkBody(hello, 5) + helloPost("")))
	f.Add([]byte(chunkedHead + "5;a\r\n{\"a\":\r\n2\r\n1}\r\n0\r\nX-A: b\r\n\r\n\r\n" + chunkBody(hello, 1)))
	f.Add([]byte(chunkBody(hello, 5, "Content-Type: a/b") + helloPost("")))
	s := pathServer(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 32<<10 || len(raw) > 0 && raw[0] == tlsHandshakeByte {
			return // only a TCP connection is closed for a ClientHello; a recorded one is not TCP
		}
		plain, fast := onBothPaths(t, s, raw)
		if strings.Contains(plain, string(ClientGone)) || strings.Contains(fast, io.ErrUnexpectedEOF.Error()) {
			return // fasthttp reads the beginning of a body with the head, and reports an end in it as the end of the request
		}
		if strings.Contains(fast, badURL) {
			return // only fasthttp parses the target as a URL, and may refuse it
		}
		if plain != fast {
			t.Errorf("to %q\nthe fast path answers %q\nfasthttp's           %q", raw, plain, fast)
		}
	})
}
