package relay

import (
	"strings"
	"testing"
	"time"
)

// Stream data that no empty line will end passes as it comes, and an event
// split into small parts costs only a few passes over each byte.
func TestWholeEventsAreNotBuffered(t *testing.T) {
	for name, k := range map[string]struct {
		part string
		most int // reads until the first byte is out
	}{
		"lines end with one LF":  {chunksOf("data: {\"a\":1}\n"), 2},
		"lines end with CR":      {chunksOf("data: {\"a\":1}\r\r"), 1},
		"comments by themselves": {chunksOf(": ping\n"), 1},
		"crumbs without an end":  {chunksOf("x"), maxEventParts + 2},
		"crumbs with extensions": {"1;" + strings.Repeat("x", 250) + "\r\nx\r\n", maxEventParts + 2},
	} {
		t.Run(name, func(t *testing.T) {
			s := newDiscardStream()
			out, held := 0, 0
			began := time.Now()
			for i := range 20_000 {
				good, err := s.readChunked([]byte(k.part))
				if err != nil {
					t.Fatal(err)
				}
				if out += len(good); out == 0 && i+1 >= k.most {
					t.Fatalf("nothing is out after %d reads", i+1)
				}
				if s.editor != nil && s.editor.partial.buf != nil {
					held = max(held, len(s.editor.partial.buf.B))
				}
			}
			if all := 20_000 * len(k.part); out != all && out < all-maxBufferedEvent || held > 4*maxBufferedEvent {
				t.Errorf("%d of %d bytes are out, %d were held", out, all, held)
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// A stream that waits for a slow client in the middle of an event keeps what is held back of
// the event, not all of what was read with it.
func TestLargeReadBuffersLittle(t *testing.T) {
	s := newDiscardStream()
	const reads = 4
	sent := []byte(strings.Repeat(chunksOf(chunkEvent), 1+reads*largeRead/len(chunksOf(chunkEvent))))
	for i := range reads {
		if s.forward(sent[i*largeRead:(i+1)*largeRead], time.Now()) {
			t.Fatal("the stream has ended")
		}
		h := s.editor.partial
		if h.buf == nil || h.joined != nil {
			t.Fatalf("held %v, and of what has gone %v", h.buf, h.joined)
		}
		if most := 2 * len(chunksOf(chunkEvent)); cap(h.buf.B) > most || cap(s.scan.Partial.B) > most {
			t.Errorf("%d and %d bytes are kept of an event of %d", cap(h.buf.B), cap(s.scan.Partial.B), len(chunkEvent))
		}
	}
}
