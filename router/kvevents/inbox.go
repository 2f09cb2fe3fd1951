package kvevents

import "sluice/dataplane/zmtp"

// inbox buffers messages that were read early, bounded in bytes. Further messages wait in the
// kernel's buffers and at the engine, whose own high-water mark bounds them. Messages that the
// engine drops show up as a gap and are replayed.
type inbox struct {
	queue    []zmtp.Message // oldest first
	bytes    int
	maxBytes int // above this, nothing more is read into the inbox
}

const (
	// defaultInboxBytes is the default bound of an inbox.
	defaultInboxBytes = 64 << 20
	// messageOverhead is the assumed cost of a message in addition to its bytes.
	messageOverhead = 256
)

func sizeOf(m zmtp.Message) int {
	n := messageOverhead
	for _, part := range m {
		n += len(part)
	}
	return n
}

// full reports whether the bound is reached.
func (b *inbox) full() bool { return b.bytes >= b.maxBytes }

// push appends a copy of a message.
func (b *inbox) push(m zmtp.Message) {
	size := sizeOf(m)
	all, parts := make([]byte, 0, size-messageOverhead), make(zmtp.Message, len(m))
	for i, part := range m {
		from := len(all)
		all = append(all, part...)
		parts[i] = all[from:len(all):len(all)]
	}
	b.queue = append(b.queue, parts)
	b.bytes += size
}

// pop removes and returns the oldest message.
func (b *inbox) pop() (m zmtp.Message, ok bool) {
	if len(b.queue) == 0 {
		return nil, false
	}
	m = b.queue[0]
	b.queue[0] = nil
	b.bytes -= sizeOf(m)
	if b.queue = b.queue[1:]; len(b.queue) == 0 {
		b.queue = nil
	}
	return m, true
}

func (b *inbox) clear() { *b = inbox{maxBytes: b.maxBytes} }
