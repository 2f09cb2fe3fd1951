package wire

import (
	"bytes"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"

	"sluice/bench/testwait"
)

// discardLink is a link that takes everything.
type discardLink struct {
	mu  sync.Mutex
	out []byte
}

func (s *discardLink) write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out = append(s.out, p...)
	return len(p), nil
}
func (s *discardLink) scheduleDelivery(o *outbox, gathered bool) { o.deliver(gathered) }
func (s *discardLink) waitWritable([]byte)                       {}
func (s *discardLink) close()                                    {}

// FuzzFrames feeds a connection whatever comes, whole and in pieces: the same
// requests must be opened and the same error found, nothing may be held
// afterwards, and whatever is answered must be well-formed frames.
func FuzzFrames(f *testing.F) {
	hello := greeting{protocol: protocolName, version: 1, oldest: 1, window: 100}
	good := appendFrame(nil, Hello, 0, hello.append(nil))
	f.Add(good, 1)
	f.Add(append(bytes.Clone(good), appendFrame(nil, Request, 1, []byte("abc"))...), 3)
	many := bytes.Clone(good)
	for i := range uint32(5) {
		many = appendFrame(many, Request, 2*i+1, bytes.Repeat([]byte{1}, int(i)*30))
		many = appendFrame(many, Credit, 2*i+1, []byte{0, 0, 1, 0})
		many = appendFrame(many, Ping, 0, []byte("ping"))
		many = appendFrame(many, []Kind{Stop, Kill}[i%2], 2*i+1, nil)
	}
	f.Add(many, 7)
	f.Add(appendFrame(bytes.Clone(good), Request, 1, make([]byte, 3000)), 100)
	f.Fuzz(func(t *testing.T, in []byte, piece int) {
		whole := feedAll(t, in, len(in))
		if pieces := feedAll(t, in, max(piece, 1)); pieces != whole {
			t.Errorf("in pieces of %d: %s\nwhole: %s", piece, pieces, whole)
		}
	})
}

func feedAll(t *testing.T, in []byte, piece int) string {
	var mu sync.Mutex
	var seen []string
	fed := make(chan struct{}) // streams end behind it: the sum of their credit does not depend on the order
	srv, err := New(Options{MaxFrame: 2000, MaxStreams: 1000, Handler: handlerFunc(func(s *Stream) {
		mu.Lock()
		seen = append(seen, fmt.Sprintf("%d:%x", s.ID, s.Payload))
		mu.Unlock()
		<-fed
		_ = s.Send(s.Payload)
	})})
	if err != nil {
		t.Fatal(err)
	}
	link := new(discardLink)
	c := newConn(srv, link, &net.UnixAddr{Net: "unix"})
	var bad *Error
	var held []byte
	for len(in) > 0 && bad == nil {
		n := min(piece, len(in))
		held, in = append(held, in[:n]...), in[n:]
		var taken int
		if taken, bad = c.feed(held); taken > len(held) {
			t.Fatalf("%d of %d bytes taken", taken, len(held))
		}
		held = held[taken:]
		if len(held) > maxInlineFrame+headerSize && bad == nil && n < maxInlineFrame {
			t.Fatalf("%d bytes are left to come again", len(held))
		}
	}
	close(fed)
	c.endStreams(nil)
	testwait.Until(t, "no handler runs and nothing is held", func() bool { st := srv.Stats(); return st.Streams == 0 && st.Requests == 0 })
	link.mu.Lock()
	defer link.mu.Unlock()
	for out := link.out; len(out) > 0; {
		h, ok := readHeader(out)
		if !ok || len(out) < headerSize+h.size || h.kind == 0 || h.kind > Fail {
			t.Fatalf("an answer that is not a frame: %x", out)
		}
		out = out[headerSize+h.size:]
	}
	slices.Sort(seen)
	return fmt.Sprint(seen, bad)
}

// FuzzGreeting reads what may be a HELLO or an error.
func FuzzGreeting(f *testing.F) {
	g := greeting{protocol: protocolName, version: 1, token: "x", agent: "y", window: 7}
	f.Add(g.append(nil))
	f.Add(appendError(nil, &Error{CodeKilled, "the caller sent KILL"}))
	f.Fuzz(func(t *testing.T, in []byte) {
		_ = readError(in)
		var g greeting
		if g.read(in) != nil {
			return
		}
		var again greeting
		if err := again.read(g.append(nil)); err != nil || again != g {
			t.Errorf("%+v came back as %+v, %v", g, again, err)
		}
	})
}

// TestSendAllocatesNothing: per item, with the deliverer's work.
func TestSendAllocatesNothing(t *testing.T) {
	srv, err := New(Options{Handler: handlerFunc(func(*Stream) {})})
	if err != nil {
		t.Fatal(err)
	}
	c := newConn(srv, new(nullLink), &net.UnixAddr{Net: "unix"})
	s := &Stream{ID: 1, conn: c, credit: 1 << 40}
	item := make([]byte, 80)
	if n := testing.AllocsPerRun(1000, func() {
		if err := s.Send(item); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations an item", n)
	}
}

type nullLink struct{ discardLink }

func (*nullLink) write(p []byte) (int, error) { return len(p), nil }
