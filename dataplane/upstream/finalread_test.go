package upstream

import (
	"io"
	"net"
	"testing"

	"sluice/bench/testwait"
)

// TestFinalRead: what lies in the socket when a wait's time is over came in time, though
// nobody looked; but a wait that began too late, or has nothing, is over.
func TestFinalRead(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	e, err := NewEndpoint("http://"+ln.Addr().String(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	var call Call
	c, err := e.connect(&Request{}, &call)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		call.detach(&c.leg)
		e.open.Add(1)
		c.close()
	}()
	if c.raw == nil {
		t.Skip("the connection is not a raw socket")
	}
	engine, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	c.acquireExchange()
	c.sent = true
	look := func(waited bool) error {
		c.readErr, c.waitedInPoller = nil, waited
		c.finalRead()
		return c.readErr
	}
	if err := look(true); err != ErrTimeout {
		t.Errorf("of a silent engine: %v, want a timeout", err)
	}
	if _, err := io.WriteString(engine, "late"); err != nil {
		t.Fatal(err)
	}
	if err := look(false); err != ErrTimeout || c.w != 0 {
		t.Errorf("without a wait before: %v and %d bytes, want a timeout", err, c.w)
	}
	testwait.Until(t, "what came is read", func() bool { return look(true) == nil })
	if got := string(c.buf[:c.w]); got != "late" {
		t.Errorf("%q and %v, want what came", got, c.readErr)
	}
}
