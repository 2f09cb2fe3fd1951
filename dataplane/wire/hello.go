package wire

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// protocolName stands in every HELLO, so that what is no client of ours is told
// so and not guessed at.
const protocolName = "sluice-routed"

// maxHello bounds the first frame: before it nobody has shown a token.
const maxHello = 4 << 10

// greeting is the payload of HELLO and WELCOME; each side leaves out what is
// not its to say.
type greeting struct {
	protocol string
	version  uint64 // HELLO: newest that the client speaks; WELCOME: the one that is spoken
	oldest   uint64 // HELLO: oldest that it speaks
	token    string
	agent    string
	window   uint64 // HELLO: bytes of items that each stream may be sent before its first CREDIT

	maxFrame    uint64 // WELCOME: largest payload that the server takes
	maxStreams  uint64
	heartbeatMS uint64 // after so long without a frame either side sends PING, and after three times that it closes
}

func (g *greeting) append(dst []byte) []byte {
	at, n := len(dst), uint32(0)
	dst = append(dst, 0xde, 0, 0) // a map of up to 65535 members, counted below
	text := func(key, v string) {
		if v != "" {
			dst = msgp.AppendString(msgp.AppendString(dst, key), v)
			n++
		}
	}
	number := func(key string, v uint64) {
		if v != 0 {
			dst = msgp.AppendUint64(msgp.AppendString(dst, key), v)
			n++
		}
	}
	text("protocol", g.protocol)
	number("version", g.version)
	number("oldest", g.oldest)
	text("token", g.token)
	text("agent", g.agent)
	number("window", g.window)
	number("max_frame", g.maxFrame)
	number("max_streams", g.maxStreams)
	number("heartbeat_ms", g.heartbeatMS)
	dst[at+1], dst[at+2] = byte(n>>8), byte(n)
	return dst
}

// read reads a greeting; members that it does not know are passed over.
func (g *greeting) read(b []byte) error {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return fmt.Errorf("want a map: %w", err)
	}
	for ; n > 0; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return fmt.Errorf("want names as keys: %w", err)
		}
		name := string(key)
		var text *string
		var number *uint64
		switch name {
		case "protocol":
			text = &g.protocol
		case "token":
			text = &g.token
		case "agent":
			text = &g.agent
		case "version":
			number = &g.version
		case "oldest":
			number = &g.oldest
		case "window":
			number = &g.window
		case "max_frame":
			number = &g.maxFrame
		case "max_streams":
			number = &g.maxStreams
		case "heartbeat_ms":
			number = &g.heartbeatMS
		}
		switch {
		case text != nil:
			*text, b, err = msgp.ReadStringBytes(b)
		case number != nil:
			*number, b, err = msgp.ReadUint64Bytes(b)
		default:
			b, err = msgp.Skip(b)
		}
		if err != nil {
			return fmt.Errorf("member %q: %w", name, err)
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

// readError reads that payload; nil for an empty one.
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
		return &Error{CodeProtocol, "an error that cannot be read: " + err.Error()}
	}
	return e
}
