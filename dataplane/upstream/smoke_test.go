package upstream

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

func BenchmarkDo(b *testing.B) {
	ln, _ := net.Listen("tcp", "127.0.0.1:0")
	defer ln.Close()
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				buf := make([]byte, 4096)
				resp := []byte("HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 03:56:43 GMT\r\nserver: uvicorn\r\ncontent-length: 26\r\ncontent-type: application/json\r\n\r\n{\"object\":\"text_complete\"}")
				for {
					if _, err := nc.Read(buf); err != nil {
						return
					}
					nc.Write(resp)
				}
			}()
		}
	}()
	e, err := NewEndpoint("http://"+ln.Addr().String(), Options{})
	if err != nil {
		b.Fatal(err)
	}
	body := []byte(`{"model":"m","prompt":[1,2,3]}`)
	req := &Request{Method: "POST", Path: "/v1/completions", Body: [][]byte{body}, Fields: []Field{{"Content-Type", "application/json"}}, HeadTimeout: time.Minute}
	var dst []byte
	b.ReportAllocs()
	var call Call
	for b.Loop() {
		resp, err := e.Do(req, &call)
		if err != nil {
			b.Fatal(err)
		}
		dst, err = resp.ReadAll(dst[:0], 1<<20)
		if err != nil || len(dst) != 26 {
			b.Fatal(err, len(dst))
		}
		resp.Release()
	}
}

func TestSmoke(t *testing.T) {
	ln, _ := net.Listen("tcp", "127.0.0.1:0")
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Path", r.URL.String())
		w.Write(b)
		w.(http.Flusher).Flush()
		w.Write(b)
	})}
	go srv.Serve(ln)
	defer srv.Close()
	e, _ := NewEndpoint("http://"+ln.Addr().String()+"/pre/", Options{})
	big := make([]byte, 3<<20)
	for _, n := range []int{0, 10, 20000, 3 << 20, 5} {
		resp, err := e.Do(&Request{Method: "POST", Path: "/x?y=1", Body: [][]byte{big[:n]}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		out, err := resp.ReadAll(nil, 64<<20)
		if err != nil || len(out) != 2*n {
			t.Fatal(n, len(out), err)
		}
		if string(resp.Header("x-path")) != "/pre/x?y=1" {
			t.Fatalf("%q", resp.Header("x-path"))
		}
		resp.Release()
	}
	t.Logf("%+v", e.Stats())
	_ = bufio.NewReader
}
