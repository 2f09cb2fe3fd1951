package kvevents

import (
	"encoding/binary"
	"testing"

	zmq "github.com/pebbe/zmq4"
)

// What is read ahead is bounded by bytes, in order, and nothing of it is lost: what
// finds no room stays where it was.
func TestInboxIsBoundedByBytes(t *testing.T) {
	e := newEngine(t, false)
	sub := must(e.ctx.NewSocket(zmq.SUB))
	defer sub.Close()
	sub.SetRcvhwm(hwm(32 << 20))
	sub.SetSubscribe("")
	if err := sub.Connect(e.Endpoint); err != nil {
		t.Fatal(err)
	}
	e.subscribed()
	const messages, size = 200, 1 << 20
	payload := make([]byte, size)
	for i := range messages {
		e.frames(nil, binary.BigEndian.AppendUint64(nil, uint64(i)), payload)
	}
	var b inbox
	eventually(t, "it is full", func() bool { b.readAhead(sub); return b.bytes >= aheadBytes })
	if most := aheadBytes + size + 2*messageBytes; b.bytes > most {
		t.Errorf("%d bytes, want %d at most", b.bytes, most)
	}
	next := uint64(0)
	eventually(t, "all of them", func() bool {
		for {
			frames, ok := b.take()
			if !ok {
				break
			}
			if got := binary.BigEndian.Uint64(frames[1]); got != next {
				t.Fatalf("message %d came, want %d", got, next)
			}
			next++
		}
		if b.bytes != 0 || b.queue != nil {
			t.Fatalf("%d bytes in an empty inbox", b.bytes)
		}
		b.readAhead(sub)
		return next == messages
	})
}

func TestQueueOfASocket(t *testing.T) {
	for frame, want := range map[int]int{32 << 20: 4, 1 << 10: 1 << 17, 1 << 40: 1} {
		if got := hwm(frame); got != want {
			t.Errorf("messages of %d bytes: %d in the queue, want %d", frame, got, want)
		}
	}
}
