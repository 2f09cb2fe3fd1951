package upstream

import (
	"errors"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// TestMalformedResponses is of number 17 of RELIABILITY.md: what never ends costs neither
// memory nor time.
func TestMalformedResponses(t *testing.T) {
	piece := strings.Repeat("x", 64<<10)
	endless := func(p *peer, s []byte, most int64) (sent int64) {
		for sent < most {
			n, err := p.Write(s)
			if sent += int64(n); err != nil {
				break
			}
		}
		return sent
	}
	for _, k := range []struct {
		name, begin, again string
		most               int64
	}{
		{"a head of 1 GiB in one line", "HTTP/1.1 200 OK\r\nX-A: ", piece, 1 << 30},
		{"a head of 1 GiB in lines", "HTTP/1.1 200 OK\r\n", strings.Repeat("X-A: b\r\n", 8<<10), 1 << 30},
		{"a flood of 1xx", "", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 1000), 1 << 30},
		{"a chunk extension of 1 GiB", ok + "Transfer-Encoding: chunked\r\n\r\n5;", piece, 1 << 30},
		{"a trailer of 1 GiB", ok + "Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", piece, 1 << 30},
		{"a body of 1 GiB", ok + "Content-Length: 1073741824\r\n\r\n", piece, 1 << 30},
	} {
		t.Run(k.name, func(t *testing.T) {
			noLeaks(t)
			sent, again := make(chan int64, 1), []byte(k.again)
			e := newEngine(t, func(p *peer) {
				p.request()
				p.send(k.begin)
				sent <- endless(p, again, k.most)
			}).endpoint(t, Options{})
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			resp, err := e.Do(post("x"), nil)
			if err == nil {
				_, err = resp.ReadAll(nil, 1<<20)
				resp.Release()
			}
			runtime.ReadMemStats(&after)
			if !errors.Is(err, ErrProtocol) && !errors.Is(err, ErrTooLarge) {
				t.Errorf("%v", err)
			}
			took := <-sent
			held := after.TotalAlloc - before.TotalAlloc
			if held > 8<<20 || took > 64<<20 {
				t.Errorf("%d bytes were taken, %d allocated", took, held)
			}
			if s := e.Stats(); s.Open != 0 {
				t.Errorf("%+v", s)
			}
			t.Logf("reliability 17: %s: refused after %d KiB sent, %d KiB allocated", k.name, took>>10, held>>10)
		})
	}
}

// A request that is sent on is none that was answered, and a probe's answer is what it is.
func TestRedirectionsAreRefused(t *testing.T) {
	for _, status := range []string{"300", "301", "302", "303", "304", "307", "308", "399"} {
		e := newEngine(t, func(p *peer) {
			p.request()
			p.send("HTTP/1.1 " + status + " Elsewhere\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
			p.gone()
		}).endpoint(t, Options{})
		if _, err := e.Do(post("x"), nil); !errors.Is(err, ErrRedirect) || !strings.Contains(err.Error(), status) || !strings.HasSuffix(ClientMessage(err), ErrRedirect.Error()) {
			t.Errorf("%s: %v", status, err)
		}
		for _, method := range []string{"GET", "DELETE", "HEAD"} {
			if _, err := e.Do(&Request{Method: method, Path: "/v1/responses/resp_1"}, nil); !errors.Is(err, ErrRedirect) {
				t.Errorf("%s to %s: %v", status, method, err)
			}
		}
		if s := e.Stats(); s.Open != 0 {
			t.Errorf("%s: %+v", status, s)
		}
		if got, _, err := e.Get("/health", long, 10); err != nil || strconv.Itoa(got) != status {
			t.Errorf("a probe: %d, %v", got, err)
		}
	}
}

// An answer in a coding, which nobody asked for, is none: what must not pass cannot be found in it.
func TestCompressedResponsesAreRefused(t *testing.T) {
	for coding, want := range map[string]error{"gzip": ErrContentEncoding, "br": ErrContentEncoding, "identity, gzip": ErrContentEncoding, "Identity": nil, "": nil} {
		e := newEngine(t, func(p *peer) {
			p.request()
			p.send(ok + "CONTENT-Encoding: " + coding + "\r\nContent-Length: 2\r\n\r\n{}")
		}).endpoint(t, Options{})
		resp, err := e.Do(post("x"), nil)
		if !errors.Is(err, want) {
			t.Errorf("%q: %v", coding, err)
		}
		if err == nil {
			_ = resp.Discard(10)
			resp.Release()
		}
		if s := e.Stats(); err != nil && s.Open != 0 {
			t.Errorf("%q: %+v", coding, s)
		}
	}
}
