package wire

import (
	"encoding/binary"
	"fmt"
)

// Version is the newest version of the protocol spoken here, and the only one.
const Version = 1

// headerSize is what stands before a frame's payload: the payload's length
// (4 bytes), the kind (1) and the stream (4), numbers big-endian.
const headerSize = 9

// Kind of a frame.
type Kind uint8

// The kinds. C: sent by clients, S: by the server.
const (
	Hello   Kind = 1  // C, stream 0: a map; the first frame of a connection
	Welcome Kind = 2  // S, stream 0: a map; the answer to it
	Request Kind = 3  // C: opens a stream; ids rise
	Item    Kind = 4  // S: one item of a stream's answer
	End     Kind = 5  // S: the stream is over; empty, or a map {code, message}
	Credit  Kind = 6  // C: 4 bytes: so many more bytes of items may be sent
	Stop    Kind = 7  // C: finish the stream cleanly
	Kill    Kind = 8  // C: end the stream now
	Ping    Kind = 9  // both, stream 0: up to 64 bytes
	Pong    Kind = 10 // both, stream 0: the ping's bytes
	Goaway  Kind = 11 // S, stream 0: no new streams, those open go on; a map {code, message}
	Fail    Kind = 12 // both, stream 0: why the sender closes the connection; a map {code, message}
)

var kindNames = [...]string{"kind 0", "HELLO", "WELCOME", "REQUEST", "ITEM", "END", "CREDIT", "STOP", "KILL", "PING", "PONG", "GOAWAY", "ERROR"}

// String gives the kind's name as it stands in docs/wire.md.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// maxPing bounds a ping's payload.
const maxPing = 64

// header is a frame's.
type header struct {
	size   int // of the payload
	kind   Kind
	stream uint32
}

// readHeader reads the header at the beginning of p; ok is false when p is too
// short for one.
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

// appendFrame appends a whole frame.
func appendFrame(dst []byte, k Kind, stream uint32, payload []byte) []byte {
	return append(appendHeader(dst, k, stream, len(payload)), payload...)
}

// Error is why a connection or a stream was ended, as it stands in END, GOAWAY
// and ERROR frames.
type Error struct {
	Code    string // one of the Code constants
	Message string
}

// Error implements error.
func (e *Error) Error() string { return "wire: " + e.Code + ": " + e.Message }

// The codes of Error.
const (
	CodeProtocol    = "protocol"         // a frame that must not be, or not there
	CodeVersion     = "version"          // no version in common
	CodeUnauthorize = "unauthorized"     // no token, or a wrong one
	CodeTooLarge    = "too_large"        // a frame over the limit
	CodeStreams     = "too_many_streams" // on one connection
	CodeConnections = "too_many_connections"
	CodeMemory      = "memory_budget"  // for requests' payloads
	CodeDraining    = "draining"       // the router is shutting down
	CodeKilled      = "killed"         // by a KILL of the caller
	CodeStalled     = "client_stalled" // the caller took nothing for too long
	CodeDeadline    = "deadline"       // the request's time is over, and no credit is left to say so by an item
	CodeHeartbeat   = "heartbeat"      // nothing was heard of the other end
	CodeInternal    = "internal"
)
