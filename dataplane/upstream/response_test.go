package upstream

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/membudget"
)

// serve answers the n-th request of every connection by response, then ends
// the connection.
func serve(t testing.TB, response string, opt Options) *Endpoint {
	return newEngine(t, func(p *peer) {
		if _, _, ok := p.request(); ok {
			p.send(response)
		}
	}).endpoint(t, opt)
}

func TestResponses(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 8<<10) // 128 KiB, more than any buffer
	for name, c := range map[string]struct {
		method, response string
		status           int
		length           int64
		body             string
	}{
		"sized":              {"POST", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, 5, "hello"},
		"no reason":          {"POST", "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", 200, 0, ""},
		"empty reason":       {"POST", "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", 200, 0, ""},
		"sized, large":       {"POST", fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(big), big), 200, int64(len(big)), big},
		"chunked":            {"POST", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200, -1, "hello"},
		"Chunked":            {"POST", "HTTP/1.1 200 OK\r\ntransfer-encoding:\tChunked \r\n\r\n0\r\n\r\n", 200, -1, ""},
		"chunked, large":     {"POST", fmt.Sprintf("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n5;x=y\r\nhello\r\n0\r\nSum: 1\r\n\r\n", len(big), big), 200, -1, big + "hello"},
		"many small chunks":  {"POST", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1\r\nx\r\n", 20000) + "0\r\n\r\n", 200, -1, strings.Repeat("x", 20000)},
		"to close":           {"POST", "HTTP/1.1 200 OK\r\n\r\n" + big, 200, -2, big},
		"HTTP/1.0 to close":  {"POST", "HTTP/1.0 200 OK\r\n\r\nhello", 200, -2, "hello"},
		"HEAD":               {"HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 200, 0, ""},
		"HEAD, chunked":      {"HEAD", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 200, 0, ""},
		"204":                {"POST", "HTTP/1.1 204 No Content\r\n\r\n", 204, 0, ""},
		"304":                {"GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, 0, ""},
		"100 and 103 first":  {"POST", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, 2, "ok"},
		"eight 1xx":          {"POST", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 8) + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, 2, "ok"},
		"an error":           {"POST", "HTTP/1.1 422 Unprocessable Entity\r\nContent-Length: 2\r\n\r\n{}", 422, 2, "{}"},
		"head of 40 KiB":     {"POST", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 40) + "Content-Length: 2\r\n\r\nok", 200, 2, "ok"},
		"40 KiB, chunked":    {"POST", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 32) + "Transfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(big), big), 200, -1, big},
		"obs-text in values": {"POST", "HTTP/1.1 200 \xff\r\nX: \xe4\r\nContent-Length: 2\r\n\r\nok", 200, 2, "ok"},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			e := serve(t, c.response, Options{})
			for _, raw := range []bool{false, true} {
				resp, err := e.Do(&Request{Method: c.method, Path: "/", Deadline: time.Now().Add(long), Redirects: true}, nil)
				if err != nil {
					t.Fatal(err)
				}
				if resp.Status != c.status || resp.ContentLength != c.length {
					t.Errorf("status %d length %d", resp.Status, resp.ContentLength)
				}
				body := []byte("before ")
				if raw {
					body, err = readRawBody(resp, body)
				} else {
					body, err = resp.ReadAll(body, len(c.body))
				}
				if err != nil || string(body) != "before "+c.body {
					t.Errorf("raw=%v: %d bytes %.40q, %v", raw, len(body), body, err)
				}
				resp.Release()
			}
			testwait.Until(t, "all given back", func() bool { s := e.Stats(); return s.Open == s.Idle })
		})
	}
}

// readRawBody does what relay does.
func readRawBody(resp *Response, dst []byte) ([]byte, error) {
	var chunks Chunks
	buf := make([]byte, 777)
	for {
		n, err := resp.ReadRaw(buf)
		if resp.ContentLength != LengthChunked {
			dst = append(dst, buf[:n]...)
		} else {
			for p := buf[:n]; len(p) > 0 && !chunks.Done(); {
				used, payload, err := chunks.Next(p)
				if err != nil {
					return dst, err
				}
				dst = append(dst, payload...)
				p = p[used:]
			}
			if chunks.Done() {
				resp.MarkBodyDone()
				return dst, nil
			}
		}
		if err == io.EOF {
			return dst, nil
		}
		if err != nil {
			return dst, err
		}
	}
}

const ok = "HTTP/1.1 200 OK\r\n"

// Each of these heads is refused, as soon as its bad line is there.
var malformedHeads = map[string]string{
	"empty line first":          "\r\n" + ok + "\r\n",
	"garbage":                   "garbage\r\n\r\n",
	"SSH":                       "SSH-2.0-OpenSSH_9.6\r\n",
	"binary":                    "\x15\x03\x01\x00\x02\x02\x46\r\n\r\n",
	"HTTP/0.9":                  "<html>hello</html>\r\n",
	"HTTP/2":                    "HTTP/2.0 200 OK\r\n\r\n",
	"HTTP/1.2":                  "HTTP/1.2 200 OK\r\n\r\n",
	"HTTP/9.9":                  "HTTP/9.9 200 OK\r\n\r\n",
	"lower-case http":           "http/1.1 200 OK\r\n\r\n",
	"two digits":                "HTTP/1.1 20 OK\r\n\r\n",
	"four digits":               "HTTP/1.1 2000 OK\r\n\r\n",
	"status with sign":          "HTTP/1.1 +20 OK\r\n\r\n",
	"status 099":                "HTTP/1.1 099 OK\r\n\r\n",
	"status 600":                "HTTP/1.1 600 OK\r\n\r\n",
	"two spaces":                "HTTP/1.1  200 OK\r\n\r\n",
	"NUL in reason":             "HTTP/1.1 200 O\x00K\r\n\r\n",
	"bare LF in status line":    "HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
	"bare LF in header":         ok + "A: b\nContent-Length: 0\r\n\r\n",
	"bare LF at the end":        ok + "Content-Length: 0\r\n\n",
	"bare CR in value":          ok + "A: b\rc\r\n\r\n",
	"NUL in value":              ok + "A: b\x00c\r\n\r\n",
	"folded header":             ok + "A: b\r\n c\r\n\r\n",
	"folded with tab":           ok + "A: b\r\n\tc\r\n\r\n",
	"leading space":             ok + " A: b\r\n\r\n",
	"no colon":                  ok + "Abc\r\n\r\n",
	"empty name":                ok + ": b\r\n\r\n",
	"space before colon":        ok + "Content-Length : 5\r\n\r\nhello",
	"bad name":                  ok + "A(b: c\r\n\r\n",
	"CL +5":                     ok + "Content-Length: +5\r\n\r\nhello",
	"CL -5":                     ok + "Content-Length: -5\r\n\r\nhello",
	"CL 0x5":                    ok + "Content-Length: 0x5\r\n\r\nhello",
	"CL 5_0":                    ok + "Content-Length: 5_0\r\n\r\nhello",
	"CL empty":                  ok + "Content-Length:\r\n\r\nhello",
	"CL 2^64+5":                 ok + "Content-Length: 18446744073709551621\r\n\r\nhello",
	"CL list":                   ok + "Content-Length: 5, 5\r\n\r\nhello",
	"CL twice, differing":       ok + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
	"CL twice, same":            ok + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
	"CL and TE":                 ok + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"TE and CL":                 ok + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
	"TE gzip, chunked":          ok + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
	"TE identity":               ok + "Transfer-Encoding: identity\r\n\r\nhello",
	"TE xchunked":               ok + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
	"TE empty":                  ok + "Transfer-Encoding:\r\n\r\n",
	"TE vertical tab":           ok + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
	"TE twice":                  ok + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"TE in 1.0":                 "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"101":                       "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
	"nine 1xx":                  strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 9) + ok + "\r\n",
	"257 headers":               ok + strings.Repeat("A: b\r\n", 257) + "\r\n",
	"head over the bound":       ok + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 70) + "\r\n",
	"one endless line":          ok + "X: " + strings.Repeat("y", 200<<10),
	"endless status line":       "HTTP/1.1 200 " + strings.Repeat("O", 200<<10),
	"bad head after a 1xx":      "HTTP/1.1 100 Continue\r\n\r\ngarbage\r\n\r\n",
	"CL in a 1xx is forgotten?": "HTTP/1.1 100 Continue\r\nContent-Length: x\r\n\r\n" + ok + "\r\n",
}

// TestReadCountedIsExact: what is counted of a long body is the buffer that has it, not also
// those that it outgrew.
func TestReadCountedIsExact(t *testing.T) {
	body := strings.Repeat("0123456789abcdef", 60<<10)
	chunk := fmt.Sprintf("%x\r\n%s\r\n", 16<<10, body[:16<<10])
	for name, response := range map[string]string{
		"sized":    fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body),
		"chunked":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat(chunk, len(body)/(16<<10)) + "0\r\n\r\n",
		"to close": "HTTP/1.1 200 OK\r\n\r\n" + body,
	} {
		e := serve(t, response, Options{})
		resp, err := e.Do(&Request{Method: "POST", Path: "/", Deadline: time.Now().Add(10 * time.Second)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		budget := membudget.NewBudget(1 << 30)
		count := budget.Count()
		got, err := resp.ReadAllBudgeted(nil, 2<<20, &count)
		if err != nil || string(got) != body || count.Used() != int64(cap(got)) || budget.Used() != int64(cap(got)) {
			t.Errorf("%s: %d bytes of room %d, %v; counted %d, want the room", name, len(got), cap(got), err, count.Used())
		}
		resp.Release()
		if count.Release(); budget.Used() != 0 {
			t.Errorf("%s: %d bytes are left over", name, budget.Used())
		}
	}
}

func TestMalformedHeads(t *testing.T) {
	for name, response := range malformedHeads {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			gone := make(chan struct{})
			e := newEngine(t, func(p *peer) {
				p.request()
				p.send(response) // and keep the connection: the error must not wait for its end
				p.gone()
				close(gone)
			}).endpoint(t, Options{})
			_, err := e.Do(post("x"), nil)
			if !errors.Is(err, ErrProtocol) || phaseOf(t, err) != PhaseHead {
				t.Errorf("%v", err)
			}
			<-gone
			if s := e.Stats(); s.Open != 0 || s.Retried != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestTruncatedHead(t *testing.T) {
	const response = ok + "Content-Length: 5\r\n\r\n"
	for i := range response {
		e := serve(t, response[:i], Options{})
		_, err := e.Do(post("x"), nil)
		if err == nil || errors.Is(err, ErrTimeout) || phaseOf(t, err) != PhaseHead {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
}

func TestBrokenBodies(t *testing.T) {
	const chunked = ok + "Transfer-Encoding: chunked\r\n\r\n"
	for name, c := range map[string]struct {
		response string
		want     error
	}{
		"short":                {ok + "Content-Length: 5\r\n\r\nhell", io.ErrUnexpectedEOF},
		"chunk cut":            {chunked + "5\r\nhel", io.ErrUnexpectedEOF},
		"long chunk cut":       {chunked + "fffff\r\nhel", io.ErrUnexpectedEOF},
		"no last chunk":        {chunked + "5\r\nhello\r\n", io.ErrUnexpectedEOF},
		"last chunk cut":       {chunked + "5\r\nhello\r\n0\r\n", io.ErrUnexpectedEOF},
		"bad size":             {chunked + "x\r\n", ErrProtocol},
		"size overflow":        {chunked + "ffffffffffffffff1\r\n", ErrProtocol},
		"huge size":            {chunked + "ffffffffff\r\nhello", ErrTooLarge},
		"endless extension":    {chunked + "5;" + strings.Repeat("x", 1<<20), ErrProtocol},
		"endless trailers":     {chunked + "0\r\n" + strings.Repeat("A: b\r\n", 1<<16), ErrProtocol},
		"bare LF":              {chunked + "5\nhello\n0\n\n", ErrProtocol},
		"sized, over limit":    {ok + "Content-Length: 101\r\n\r\n" + strings.Repeat("x", 101), ErrTooLarge},
		"chunked, over limit":  {chunked + "65\r\n" + strings.Repeat("x", 101) + "\r\n0\r\n\r\n", ErrTooLarge},
		"to close, over limit": {ok + "\r\n" + strings.Repeat("x", 101), ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			e := serve(t, c.response, Options{})
			resp, err := e.Do(post("x"), nil)
			if err != nil {
				t.Fatal(err)
			}
			limit := 100
			if name == "long chunk cut" {
				limit = 1 << 20
			}
			b, err := resp.ReadAll(nil, limit)
			if !errors.Is(err, c.want) || phaseOf(t, err) != PhaseBody || len(b) > 101 {
				t.Errorf("%d bytes, %v", len(b), err)
			}
			resp.Release()
			if s := e.Stats(); s.Open != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestHeaders(t *testing.T) {
	e := serve(t, ok+"Content-Length: 2\r\nX-One:  1 \r\nConnection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nx-hop: no\r\nTrailer: x\r\nTE: y\r\n"+
		"Upgrade: z\r\nProxy-Authenticate: p\r\nx-one: 2\r\nEmpty:\r\nContent-Type: a/b\r\n\r\nok", Options{})
	resp, err := e.Do(post("x"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Release()
	var got []string
	visit := func() {
		got = got[:0]
		resp.VisitHeaders(func(name, value []byte) { got = append(got, fmt.Sprintf("%s=%s", name, value)) })
	}
	want := "[X-One=1 x-one=2 Empty= Content-Type=a/b]"
	if visit(); fmt.Sprint(got) != want {
		t.Errorf("%v, want %v", got, want)
	}
	if _, err := resp.ReadAll(nil, 10); err != nil {
		t.Fatal(err)
	}
	if visit(); fmt.Sprint(got) != want {
		t.Errorf("after ReadAll %v, want %v", got, want)
	}
	for name, want := range map[string]string{"x-ONE": "1", "content-type": "a/b", "X-Hop": "no", "Content-Length": "2"} {
		if got := resp.Header(name); string(got) != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if resp.Header("absent") != nil || resp.Header("empty") == nil || resp.Header("content_type") != nil {
		t.Error("absent, empty or like-named headers mixed up")
	}
}

// The parser accepts only what net/http accepts, with the same framing.
func FuzzHead(f *testing.F) {
	for _, h := range malformedHeads {
		if len(h) < 1000 {
			f.Add([]byte(h), uint(7))
		}
	}
	f.Add([]byte(ok+"Content-Length: 5\r\nX: y\r\nConnection: X\r\n\r\nhello"), uint(20))
	f.Add([]byte(ok+"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), uint(3))
	f.Fuzz(func(t *testing.T, b []byte, cut uint) {
		var h, h2 headParser
		h.reset(0)
		h2.reset(0)
		done, err := h.parse(b)
		at := int(cut % uint(len(b)+1))
		done2, err2 := h2.parse(b[:at])
		if err2 == nil && !done2 {
			done2, err2 = h2.parse(b)
		}
		if done != done2 || (err == nil) != (err2 == nil) || h.pos != h2.pos {
			t.Fatalf("whole %v %v %d; cut at %d %v %v %d", done, err, h.pos, at, done2, err2, h2.pos)
		}
		for _, f := range h.fields {
			_, _ = b[f.name.from:f.name.to], b[f.value.from:f.value.to]
		}
		if !done || err != nil {
			return
		}
		std, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), nil)
		if err != nil {
			t.Fatalf("net/http refuses %q: %v", b[:h.pos], err)
		}
		if std.StatusCode != h.status || h.status >= 200 && h.status != 204 && h.status != 304 &&
			(h.chunked != (len(std.TransferEncoding) > 0) || !h.chunked && h.length != std.ContentLength) {
			t.Fatalf("%q: net/http %d %d %v, we %d %d %v", b[:h.pos], std.StatusCode, std.ContentLength, std.TransferEncoding, h.status, h.length, h.chunked)
		}
	})
}
