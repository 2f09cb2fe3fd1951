package kvevents

import zmq "github.com/pebbe/zmq4"

// inbox holds messages that were read ahead of their turn. ZMQ bounds its queues by
// messages, whatever their size, so a feed leaves it room for a few only and keeps
// what it reads ahead here, by bytes. What finds no room waits in the kernel's buffers
// and at the engine, whose own high-water mark bounds it; what the engine drops for
// that is a gap, and asked for.
type inbox struct {
	queue [][][]byte // frames of each, oldest first
	bytes int
}

const (
	// aheadBytes is what one inbox may hold before nothing more is read into it.
	aheadBytes = 64 << 20
	// queueBytes is what ZMQ's queue of one socket may come to, at twice MaxFrame a
	// message, which is where ZMQ cuts the connection.
	queueBytes = 256 << 20
	// messageBytes is what a message is taken to cost beside its own bytes.
	messageBytes = 256
)

// hwm is how many messages ZMQ may queue.
func hwm(maxFrame int) int { return max(queueBytes/(2*maxFrame), 1) }

func sizeOf(frames [][]byte) int {
	n := messageBytes
	for _, f := range frames {
		n += cap(f)
	}
	return n
}

// readAhead takes what has come to a socket as far as there is room.
func (b *inbox) readAhead(s *zmq.Socket) {
	for b.bytes < aheadBytes {
		frames, err := s.RecvMessageBytes(zmq.DONTWAIT)
		if err != nil {
			return // nothing there; what else is wrong shows when it is waited for
		}
		b.queue = append(b.queue, frames)
		b.bytes += sizeOf(frames)
	}
}

// take gives the oldest message.
func (b *inbox) take() (frames [][]byte, ok bool) {
	if len(b.queue) == 0 {
		return nil, false
	}
	frames = b.queue[0]
	b.queue[0] = nil
	b.bytes -= sizeOf(frames)
	if b.queue = b.queue[1:]; len(b.queue) == 0 {
		b.queue = nil
	}
	return frames, true
}

func (b *inbox) drop() { *b = inbox{} }
