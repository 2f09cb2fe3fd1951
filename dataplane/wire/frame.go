package wire

import (
	"encoding/binary"
	"fmt"
)

// Version is the only supported version of the protocol.
const Version = 1

// headerSize is the size of a frame's header: the length of the payload (4 bytes), the kind (1) and
// the stream (4). Numbers are big-endian.
const headerSize = 9

// Kind is the kind of a frame.
type Kind uint8

// The kinds. C: sent by clients, S: by the server.
const (
	Hello   Kind = 1  // C, stream 0: a map; the first frame of a connection
	Welcome Kind = 2  // S, stream 0: a map; the answer to it
	Request Kind = 3  // C: opens a stream; ids increase
	Item    Kind = 4  // S: one item of a stream's answer
	End     Kind = 5  // S: the stream is over; empty, or a map {code, message}
	Credit  Kind = 6  // C: 4 bytes: this many more bytes of items may be sent
	Stop    Kind = 7  // C: finish the stream cleanly
	Kill    Kind = 8  // C: end the stream now
	Ping    Kind = 9  // both, stream 0: up to 64 bytes
	Pong    Kind = 10 // both, stream 0: the ping's bytes
	Goaway  Kind = 11 // S, stream 0: no new streams, open ones continue; a map {code, message}
	Fail    Kind = 12 // both, stream 0: why the sender closes the connection; a map {code, message}
)

var kindNames = [...]string{"kind 0", "HELLO", "WELCOME", "REQUEST", "ITEM", "END", "CREDIT", "STOP", "KILL", "PING", "PONG", "GOAWAY", "ERROR"}

// String returns the kind's name in docs/wire.md.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// maxPing bounds the payload of a PING, in bytes.
const maxPing = 64

// header is the header of a frame.
type header struct {
	size   int // of the payload
	kind   Kind
	stream uint32
}

// readHeader parses the header at the beginning of p; ok is false if p is too short.
func readHeader(p []byte) (h header, ok bool) {
	if len(p) < headerSize {
		return h, false
	}
	return header{
		size: int(binary.BigEndian.Uint32(p)), kind: Kind(p[4]), stream: binary.BigEndian.Uint32(p[5:]),
	}, true
}

// appendHeader appends the header of a frame whose payload has size bytes.
func appendHeader(dst []byte, k Kind, stream uint32, size int) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(size))
	dst = append(dst, byte(k))
	return binary.BigEndian.AppendUint32(dst, stream)
}

// appendFrame appends a complete frame.
func appendFrame(dst []byte, k Kind, stream uint32, payload []byte) []byte {
	return append(appendHeader(dst, k, stream, len(payload)), payload...)
}

// Error is why a connection or stream was ended, as sent in END, GOAWAY and ERROR frames.
type Error struct {
	Code    string // one of the Code constants
	Message string
}

// Error implements error.
func (e *Error) Error() string { return "wire: " + e.Code + ": " + e.Message }

// The codes of Error.
const (
	CodeProtocol    = "protocol"         // an invalid frame, or one out of place
	CodeVersion     = "version"          // no common version
	CodeUnauthorize = "unauthorized"     // no token, or a wrong one
	CodeTooLarge    = "too_large"        // a frame over the limit
	CodeStreams     = "too_many_streams" // too many open on one connection
	CodeConnections = "too_many_connections"
	CodeMemory      = "memory_budget"  // no memory for requests' payloads
	CodeDraining    = "draining"       // the router is shutting down
	CodeKilled      = "killed"         // by a KILL of the caller
	CodeStalled     = "client_stalled" // the caller read nothing for too long
	CodeDeadline    = "deadline"       // the request's deadline has passed, and there is no credit for an item that says so
	CodeHeartbeat   = "heartbeat"      // the other end was silent for too long
	CodeInternal    = "internal"
)
