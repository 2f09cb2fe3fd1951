package front

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/clientwatch"

	"github.com/valyala/fasthttp"
)

// recordedConn is a connection with recorded input.
type recordedConn struct {
	io.Reader
	out bytes.Buffer
}

func (c *recordedConn) Write(p []byte) (int, error)      { return c.out.Write(p) }
func (c *recordedConn) Close() error                     { return nil }
func (c *recordedConn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *recordedConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *recordedConn) SetDeadline(time.Time) error      { return nil }
func (c *recordedConn) SetReadDeadline(time.Time) error  { return nil }
func (c *recordedConn) SetWriteDeadline(time.Time) error { return nil }

// acceptedRequest is a request that http1.Head has accepted, with its body.
type acceptedRequest struct {
	method, target string
	body           []byte
}

// serveRecorded runs raw through fasthttp, http1.Head and the body reader, without routes, and
// returns the accepted requests.
func serveRecorded(t testing.TB, s *Server, raw []byte) (got []acceptedRequest) {
	s.fh.Handler = func(ctx *fasthttp.RequestCtx) {
		x := s.fasthttpExchanges.Get()
		x.ctx, x.Received = ctx, ctx.Time()
		x.c, _ = ctx.Conn().(*conn)
		defer x.finish()
		h := &ctx.Request.Header
		if refused := x.head.Parse(h.Method(), h.RequestURI(), h.Protocol(), h.RawHeaders()); refused != "" {
			x.closeAfterResponse()
			x.Error(BadHTTP, "", refused, 0)
			return
		}
		x.setRequestID()
		if !x.openBody() {
			t.Errorf("the guard and fasthttp differ on the framing of %q", raw)
			x.closeAfterResponse()
			x.Error(BadHTTP, "", "", 0)
			return
		}
		if !x.readBody() {
			return
		}
		got = append(got, acceptedRequest{string(h.Method()), string(h.RequestURI()), bytes.Clone(x.Doc.Body)})
		x.ReplyJSON(200, nil)
	}
	c := s.admit(&recordedConn{Reader: bytes.NewReader(raw)}, netip.Addr{})
	c.acquireState()
	_ = s.fh.ServeConn(c)
	if n := s.conns.len(); n != 0 {
		t.Errorf("%d connections left", n)
	}
	if n := s.budget.Used(); n != 0 {
		t.Errorf("%d bytes of the budget left", n)
	}
	return got
}

// FuzzRequestHead checks that net/http parses all accepted input as the same requests.
func FuzzRequestHead(f *testing.F) {
	for _, list := range [][]rawCase{accepted(), refusedHeads(), refusedBodies()} {
		for _, k := range list {
			if len(k.raw) < 4<<10 {
				f.Add([]byte(k.raw + helloPost("")))
			}
		}
	}
	s, err := New(Options{Handler: handlerFunc(echo), MaxBodyBytes: 64 << 10})
	if err != nil {
		f.Fatal(err)
	}
	if s.clientWatcher, err = clientwatch.NewWatcher(); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		br := bufio.NewReader(bytes.NewReader(raw))
		for i, ours := range serveRecorded(t, s, raw) {
			skipEmptyLines(br)
			theirs, err := http.ReadRequest(br)
			var urlErr *url.Error
			if errors.As(err, &urlErr) {
				return // targets that the router refuses
			}
			if err != nil {
				t.Fatalf("request %d of %q: we read %q, net/http: %v", i, raw, ours, err)
			}
			body, err := io.ReadAll(theirs.Body)
			if err != nil && !longTrailers(err) {
				t.Fatalf("request %d of %q: we read %q, net/http: %v", i, raw, ours, err)
			}
			if theirs.Method != ours.method || theirs.RequestURI != ours.target || !bytes.Equal(body, ours.body) {
				t.Fatalf("request %d of %q: we read %q, net/http %q %q %q", i, raw, ours, theirs.Method, theirs.RequestURI, body)
			}
		}
	})
}

// longTrailers reports whether err is net/http's error for trailers that exceed its buffer of
// 4 KiB. This server accepts longer ones.
func longTrailers(err error) bool { return strings.Contains(err.Error(), "suspiciously long trailer") }

// skipEmptyLines skips empty lines before a request, as RFC 9112, 2.2, requires. ReadRequest
// leaves that to its caller.
func skipEmptyLines(br *bufio.Reader) {
	for {
		b, _ := br.Peek(2)
		switch {
		case len(b) > 0 && b[0] == '\n':
			_, _ = br.Discard(1)
		case string(b) == "\r\n":
			_, _ = br.Discard(2)
		default:
			return
		}
	}
}
