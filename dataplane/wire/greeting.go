package wire

import (
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// protocolName stands in every HELLO, so that a program that is not a client gets a clear error.
const protocolName = "sluice-routed"

// maxHello bounds the first frame, which comes before authentication.
const maxHello = 4 << 10

// greeting is the payload of HELLO and WELCOME. Each side omits the members of the other.
type greeting struct {
	protocol string
	version  uint64 // HELLO: newest version of the client; WELCOME: the version in use
	oldest   uint64 // HELLO: oldest version of the client
	token    string
	key      string // HELLO: the caller's API key
	agent    string
	window   uint64 // HELLO: bytes of items that each stream may get before its first CREDIT

	maxFrame    uint64 // WELCOME: largest payload that the server accepts
	maxStreams  uint64
	heartbeatMS uint64 // after this long without a frame either side sends PING, and after three times as long it closes
}

// member is a member of a greeting: a text or a number.
type member struct {
	name   string
	text   *string
	number *uint64
}

// members returns all members of a greeting. Zero members are not written.
func (g *greeting) members() [10]member {
	return [...]member{
		{"protocol", &g.protocol, nil}, {"version", nil, &g.version}, {"oldest", nil, &g.oldest}, {"token", &g.token, nil}, {"key", &g.key, nil},
		{"agent", &g.agent, nil}, {"window", nil, &g.window}, {"max_frame", nil, &g.maxFrame}, {"max_streams", nil, &g.maxStreams}, {"heartbeat_ms", nil, &g.heartbeatMS},
	}
}

func (g *greeting) append(dst []byte) []byte {
	at, n := len(dst), uint32(0)
	dst = append(dst, 0xde, 0, 0) // a map of up to 65535 members, counted below
	for _, m := range g.members() {
		switch {
		case m.text != nil && *m.text != "":
			dst = msgp.AppendString(msgp.AppendString(dst, m.name), *m.text)
		case m.number != nil && *m.number != 0:
			dst = msgp.AppendUint64(msgp.AppendString(dst, m.name), *m.number)
		default:
			continue
		}
		n++
	}
	dst[at+1], dst[at+2] = byte(n>>8), byte(n)
	return dst
}

// read parses a greeting. Unknown members are skipped.
func (g *greeting) read(b []byte) error {
	known := g.members()
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return fmt.Errorf("want a map: %w", err)
	}
	for ; n > 0; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return fmt.Errorf("want names as keys: %w", err)
		}
		switch i := slices.IndexFunc(known[:], func(m member) bool { return m.name == string(key) }); {
		case i < 0:
			b, err = msgp.Skip(b)
		case known[i].text != nil:
			*known[i].text, b, err = msgp.ReadStringBytes(b)
		default:
			*known[i].number, b, err = msgp.ReadUint64Bytes(b)
		}
		if err != nil {
			return fmt.Errorf("member %.40q: %w", key, err)
		}
	}
	return nil
}

// appendError appends the payload {code, message}.
func appendError(dst []byte, e *Error) []byte {
	dst = msgp.AppendMapHeader(dst, 2)
	dst = msgp.AppendString(msgp.AppendString(dst, "code"), e.Code)
	return msgp.AppendString(msgp.AppendString(dst, "message"), e.Message)
}

// readError parses that payload; nil for an empty one.
func readError(b []byte) *Error {
	if len(b) == 0 {
		return nil
	}
	e := &Error{Code: CodeInternal}
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			break
		}
		switch string(key) {
		case "code":
			e.Code, b, err = msgp.ReadStringBytes(b)
		case "message":
			e.Message, b, err = msgp.ReadStringBytes(b)
		default:
			b, err = msgp.Skip(b)
		}
	}
	if err != nil {
		return &Error{CodeProtocol, "cannot parse an error: " + err.Error()}
	}
	return e
}
