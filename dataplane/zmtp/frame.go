package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// The greeting (RFC 23): a signature of 10 bytes, the version in 2, the mechanism in 20 padded with
// NUL, as-server in 1, and 31 bytes of NUL.
const (
	greetingBytes = 64
	mechanismAt   = 12
	mechanismEnd  = 32
)

// ourGreeting is the greeting sent to peers. It announces ZMTP 3.1, so that peers may send
// heartbeats.
var ourGreeting = func() (g [greetingBytes]byte) {
	g[0], g[8], g[9], g[10], g[11] = 0xff, 1, 0x7f, 3, 1
	copy(g[mechanismAt:], mechanism)
	return g
}()

const mechanism = "NULL"

// Faults of a peer. The connection is closed and the text is logged.
var (
	errNotZMTP   = errors.New("the peer does not speak ZMTP")
	errOld       = errors.New("the peer speaks ZMTP 2 or older; want libzmq 4.0 or later")
	errReserved  = errors.New("a frame has reserved bits set")
	errHandshake = errors.New("the peer's handshake is not a READY command")
	errCommand   = errors.New("a command has no name")
)

// checkGreeting checks as much of a peer's greeting as has been received.
func checkGreeting(p []byte) error {
	if len(p) > 0 && p[0] != 0xff || len(p) > 9 && p[9] != 0x7f {
		return errNotZMTP
	}
	if len(p) > 10 && p[10] < 3 {
		return errOld
	}
	if len(p) >= mechanismEnd {
		m := bytes.TrimRight(p[mechanismAt:mechanismEnd], "\x00")
		if string(m) != mechanism {
			return fmt.Errorf("the peer's security mechanism is %q; want %s", m, mechanism)
		}
	}
	return nil
}

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	longHead = 9 // length of the header of a long frame
)

// splitFrame splits the frame at the beginning of p. need is the length of the frame with its
// header, or how many bytes are needed to determine it. body is nil until the frame is complete. A
// frame of more than most bytes is an error as soon as its header is complete.
func splitFrame(p []byte, most int) (flags byte, body []byte, need int, err error) {
	if len(p) < 2 {
		return 0, nil, 2, nil
	}
	flags = p[0]
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&(flagMore|flagCommand) == flagMore|flagCommand {
		return 0, nil, 0, errReserved
	}
	head, size := 2, uint64(p[1])
	if flags&flagLong != 0 {
		if head = longHead; len(p) < head {
			return 0, nil, head, nil
		}
		size = binary.BigEndian.Uint64(p[1:])
	}
	if size > uint64(most) {
		return 0, nil, 0, fmt.Errorf("a frame of %d bytes; want at most %d", size, most)
	}
	if need = head + int(size); len(p) < need {
		return flags, nil, need, nil
	}
	return flags, p[head:need:need], need, nil
}

// splitCommand splits the body of a command: one byte of length and the name, then the data.
func splitCommand(body []byte) (name string, data []byte, err error) {
	if len(body) == 0 || int(body[0]) > len(body)-1 || body[0] == 0 {
		return "", nil, errCommand
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:], nil
}

// readyFrame is the READY command of a PULL socket.
var readyFrame = readyOf("PULL")

// readyOf returns the READY command of a socket type.
func readyOf(kind string) []byte {
	f := append([]byte{flagCommand, 0}, "\x05READY\x0bSocket-Type\x00\x00\x00"...)
	f = append(append(f, byte(len(kind))), kind...)
	f[1] = byte(len(f) - 2)
	return f
}

// checkReady checks that a peer's first frame is the READY command of a socket of one of the wanted
// types.
func checkReady(flags byte, body []byte, wanted ...string) error {
	if flags&flagCommand == 0 {
		return errHandshake
	}
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	if name != "READY" {
		return errHandshake
	}
	kind := ""
	for len(data) > 0 { // one byte of length and the name, four of length and the value
		n := 1 + int(data[0])
		if len(data) < n+4 {
			return errHandshake
		}
		key, rest := data[1:n], data[n+4:]
		m := binary.BigEndian.Uint32(data[n:])
		if uint64(m) > uint64(len(rest)) {
			return errHandshake
		}
		if strings.EqualFold(string(key), "Socket-Type") {
			kind = string(rest[:m])
		}
		data = rest[m:]
	}
	if !slices.Contains(wanted, kind) {
		return fmt.Errorf("the peer's socket is of type %.16q; want %s", kind, strings.Join(wanted, " or "))
	}
	return nil
}

// maxContext bounds the context of a PING, which is sent back (RFC 37).
const maxContext = 16

// pong returns the answer to a PING, whose data is a time to live of two bytes and the context. The
// time to live is ignored, because TCP keep-alive finds a dead peer.
func pong(data []byte) ([]byte, error) {
	if len(data) < 2 || len(data) > 2+maxContext {
		return nil, fmt.Errorf("a PING of %d bytes; want 2 to %d", len(data), 2+maxContext)
	}
	return append([]byte{flagCommand, byte(5 + len(data) - 2), 4, 'P', 'O', 'N', 'G'}, data[2:]...), nil
}
