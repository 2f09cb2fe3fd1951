package load

import (
	"net"
	"testing"
)

// rawServer answers every connection with the same bytes.
func rawServer(t *testing.T, answer string) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			buf := make([]byte, 64<<10)
			c.Read(buf)
			c.Write([]byte(answer))
			c.Close()
		}
	}()
	return ln.Addr().String()
}
