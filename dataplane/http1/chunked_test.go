package http1

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"testing/iotest"
)

// readChunked reads a body of at most limit bytes that comes from src in pieces of at most
// size bytes.
func readChunked(src io.Reader, limit int64, size int) (body []byte, err error) {
	var c ChunkedReader
	c.Reset(src, 16<<10)
	c.Limit = limit
	p := make([]byte, size)
	for {
		n, err := c.Read(p)
		body = append(body, p[:n]...)
		if err == io.EOF {
			return body, nil
		}
		if err != nil {
			return body, err
		}
	}
}

// chunkLimit is the limit of the bodies of these tests, chunkTrailers that of trailers.
const (
	chunkLimit    = 64 << 10
	chunkTrailers = 16 << 10
)

func TestChunkedReader(t *testing.T) {
	const (
		size = "a chunk's size must be 1 to 15 hexadecimal digits with CRLF, " +
			"or a semicolon and an extension, right behind them, got "
		crlf  = "a chunk's size must end with CRLF, got "
		ext   = "a chunk's extension must not hold control characters and must end with CRLF, got "
		lines = "its trailers are not well-formed header lines: "
		eof   = "unexpected EOF"
	)
	long := strings.Repeat("a", chunkLimit)
	for _, k := range []struct{ raw, body, fails string }{
		{"0\r\n\r\n", "", ""},
		{"000\r\n\r\n", "", ""},
		{"5\r\nhello\r\n0\r\n\r\n", "hello", ""},
		{"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", "hello world", ""},
		{"b\r\nhello world\r\n0\r\n\r\n", "hello world", ""},
		{"B\r\nhello world\r\n0\r\n\r\n", "hello world", ""},
		{"00000000000000b\r\nhello world\r\n0\r\n\r\n", "hello world", ""},
		{"4\r\n\r\n\r\n\r\n0\r\n\r\n", "\r\n\r\n", ""},
		{"5\r\n0\r\n\r\n\r\n0\r\n\r\n", "0\r\n\r\n", ""},
		{"1;a\r\nx\r\n0;b=c\r\n\r\n", "x", ""},
		{"1;\r\nx\r\n0\r\n\r\n", "x", ""},
		{"1;a=\"b ;\\\"\xc3\xa9\"\t\r\nx\r\n0\r\n\r\n", "x", ""},
		{"1;" + long[:maxExtensionBytes-1] + "\r\nx\r\n0\r\n\r\n", "x", ""},
		{"0\r\nA: b\r\nC:\r\nd:\t\r\n\r\n", "", ""},
		{"0\r\nA:" + long[:chunkTrailers-len("A:\r\n\r\n")] + "\r\n\r\n", "", ""},
		{"10000\r\n" + long + "\r\n0\r\n\r\n", long, ""},
		{strings.Repeat("1\r\nx\r\n", 1000) + "0\r\n\r\n", long[:0] + strings.Repeat("x", 1000), ""},

		{"", "", eof},
		{"5", "", eof},
		{"5\r\nhel", "hel", eof},
		{"5\r\nhello", "hello", eof},
		{"5\r\nhello\r\n", "hello", eof},
		{"5\r\nhello\r\n0", "hello", eof},
		{"5\r\nhello\r\n0\r\n", "hello", eof},
		{"0\r\n\r", "", eof},
		{"0\r\nA: b\r\n", "", eof},

		{"\r\n", "", size + `"\r"`},
		{";a\r\n", "", size + `";"`},
		{"0x5\r\nhello", "", size + `"0x"`},
		{"+5\r\nhello", "", size + `"+"`},
		{"-5\r\nhello", "", size + `"-"`},
		{" 5\r\nhello", "", size + `" "`},
		{"\t5\r\nhello", "", size + `"\t"`},
		{"5 \r\nhello", "", size + `"5 "`},
		{"5\t\r\nhello", "", size + `"5\t"`},
		{"5 ;a\r\nhello", "", size + `"5 "`},
		{"5_0\r\nhello", "", size + `"5_"`},
		{"5.\r\nhello", "", size + `"5."`},
		{"5,5\r\nhello", "", size + `"5,"`},
		{"\"5\"\r\nhello", "", size + `"\""`},
		{"5\nhello", "", size + `"5\n"`},
		{"\v5\r\nhello", "", size + `"\v"`},
		{"5\x00\r\nhello", "", size + `"5\x00"`},
		{"\xef\xbc\x95\r\nhello", "", size + `"\xef"`}, // a wide 5
		{"g\r\n", "", size + `"g"`},
		{"`\r\n", "", size + "\"`\""},
		{"@\r\n", "", size + `"@"`},
		{"10000000000000005\r\nhello", "", size + `"1000000000000000"`},
		{"0000000000000005\r\nhello", "", size + `"0000000000000005"`},
		{"ffffffffffffffff\r\nhello", "", size + `"ffffffffffffffff"`},
		{"5\rhello", "", crlf + `"\rh"`},
		{"5\r\rhello", "", crlf + `"\r\r"`},
		{"0\r0\r\n\r\n", "", crlf + `"\r0"`},
		{"5;a\nb\r\nhello", "", ext + `'\n'`},
		{"5;a\x00\r\nhello", "", ext + `'\x00'`},
		{"5;a\x7f\r\nhello", "", ext + `'\x7f'`},
		{"5;a\rb\r\nhello", "", crlf + `"\rb"`},
		{"5;" + long[:maxExtensionBytes] + "\r\nhello", "", "a chunk's extension must not be larger than 256 bytes"},
		{"5;" + long, "", "a chunk's extension must not be larger than 256 bytes"},
		{"5\r\nhello0\r\n\r\n", "hello", `the 5 bytes of a chunk must be followed by CRLF, got "0"`},
		{"5\r\nhello\n0\r\n\r\n", "hello", `the 5 bytes of a chunk must be followed by CRLF, got "\n"`},
		{"5\r\nhello\r0\r\n\r\n", "hello", `the 5 bytes of a chunk must be followed by CRLF, got "\r0"`},
		{"4\r\nhello\r\n0\r\n\r\n", "hell", `the 4 bytes of a chunk must be followed by CRLF, got "o"`},
		{"6\r\nhello\r\n0\r\n\r\n", "hello\r", `the 6 bytes of a chunk must be followed by CRLF, got "\n"`},
		{"10001\r\n", "", ErrBodyTooLarge.Error()},
		{"fffffffffffffff\r\n", "", ErrBodyTooLarge.Error()},
		{"5\r\nhello\r\nfffc\r\n", "hello", ErrBodyTooLarge.Error()},
		{strings.Repeat("1;"+long[:200]+"\r\nx\r\n", 100), strings.Repeat("x", 83), errFraming.Error()},
		{strings.Repeat("00000000000001\r\nx\r\n", 4000), strings.Repeat("x", 1820), errFraming.Error()},
		{"0\r\n\n", "", lines},
		{"0\r\n\r\r", "", lines},
		{"0\r\n A: b\r\n\r\n", "", lines},
		{"0\r\n\tA: b\r\n\r\n", "", lines},
		{"0\r\nA\r\n\r\n", "", lines},
		{"0\r\nA : b\r\n\r\n", "", lines},
		{"0\r\n: b\r\n\r\n", "", lines},
		{"0\r\nA: b\n\r\n", "", lines},
		{"0\r\nA: b\rc\r\n\r\n", "", lines},
		{"0\r\nA: \x00\r\n\r\n", "", lines},
		{"0\r\nA: b\r\n c\r\n\r\n", "", lines},
		{"0\r\nA\xc3: b\r\n\r\n", "", lines},
		{"0\r\ncontent-LENGTH: 5\r\n\r\n", "", "a trailer must not be a field that belongs in the head, as content-LENGTH"},
		{"0\r\nX-Forwarded-For: a\r\n\r\n", "", "as X-Forwarded-For does"},
		{"0\r\nA:" + long[:chunkTrailers-len("A:\r\n\r\n")+1] + "\r\n\r\n", "", "its trailers are larger than 16384 bytes"},
		{"0\r\n" + strings.Repeat("A: b\r\n", 4000), "", "its trailers are larger than 16384 bytes"},
		{"0\r\n" + long, "", "its trailers are larger than 16384 bytes"},
	} {
		const behind = "GET / HTTP/1.1\r\n"
		for name, from := range map[string]func(r io.Reader) io.Reader{
			"at once":      func(r io.Reader) io.Reader { return r },
			"byte by byte": iotest.OneByteReader,
			"in halves":    iotest.HalfReader,
			"with its end": iotest.DataErrReader,
		} {
			if name == "with its end" && k.fails == ErrBodyTooLarge.Error() {
				continue // ErrBodyTooLarge is not final
			}
			for _, size := range []int{1, 3, 128 << 10} {
				raw := k.raw
				if k.fails == "" {
					raw += behind
				}
				src := strings.NewReader(raw)
				body, err := readChunked(from(src), chunkLimit, size)
				right := err == nil && k.fails == "" || err != nil && k.fails != "" && strings.Contains(err.Error(), k.fails)
				if string(body) != k.body || !right {
					t.Errorf("%.40q, %s, %d at a time: %.60q, %v; want %.60q, %s",
						k.raw, name, size, body, err, k.body, k.fails)
				}
				if rest, _ := io.ReadAll(src); k.fails == "" && name != "with its end" && string(rest) != behind {
					t.Errorf("%.40q, %s, %d at a time: leaves %q", k.raw, name, size, rest)
				}
			}
		}
	}
}

// A body is read correctly wherever it is split into reads.
func TestChunkedReaderSplitAnywhere(t *testing.T) {
	const raw, want = "5;a=b\r\nhello\r\n0006\r\n world\r\n0;c\r\nX-Sum: 1\r\nX:\r\n\r\n", "hello world"
	for cut := range len(raw) + 1 {
		for again := cut; again <= len(raw); again++ {
			var parts []io.Reader
			for _, part := range []string{raw[:cut], raw[cut:again], raw[again:]} {
				parts = append(parts, strings.NewReader(part))
			}
			if body, err := readChunked(io.MultiReader(parts...), chunkLimit, 4<<10); string(body) != want || err != nil {
				t.Fatalf("torn at %d and %d: %q, %v", cut, again, body, err)
			}
		}
	}
}

// After ErrBodyTooLarge the caller can raise the limit and discard the rest of the body.
func TestChunkedReaderContinuesAfterError(t *testing.T) {
	var c ChunkedReader
	c.Reset(strings.NewReader("2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"), chunkTrailers)
	p := make([]byte, 10)
	if n, err := c.Read(p); n != 0 || err != ErrBodyTooLarge {
		t.Fatalf("%d, %v", n, err)
	}
	c.Limit = 4
	if n, err := c.Read(p); string(p[:n]) != "ab" || err != ErrBodyTooLarge {
		t.Fatalf("%q, %v", p[:n], err)
	}
	c.Limit = 5
	if n, err := c.Read(p); string(p[:n]) != "cde" || err != io.EOF {
		t.Fatalf("%q, %v", p[:n], err)
	}
}

// A body that just fits into the buffer ends with io.EOF in the same read, so that the caller
// does not enlarge the buffer.
func TestChunkedReaderEndsWithItsBody(t *testing.T) {
	var c ChunkedReader
	c.Reset(strings.NewReader("2\r\nab\r\n3\r\ncde\r\n0\r\nA: b\r\n\r\n"), chunkTrailers)
	c.Limit = chunkLimit
	if n, err := c.Read(make([]byte, 5)); n != 5 || err != io.EOF {
		t.Fatalf("%d, %v", n, err)
	}
}

// failingReader ends with an error of its own.
type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

// An error of the connection is returned unchanged.
func TestChunkedReaderReportsErrors(t *testing.T) {
	broke := errors.New("broke")
	for _, raw := range []string{"", "5", "5\r\nhel", "5\r\nhello", "0\r\n"} {
		if _, err := readChunked(io.MultiReader(strings.NewReader(raw), failingReader{broke}), chunkLimit, 10); err != broke {
			t.Errorf("%q: %v", raw, err)
		}
	}
}

var (
	modelSize    = regexp.MustCompile(`^([0-9A-Fa-f]{1,15})((?s:;[\t\x20-\x7e\x80-\xff]{0,255})?)\r\n`)
	modelTrailer = regexp.MustCompile(`^([!#$%&'*+.^_|~0-9A-Za-z` + "`" + `-]+):[\t\x20-\x7e\x80-\xff]*\r\n`)
)

// latin1 converts bytes to runes, so that a regular expression matches bytes.
func latin1(raw []byte) string {
	runes := make([]rune, len(raw))
	for i, b := range raw {
		runes[i] = rune(b)
	}
	return string(runes)
}

// modelChunked is a reference implementation of ChunkedReader for a body in memory. ok reports
// whether the body is complete and valid.
func modelChunked(raw []byte, limit, most int) (body, rest []byte, ok bool) {
	over, count := 0, 0
	for {
		m := modelSize.FindStringSubmatch(latin1(raw[:min(len(raw), 15+256+2)]))
		if m == nil {
			return nil, nil, false
		}
		line := len([]rune(m[0]))
		var n int
		_, _ = fmt.Sscanf(m[1], "%x", &n)
		raw, over = raw[line:], over+line
		if n == 0 {
			break
		}
		count++
		if over > framingBase+len(body)+framingStep*count || n > limit-len(body) {
			return nil, nil, false
		}
		if len(raw) < n+2 || string(raw[n:n+2]) != "\r\n" {
			return nil, nil, false
		}
		body = append(body, raw[:n]...)
		raw, over = raw[n+2:], over+2
	}
	all := raw
	for !bytes.HasPrefix(raw, []byte("\r\n")) {
		m := modelTrailer.FindStringSubmatch(latin1(raw[:min(len(raw), most)]))
		if m == nil || forbiddenTrailer([]byte(m[1])) {
			return nil, nil, false
		}
		raw = raw[len([]rune(m[0])):]
	}
	raw = raw[2:]
	return body, raw, len(all)-len(raw) <= most
}

// FuzzChunked compares ChunkedReader with the reference implementation, for input in pieces of
// any size, and with net/http. It also checks that no byte behind the body is read.
func FuzzChunked(f *testing.F) {
	for _, raw := range []string{
		"5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n", "5;a=b\r\nhello\r\n0;c\r\nX-A: b\r\n\r\n",
		"1\r\nx\r\n1\r\ny\r\n00\r\n\r\n", "0\r\nContent-Length: 5\r\n\r\n", "0\r\n\n",
		"5 \r\nhello\r\n0\r\n\r\n", "0x5\r\nhello\r\n0\r\n\r\n", "10000000000000005\r\nhello\r\n0\r\n\r\n",
		"5\nhello\n0\n\n", "5\r\nhello0\r\n\r\n", "fff\r\n", "",
	} {
		f.Add([]byte(raw), uint16(3), uint16(7))
	}
	f.Fuzz(func(t *testing.T, raw []byte, cut, size uint16) {
		const limit, most = 4 << 10, 1 << 10
		at := min(int(cut), len(raw))
		behind := bytes.NewReader(raw[at:])
		var c ChunkedReader
		c.Reset(io.MultiReader(bytes.NewReader(raw[:at]), behind), most)
		c.Limit = limit
		var body []byte
		var err error
		for p := make([]byte, 1+int(size)); err == nil; {
			var n int
			n, err = c.Read(p)
			body = append(body, p[:n]...)
		}
		want, rest, ok := modelChunked(raw, limit, most)
		if (err == io.EOF) != ok {
			t.Fatalf("%q: %v, the model: %v", raw, err, ok)
		}
		if !ok {
			return
		}
		left, _ := io.ReadAll(behind)
		if !bytes.Equal(body, want) || at <= len(raw)-len(rest) && !bytes.Equal(left, rest) {
			t.Fatalf("%q: %q and %q behind it, the model: %q and %q", raw, body, left, want, rest)
		}
		br := bufio.NewReader(io.MultiReader(strings.NewReader("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"), bytes.NewReader(raw)))
		req, err := http.ReadRequest(br)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := io.ReadAll(req.Body)
		if err == nil {
			left, err = io.ReadAll(br)
		}
		if err != nil || !bytes.Equal(theirs, body) || !bytes.Equal(left, rest) {
			t.Fatalf("%q: %q and %q behind it, net/http: %q and %q, %v", raw, body, rest, theirs, left, err)
		}
	})
}
