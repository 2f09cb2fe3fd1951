package upstream

import (
	"bytes"
	"errors"
	"io"
	"net/http/httputil"
	"strings"
	"testing"
)

// dechunk feeds pieces; used is how many bytes belonged to the body.
func dechunk(pieces ...[]byte) (payload []byte, used int, done bool, err error) {
	var c Chunks
	for _, p := range pieces {
		for len(p) > 0 && !c.Done() {
			n, data, err := c.Next(p)
			payload = append(payload, data...)
			used += n
			if err != nil {
				return payload, used, false, err
			}
			p = p[n:]
		}
	}
	return payload, used, c.Done(), nil
}

func TestChunksSplitAnywhere(t *testing.T) {
	for _, c := range []struct{ framed, payload, rest string }{
		{"0\r\n\r\n", "", ""},
		{"5\r\nhello\r\n0\r\n\r\n", "hello", ""},
		{"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\nnext", "hello world", "next"},
		{"00005;a=b;c=\"d\"\r\nhello\r\n000\r\n\r\n", "hello", ""},
		{"A\r\n0123456789\r\n0;last\r\nX-Sum: 1\r\nY: \r\n\r\nZ", "0123456789", "Z"},
		{"2\r\n\r\n\r\n0\r\n\r\n", "\r\n", ""},
		{"1\r\na\r\n0\r\nX-Content-Length: 1\r\nContent-Digest: a:b\r\nServer-Timing:\r\nHosts: 1\r\n\r\n", "a", ""},
	} {
		b := []byte(c.framed)
		end := len(b) - len(c.rest)
		for i := range len(b) + 1 {
			payload, used, done, err := dechunk(b[:i], b[i:])
			if err != nil || !done || string(payload) != c.payload || used != end {
				t.Fatalf("%q cut at %d: %q, used %d, done %v, %v", b, i, payload, used, done, err)
			}
			if i < end { // a missing part is an error
				if _, _, done, err := dechunk(b[:i]); done || err != nil {
					t.Fatalf("%q alone: done %v, %v", b[:i], done, err)
				}
			}
		}
		var ones [][]byte
		for i := range b {
			ones = append(ones, b[i:i+1])
		}
		if payload, _, done, err := dechunk(ones...); err != nil || !done || string(payload) != c.payload {
			t.Fatalf("%q byte by byte: %q, %v, %v", b, payload, done, err)
		}
	}
}

func TestChunksRefuse(t *testing.T) {
	for _, bad := range []string{
		"\r\n", "g\r\n", "-1\r\n", "+5\r\nhello\r\n", "0x5\r\nhello\r\n", " 5\r\nhello\r\n", ";x\r\n",
		"5\nhello\r\n", "5\r\r\n", "5\rhello", "5\r\nhello\n0\r\n\r\n", "5\r\nhelloX", "5\r\nhello\rX",
		"5;a\nb\r\nhello\r\n", "5;\x00\r\n", "5;" + strings.Repeat("x", maxChunkLine) + "\r\n",
		"10000000000000000\r\n", "ffffffffffffffff\r\n", "7fffffffffffffff\r\n", "00000000000000005\r\n",
		"0\r\n\n", "0\r\nX: 1\n\r\n", "0\r\n X: folded\r\n\r\n", "0\r\n: x\r\n\r\n", "0\r\nX: \x01\r\n\r\n",
		"0\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 9) + "\r\n", "5_0\r\n", "5 5\r\nhello\r\n", "5 ;x\r\nhello\r\n", "5 \x0b\r\n",
		"5 \r\nhello\r\n", "5\t\r\nhello\r\n", "0 \r\n\r\n", "5\t;x\r\nhello\r\n",
		"0\r\nX-A\r\n\r\n", "0\r\nX-A : b\r\n\r\n", "0\r\nX-A b: c\r\n\r\n", "0\r\nX: 1\r\nX-A\r\n\r\n",
		"0\r\nContent-Length: 5\r\n\r\n", "0\r\ntransfer-encoding: chunked\r\n\r\n", "0\r\nX: 1\r\nSET-COOKIE: a=b\r\n\r\n",
		"0\r\nTE:\r\n\r\n", "0\r\nHost: a\r\n\r\n", "0\r\nConnection: close\r\n\r\n", "0\r\n" + strings.Repeat("x", maxTrailerBytes+1),
	} {
		_, used, _, err := dechunk([]byte(bad))
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%.60q: %v", bad, err)
			continue
		}
		for i := range bad {
			if _, n, _, err := dechunk([]byte(bad[:i]), []byte(bad[i:])); !errors.Is(err, ErrProtocol) || n != used {
				t.Errorf("%.60q cut at %d: used %d, want %d, %v", bad, i, n, used, err)
				break
			}
		}
	}
}

func TestChunksBoundary(t *testing.T) {
	const body = "3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n"
	for i := range len(body) {
		var c Chunks
		for p := []byte(body[:i]); len(p) > 0; {
			n, _, err := c.Next(p)
			if err != nil {
				t.Fatal(err)
			}
			p = p[n:]
		}
		missing, ok := c.Boundary()
		if !ok {
			missing, ok = c.InTrailers()
			if ok {
				if got, _, done, err := dechunk([]byte(body[:i] + missing)); !done || err != nil || string(got) != "abcde" {
					t.Errorf("ended at %d by %q: %q %v %v", i, missing, got, done, err)
				}
			}
			continue
		}
		got, _, done, err := dechunk([]byte(body[:i] + missing + "1\r\n!\r\n0\r\n\r\n"))
		if err != nil || !done || !strings.HasSuffix(string(got), "!") || !strings.HasPrefix("abcde", strings.TrimSuffix(string(got), "!")) {
			t.Errorf("after %q and %q: %q, %v, %v", body[:i], missing, got, done, err)
		}
	}
}

// Anything the parser takes whole it takes in pieces, with the same result,
// and what it takes net/http's reader takes too.
func FuzzChunks(f *testing.F) {
	for _, s := range []string{"5\r\nhello\r\n0\r\n\r\n", "0\r\n\r\n", "5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n", "fffffffffffffffff\r\n", "1\nx", "2\r\n\r\n\r\n0\r\n\r\nrest"} {
		f.Add([]byte(s), uint(3))
	}
	f.Fuzz(func(t *testing.T, b []byte, cut uint) {
		payload, used, done, err := dechunk(b)
		if used > len(b) {
			t.Fatalf("used %d of %d", used, len(b))
		}
		at := int(cut % uint(len(b)+1))
		p2, u2, d2, e2 := dechunk(b[:at], b[at:])
		if !bytes.Equal(payload, p2) || used != u2 || done != d2 || (err == nil) != (e2 == nil) {
			t.Fatalf("whole %q %d %v %v; cut at %d %q %d %v %v", payload, used, done, err, at, p2, u2, d2, e2)
		}
		if done {
			std, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(b)))
			if err != nil || !bytes.Equal(std, payload) {
				t.Fatalf("net/http reads %q, %v; we read %q", std, err, payload)
			}
		}
	})
}
