package upstream

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// A body that ends with its connection is whole over TLS only behind the engine's
// close_notify: the end of the TCP connection may come from any host on the path (RFC 9112, 9.8).
func TestTruncatedBodyUnderTLS(t *testing.T) {
	noLeaks(t)
	some := httptest.NewTLSServer(nil) // for its certificate
	some.Close()
	pool := x509.NewCertPool()
	pool.AddCert(some.Certificate())
	much := strings.Repeat("x", 40<<10)
	for name, k := range map[string]struct {
		first, rest string // with the head, and a moment later
		notify      bool
	}{
		"whole":                      {"hello", " you", true},
		"whole with its head":        {"hello", "", true},
		"whole, long":                {"hello", much, true},
		"nothing":                    {"", "", true},
		"cut":                        {"hello", " you", false},
		"cut behind what came first": {"hello", "", false},
		"cut, long":                  {"hello", much, false},
		"cut before its first byte":  {"", "", false},
	} {
		for reading, read := range map[string]func(*Response) ([]byte, error){
			"read whole": func(r *Response) ([]byte, error) { return r.ReadAll(nil, 1<<20) },
			"relayed":    func(r *Response) ([]byte, error) { return readRawBody(r, nil) },
			"peeked": func(r *Response) ([]byte, error) {
				if _, err := r.Peek(); err != nil {
					return nil, err
				}
				if _, err := r.PeekMore(1 << 10); err != nil {
					return nil, err
				}
				return readRawBody(r, nil)
			},
		} {
			srv := newEngine(t, func(p *peer) {
				under := p.Conn
				secure := tls.Server(under, &tls.Config{Certificates: some.TLS.Certificates})
				p.Conn, p.br = secure, bufio.NewReader(secure)
				if _, _, ok := p.request(); !ok {
					return
				}
				p.send("HTTP/1.1 200 OK\r\n\r\n" + k.first)
				if k.rest != "" {
					testwait.Pace(2 * time.Millisecond)
					p.send(k.rest)
				}
				if k.notify {
					_ = secure.CloseWrite()
				}
				_ = under.Close()
			})
			e, err := NewEndpoint("https://"+srv.ln.Addr().String(), Options{TLS: alwaysScript(&tls.Config{RootCAs: pool}), ConnectTimeout: 20 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(e.Close)
			resp, err := e.Do(post("x"), nil)
			if err != nil {
				t.Fatalf("%s, %s: %v", name, reading, err)
			}
			got, err := read(resp)
			if resp.Release(); k.notify {
				if err != nil || string(got) != k.first+k.rest {
					t.Errorf("%s, %s: %d bytes, %v", name, reading, len(got), err)
				}
			} else if !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%s, %s: %d bytes, and no word of the cut (%v)", name, reading, len(got), err)
			}
		}
	}
}
