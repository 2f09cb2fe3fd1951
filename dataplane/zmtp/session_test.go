package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// sessionResult is what a session made of some bytes.
type sessionResult struct {
	messages []string
	parts    int
	answers  string
	err      error
}

const testMaxFrame = 1000

// runSession feeds a session pieces and looks after its bounds.
func runSession(t testing.TB, pieces ...[]byte) (h sessionResult) {
	s := &session{maxFrame: testMaxFrame,
		onMessage: func(m []byte) {
			if len(m) > testMaxFrame {
				t.Fatalf("a message of %d bytes", len(m))
			}
			h.messages = append(h.messages, string(m))
		},
		onMultipart: func() { h.parts++ },
		send:        func(p []byte) error { h.answers += string(p); return nil },
	}
	for _, p := range pieces {
		for len(p) > 0 {
			n := copy(s.free(), p)
			if n == 0 {
				t.Fatal("a session has no space")
			}
			if h.err = s.advance(n); h.err != nil {
				return h
			}
			p = p[n:]
			if len(s.buf) > testMaxFrame+longHead {
				t.Fatalf("it holds %d bytes", len(s.buf))
			}
		}
	}
	return h
}

// short and long are frames; hello is what a PUSH socket of libzmq says first.
func short(flags byte, body string) []byte {
	return append([]byte{flags, byte(len(body))}, body...)
}

func long(flags byte, body string) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(body))), body...)
}

func property(name, value string) string {
	return string(rune(len(name))) + name + string(binary.BigEndian.AppendUint32(nil, uint32(len(value)))) + value
}

func handshakeBytes() []byte {
	return append(bytes.Clone(ourGreeting[:]), short(flagCommand, "\x05READY"+property("Socket-Type", "PUSH")+property("Identity", ""))...)
}

func joined(parts ...[]byte) []byte { return slices.Concat(parts...) }

func TestMessages(t *testing.T) {
	big := strings.Repeat("x", testMaxFrame)
	h := runSession(t, handshakeBytes(), short(0, "one"), long(0, "two"), long(0, big), short(0, ""),
		short(flagMore, "a"), long(flagMore, "b"), short(0, "end"), // of three frames
		short(flagCommand, "\x04PING\x00\x10ctx"), short(flagCommand, "\x04PONG"), short(flagCommand, "\x07UNKNOWN"), short(0, "last"))
	if h.err != nil || !slices.Equal(h.messages, []string{"one", "two", big, "", "last"}) || h.parts != 1 {
		t.Errorf("%d messages %.100q, %d of several frames: %v", len(h.messages), h.messages, h.parts, h.err)
	}
	if want := string(readyFrame) + "\x04\x08\x04PONGctx"; h.answers != want {
		t.Errorf("it answered %q, want %q", h.answers, want)
	}
}

func TestRefused(t *testing.T) {
	greet := func(change func(g []byte)) []byte {
		g := handshakeBytes()
		change(g)
		return g
	}
	for name, k := range map[string]struct {
		input []byte
		want  string
	}{
		"HTTP":                 {[]byte("GET / HTTP/1.1\r\n"), "ZMTP"},
		"no signature":         {greet(func(g []byte) { g[9] = 0 }), "ZMTP"},
		"ZMTP 2":               {greet(func(g []byte) { g[10] = 1 })[:11], "ZMTP 2"},
		"another mechanism":    {greet(func(g []byte) { copy(g[12:], "CURVE") })[:32], `"CURVE"`},
		"no handshake":         {joined(ourGreeting[:], short(0, "m")), "READY"},
		"another command":      {joined(ourGreeting[:], short(flagCommand, "\x05ERROR\x00")), "READY"},
		"a SUB socket":         {joined(ourGreeting[:], short(flagCommand, "\x05READY"+property("socket-type", "SUB"))), `"SUB"`},
		"no type":              {joined(ourGreeting[:], short(flagCommand, "\x05READY")), `""`},
		"properties cut short": {joined(ourGreeting[:], short(flagCommand, "\x05READY\x0bSocket-Type\x00\x00\x00\x09PUSH")), "READY"},
		"a name without value": {joined(ourGreeting[:], short(flagCommand, "\x05READY\x0bSocket-Type")), "READY"},
		"reserved bits":        {joined(handshakeBytes(), []byte{8, 0}), "reserved"},
		"a command with more":  {joined(handshakeBytes(), []byte{flagCommand | flagMore, 0}), "reserved"},
		"a nameless command":   {joined(handshakeBytes(), short(flagCommand, "\x09PING")), "no name"},
		"an empty command":     {joined(handshakeBytes(), short(flagCommand, "")), "no name"},
		"a PING too short":     {joined(handshakeBytes(), short(flagCommand, "\x04PING\x00")), "PING of 1 bytes"},
		"a PING too long":      {joined(handshakeBytes(), short(flagCommand, "\x04PING"+strings.Repeat("x", 19))), "PING of 19 bytes"},
		"too long":             {joined(handshakeBytes(), long(0, strings.Repeat("x", testMaxFrame+1))[:longHead]), "a frame of 1001 bytes; want at most 1000"},
		"far too long":         {joined(handshakeBytes(), []byte{flagLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}), "a frame of 18446744073709551615 bytes"},
		"too long with more":   {joined(handshakeBytes(), long(flagMore, strings.Repeat("x", testMaxFrame+1))[:longHead]), "a frame of 1001 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			if h := runSession(t, k.input); h.err == nil || !strings.Contains(h.err.Error(), k.want) || len(h.messages) > 0 {
				t.Errorf("%v, %d messages; want %q", h.err, len(h.messages), k.want)
			}
		})
	}
}

// A message costs no allocation.
func TestSessionDoesNotAllocate(t *testing.T) {
	seen := 0
	s := &session{maxFrame: testMaxFrame, onMessage: func([]byte) { seen++ }, onMultipart: func() {}, send: func([]byte) error { return nil }}
	feed := func(p []byte) {
		if err := s.advance(copy(s.free(), p)); err != nil {
			t.Fatal(err)
		}
	}
	feed(handshakeBytes())
	report := short(0, strings.Repeat("r", 100))
	if n := testing.AllocsPerRun(1000, func() { feed(report) }); n != 0 || seen < 1000 {
		t.Errorf("%v allocations a message, %d seen", n, seen)
	}
}

// However the bytes are cut, a session makes the same of them, within its bounds.
func FuzzSession(f *testing.F) {
	f.Add(joined(handshakeBytes(), short(0, "m"), short(flagMore, "a"), short(0, "b"), short(flagCommand, "\x04PING\x00\x10ctx")), uint8(3), uint8(70))
	f.Add(joined(handshakeBytes(), long(0, strings.Repeat("x", testMaxFrame)), long(0, "y")), uint8(200), uint8(1))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), uint8(1), uint8(1))
	f.Add(joined(ourGreeting[:], short(flagCommand, "\x05READY"+property("Socket-Type", "DEALER"))), uint8(64), uint8(2))
	f.Fuzz(func(t *testing.T, input []byte, a, b uint8) {
		whole := runSession(t, input)
		var pieces [][]byte
		for rest, i := input, 0; len(rest) > 0; i++ {
			n := min(len(rest), 1+int([]uint8{a, b}[i%2]))
			pieces, rest = append(pieces, rest[:n]), rest[n:]
		}
		cut := runSession(t, pieces...)
		if fmt.Sprintf("%q %d %q %v", whole.messages, whole.parts, whole.answers, whole.err) != fmt.Sprintf("%q %d %q %v", cut.messages, cut.parts, cut.answers, cut.err) {
			t.Errorf("whole: %+v\ncut: %+v", whole, cut)
		}
		// Parsed messages, written again, parse to the same result.
		again := [][]byte{handshakeBytes()}
		for _, m := range whole.messages {
			again = append(again, long(0, m))
		}
		if h := runSession(t, again...); h.err != nil || !slices.Equal(h.messages, whole.messages) {
			t.Errorf("said again: %v", h)
		}
	})
}
