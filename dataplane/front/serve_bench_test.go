package front

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"sluice/dataplane/clientwatch"
	"sluice/dataplane/http1"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttputil"
)

// exchangeLoop sends raw and reads the response of n bytes, b.N times.
func exchangeLoop(b *testing.B, nc net.Conn, raw string, answer int) {
	br := bufio.NewReaderSize(nc, 64<<10)
	request := []byte(raw)
	buf := make([]byte, answer)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if _, err := nc.Write(request); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(br, buf); err != nil {
			b.Fatal(err)
		}
	}
}

// answerSize returns the length of the response to raw, which is always the same.
func answerSize(b *testing.B, nc net.Conn, raw string) int {
	b.Helper()
	if _, err := io.WriteString(nc, raw); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	n, err := nc.Read(buf)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

func benchBody(size int) string {
	body := doc(size)
	return chatPost(body, "Authorization: Bearer 123", "Accept: application/json", "User-Agent: bench", "X-Request-Id: bench-1")
}

// BenchmarkServeShort measures a whole request through the server with a trivial handler, on a
// listener in memory. The figure includes the client.
func BenchmarkServeShort(b *testing.B) {
	for _, size := range []int{256, 32 << 10} {
		b.Run(fmt.Sprintf("body=%d", size), func(b *testing.B) {
			h := handlerFunc(func(x Exchange) { x.ReplyJSON(200, []byte(`{"ok":true}`)) })
			s, err := New(Options{Handler: h})
			if err != nil {
				b.Fatal(err)
			}
			ln := fasthttputil.NewInmemoryListener()
			go func() { _ = s.Serve(ln) }()
			defer func() { _ = s.Shutdown(context.Background()) }()
			nc, err := ln.Dial()
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			raw := benchBody(size)
			exchangeLoop(b, nc, raw, answerSize(b, nc, raw))
			_ = nc.Close()
		})
	}
}

// BenchmarkPlainFasthttp measures fasthttp alone, without http1.Head and the body scan, and with
// its own reading of bodies.
func BenchmarkPlainFasthttp(b *testing.B) {
	for _, size := range []int{256, 32 << 10} {
		b.Run(fmt.Sprintf("body=%d", size), func(b *testing.B) {
			s := &fasthttp.Server{
				ReadBufferSize: 16 << 10, ReadTimeout: 10 * time.Second, MaxRequestBodySize: 32 << 20,
				Handler: func(ctx *fasthttp.RequestCtx) {
					ctx.SetContentType("application/json")
					ctx.SetBody([]byte(`{"ok":true}`))
				},
			}
			ln := fasthttputil.NewInmemoryListener()
			go func() { _ = s.Serve(ln) }()
			defer ln.Close()
			nc, err := ln.Dial()
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			raw := benchBody(size)
			exchangeLoop(b, nc, raw, answerSize(b, nc, raw))
		})
	}
}

// BenchmarkOnClientGone measures setting and clearing the function of one request, on a connection
// that is watched already.
func BenchmarkOnClientGone(b *testing.B) {
	c := &conn{srv: &Server{}}
	c.srv.clientWatcher = &clientwatch.Watcher{}
	x := Exchange(&httpExchange{c: c, srv: c.srv})
	f := func() {}
	b.ReportAllocs()
	for range b.N {
		x.OnClientGone(f)
		x.OnClientGone(nil)
	}
}

// BenchmarkRequestHead measures the parsing of a typical client's head.
func BenchmarkRequestHead(b *testing.B) {
	raw := []byte("Host: localhost:8000\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n" +
		"User-Agent: OpenAI/Python 1.99.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Async: false\r\nX-Stainless-Runtime: CPython\r\n" +
		"Authorization: Bearer EMPTY\r\nContent-Type: application/json\r\nContent-Length: 1234\r\n\r\n")
	method, target, protocol := []byte("POST"), []byte(chat), []byte("HTTP/1.1")
	var h http1.Head
	b.ReportAllocs()
	for range b.N {
		if refused := h.Parse(method, target, protocol, raw); refused != "" {
			b.Fatal(refused)
		}
	}
}

// BenchmarkStream measures a request whose response is relayed from an engine on loopback, over a
// kept-alive connection. The figure includes four goroutines and the kernel.
func BenchmarkStream(b *testing.B) {
	answer := streamHead + chunk(helloStream) + chunk("data: [DONE]\n\n") + "0\r\n\r\n"
	e := startEngine(b, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, answer)
		return err == nil
	})
	r := start(b, Options{}, relayTo(e, func() RelayHooks { return RelayHooks{} }))
	c := r.dial()
	_ = c.SetDeadline(time.Time{})
	raw := chatPost(hello, "X-Request-Id: bench-1")
	exchangeLoop(b, c, raw, answerSize(b, c, raw))
}
