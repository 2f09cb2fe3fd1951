package kvevents

import "sluice/dataplane/zmtp"

// inbox holds messages that were read ahead of their turn, bounded by bytes. What finds no
// room waits in the kernel's buffers and at the engine, whose own high-water mark bounds it;
// what the engine drops for that is a gap, and asked for.
type inbox struct {
	queue    []zmtp.Message // oldest first
	bytes    int
	maxBytes int // bytes, before nothing more is read into it
}

const (
	// defaultInboxBytes is the most of an inbox.
	defaultInboxBytes = 64 << 20
	// messageOverhead is what a message is taken to cost beside its own bytes.
	messageOverhead = 256
)

func sizeOf(m zmtp.Message) int {
	n := messageOverhead
	for _, part := range m {
		n += len(part)
	}
	return n
}

// full says that nothing more is to be read into it.
func (b *inbox) full() bool { return b.bytes >= b.maxBytes }

// push keeps a copy of a message.
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

// pop gives the oldest message.
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
