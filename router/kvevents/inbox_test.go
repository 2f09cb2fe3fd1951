package kvevents

import (
	"encoding/binary"
	"testing"

	"sluice/bench/testwait"
	"sluice/dataplane/zmtp"
)

// Read-ahead is bounded in bytes, ordered and lossless: a message beyond the bound stays
// where it was.
func TestInboxIsBoundedByBytes(t *testing.T) {
	e := newEngine(t, false)
	r := newFeedHarness(t, e, nil)
	f := r.stepped()
	e.subscribed()
	testwait.Until(t, "connected", func() bool { f.watchConnection(); return f.connected })
	const messages, size = 200, 1 << 20
	payload := make([]byte, size)
	for i := range messages {
		e.frames(nil, binary.BigEndian.AppendUint64(nil, uint64(i)), payload)
	}
	buf := make([]byte, readBytes)
	b := &f.inbox
	testwait.Until(t, "it is full", func() bool { f.readAhead(buf); return b.bytes >= defaultInboxBytes })
	if most := defaultInboxBytes + size + 2*messageOverhead; b.bytes > most {
		t.Errorf("%d bytes, want %d at most", b.bytes, most)
	}
	next := uint64(0)
	testwait.Until(t, "all of them", func() bool {
		for {
			frames, ok := b.pop()
			if !ok {
				break
			}
			if got := binary.BigEndian.Uint64(frames[1]); got != next || len(frames[2]) != size {
				t.Fatalf("message %d of %d bytes came, want %d of %d", got, len(frames[2]), next, size)
			}
			next++
		}
		if b.bytes != 0 || b.queue != nil {
			t.Fatalf("%d bytes in an empty inbox", b.bytes)
		}
		f.readAhead(buf)
		return next == messages
	})
}

// A message that is kept is a copy: what it was read into is used again.
func TestInboxCopies(t *testing.T) {
	b := inbox{maxBytes: 1 << 20}
	m := zmtp.Message{[]byte("topic"), []byte("12345678"), []byte("payload")}
	b.push(m)
	for _, part := range m {
		clear(part)
	}
	got, ok := b.pop()
	if !ok || len(got) != 3 || string(got[0])+string(got[1])+string(got[2]) != "topic12345678payload" {
		t.Errorf("%q", got)
	}
}
