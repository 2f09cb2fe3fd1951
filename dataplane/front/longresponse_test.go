package front

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestLongResponsesUseBudget checks that responses that clients do not read use the memory budget
// of bodies. When it is exhausted requests are refused, and in the end all of it is released.
func TestLongResponsesUseBudget(t *testing.T) {
	const limit, long, clients = 1 << 20, 900 << 10, 20
	answer := append(append([]byte(`{"text":"`), bytes.Repeat([]byte("x"), long)...), `"}`...)
	r := start(t, Options{MaxBodyBytes: limit, BodyBudgetBytes: 4 * limit}, func(x Exchange) { x.ReplyJSON(200, answer) })
	const request = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"a\"}"
	var conns []net.Conn
	for range clients {
		nc, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		_ = nc.(*net.TCPConn).SetReadBuffer(4 << 10)
		if _, err := io.WriteString(nc, request); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, nc)
	}
	full, refused := 0, 0
	for _, nc := range conns {
		_ = nc.SetReadDeadline(time.Now().Add(10 * time.Second))
		var first [12]byte
		if _, err := io.ReadFull(nc, first[:]); err != nil {
			t.Fatal(err)
		}
		switch string(first[9:]) {
		case "200":
			full++
		case "503":
			refused++
		}
		if used := r.server.BodyBytes(); used > 4*limit {
			t.Errorf("%d bytes are held, over %d", used, 4*limit)
		}
	}
	if full == 0 || full+refused != clients {
		t.Errorf("%d whole answers and %d refusals of %d", full, refused, clients)
	}
	for _, nc := range conns {
		nc.Close()
	}
	testwait.Until(t, "all memory of bodies is given back", func() bool { return r.server.BodyBytes() == 0 })
}

// TestAnswersAreCountedAsTheyAre checks that a response uses as much budget as its buffer has bytes,
// which is little more than its length, even if head and body are just over a MiB.
func TestAnswersAreCountedAsTheyAre(t *testing.T) {
	for _, size := range []int{700 << 10, 1<<20 - 1000, 1 << 20} {
		answer := bytes.Repeat([]byte("x"), size)
		r := start(t, Options{BodyBudgetBytes: 64 << 20, MaxBodyBytes: 1 << 20}, func(x Exchange) { x.ReplyJSON(200, answer) })
		nc, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		_ = nc.(*net.TCPConn).SetReadBuffer(4 << 10)
		if _, err := io.WriteString(nc, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"a\"}"); err != nil {
			t.Fatal(err)
		}
		_ = nc.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.ReadFull(nc, make([]byte, 12)); err != nil {
			t.Fatal(err)
		}
		if used := int(r.server.BodyBytes()); used < size || used > size+size/3 {
			t.Errorf("an answer of %d bytes is counted as %d", size, used)
		}
	}
}
