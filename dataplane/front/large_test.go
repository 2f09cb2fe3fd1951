package front

import (
	"io"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestLargePrompt measures point 3 of RELIABILITY.md: a prompt of a million token ids uses a buffer
// of the next power of two and, while that is filled, an eighth to a quarter of it more. A
// prompt that is too large uses none.
func TestLargePrompt(t *testing.T) {
	r := start(t, Options{}, func(x Exchange) { x.ReplyJSON(200, []byte(strconv.Itoa(len(x.Request().Doc.Body)))) })
	var ids strings.Builder
	ids.WriteString(`{"model":"m","prompt":[1`)
	for i := range 1_000_000 {
		ids.WriteString("," + strconv.Itoa(i%150_000))
	}
	ids.WriteString("]}")
	body := ids.String()
	c := r.dial()
	c.send(post("/v1/completions", body))
	if resp, answer := c.readResponse(); resp.StatusCode != 200 || answer != strconv.Itoa(len(body)) {
		t.Fatalf("%d %s", resp.StatusCode, answer)
	}
	peak := r.server.budget.Peak()
	if peak > int64(len(body)*9/4) {
		t.Errorf("a body of %d bytes held %d", len(body), peak)
	}
	over := r.dial()
	over.send(sizedHead("/v1/completions", 100<<20) + "{")
	if resp, answer := over.readResponse(); resp.StatusCode != 413 {
		t.Errorf("100 MiB: %d %s", resp.StatusCode, answer)
	}
	if now := r.server.budget.Peak(); now != peak {
		t.Errorf("100 MiB that were announced held %d bytes", now-peak)
	}
	t.Logf("reliability 3: a prompt of 1,000,000 ids, %d bytes, held %d (%.2f times); 100 MiB announced: 413, nothing held", len(body), peak, float64(peak)/float64(len(body)))
}

// sizedHead is a head with Content-Length.
func sizedHead(path string, n int) string {
	return "POST " + path + " HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(n) + "\r\n\r\n"
}

// A non-streaming response is cut if the client does not read it.
func TestWholeResponseToStalledClient(t *testing.T) {
	const size, limit = 32 << 20, 200 * time.Millisecond // more than two sockets hold
	body := `"` + strings.Repeat("a", size-2) + `"`
	var logged logLines
	r := start(t, Options{WriteTimeout: limit, Log: slog.New(slog.NewTextHandler(&logged, nil))}, func(x Exchange) { x.ReplyJSON(200, []byte(body)) })
	stopped := r.dial()
	stopped.send(chatPost(hello))
	testwait.Until(t, "asked", func() bool { return r.calls.Load() == 1 })
	testwait.Until(t, "cut", func() bool { return r.server.conns.len() == 0 })
	if n, err := io.Copy(io.Discard, stopped.br); n >= size {
		t.Errorf("%d bytes came, %v", n, err)
	}
	contains(t, logged.String(), "client=127.0.0.1", "endpoint=/v1/chat/completions", "cause=client_stalled")
}
