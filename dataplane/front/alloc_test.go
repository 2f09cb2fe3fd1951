package front

import (
	"bufio"
	"io"
	"testing"

	"github.com/valyala/fasthttp/fasthttputil"
)

// What runs for every request allocates nothing, but for the request id.
func TestAllocations(t *testing.T) {
	if raceOn {
		t.Skip("the race detector makes pools forget")
	}
	raw := []byte("Host: a\r\nConnection: keep-alive\r\nContent-Type: application/json\r\nContent-Length: 1234\r\n\r\n")
	method, target, protocol := []byte("POST"), []byte(chat), []byte("HTTP/1.1")
	var h head
	if n := testing.AllocsPerRun(100, func() { h.read(method, target, protocol, raw) }); n != 0 {
		t.Errorf("the guard allocates %v times", n)
	}

	c := &conn{srv: &Server{watch: &watcher{}}}
	x := &Exchange{c: c, srv: c.srv}
	f := func() {}
	if n := testing.AllocsPerRun(100, func() { x.OnGone(f); x.OnGone(nil) }); n != 0 {
		t.Errorf("the watch allocates %v times", n)
	}

	s, err := New(Options{Handler: handlerFunc(echo)})
	if err != nil {
		t.Fatal(err)
	}
	ln := fasthttputil.NewInmemoryListener()
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	nc, err := ln.Dial()
	if err != nil {
		t.Fatal(err)
	}
	request := []byte(chatPost(doc(1000), "X-Request-Id: abc"))
	if _, err := nc.Write(request); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 64<<10)
	size, err := nc.Read(answer)
	if err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(nc)
	n := testing.AllocsPerRun(500, func() {
		_, _ = nc.Write(request)
		_, _ = io.ReadFull(br, answer[:size])
	})
	if n > 2 {
		t.Errorf("a request allocates %v times, want 1: the string of its id", n)
	}
	_ = nc.Close()
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	<-done
}
