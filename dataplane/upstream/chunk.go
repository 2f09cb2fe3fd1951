package upstream

import "slices"

// Bounds on what chunk framing may cost beside the payload.
const (
	maxChunkLine    = 256     // extension bytes in one chunk-size line
	maxTrailerBytes = 8 << 10 // all trailer lines together
	maxChunkDigits  = 16
	maxChunkSize    = 1 << 62
)

// Chunks finds the payload and the end in a body of transfer coding chunked,
// fed in pieces cut anywhere. It is strict, since the bytes go to clients as they are
// and not all of those read a lenient spelling alike: CRLF only, at most 16 hex digits
// of size, no white space around them, extensions and trailers bounded and skipped; a
// trailer that RFC 9110, 6.5.1, keeps out of there is refused, for a client may take it
// for a header. The zero value is at the beginning of a body.
type Chunks struct {
	remaining int64 // payload bytes to come in this chunk; in a trailer's name its hash
	lineLen   int32 // bytes in the present line, or of the trailers
	state     chunkState
}

type chunkState uint8

const (
	chunkSize      chunkState = iota // at or in the hex digits
	chunkExt                         // behind the semicolon
	chunkSizeLF                      // CR of the size line seen
	chunkData                        // left bytes of payload
	chunkDataCR                      // payload over
	chunkDataLF                      // its CR seen
	trailerStart                     // at the beginning of a trailer line
	trailerName                      // in one, before the colon
	trailerLine                      // behind it
	trailerLF                        // its CR seen
	chunkEndLF                       // CR of the last, empty line seen
	chunkDone                        // nothing more belongs to the body
	chunkNoDigits  = "chunk size %q: want hex digits"
	chunkNotCRLF   = "byte %q where a chunk line must end with CRLF"
	chunkTooLong   = "a chunk line or trailer over its bound"
	chunkTooBig    = "a chunk size beyond 2^62"
	chunkBadByte   = "control byte %q in a chunk line"
	chunkBadFolded = "a trailer line that begins with %q"
	chunkBadName   = "byte %q in a trailer's name"
	chunkForbidden = "a trailer that only a head may have"
)

// Next consumes from p up to and including the next piece of payload. It
// returns how many bytes were consumed, and the payload piece in them (a part
// of p, nil when p held only framing). Call it until p is used up or Done. On
// an error, n is the count of good bytes before the bad one, and the state
// stands before it.
func (c *Chunks) Next(p []byte) (n int, payload []byte, err error) {
	for n < len(p) {
		b := p[n]
		switch c.state {
		case chunkData:
			size := int64(len(p) - n)
			if size > c.remaining {
				size = c.remaining
			}
			payload = p[n : n+int(size)]
			c.remaining -= size
			n += int(size)
			if c.remaining == 0 {
				c.state = chunkDataCR
			}
			return n, payload, nil
		case chunkSize:
			d := hexValue(b)
			switch {
			case d < 16:
				if c.lineLen == maxChunkDigits || c.remaining >= maxChunkSize>>4 {
					return n, nil, protocolError(chunkTooBig)
				}
				c.lineLen++
				c.remaining = c.remaining<<4 | int64(d)
			case c.lineLen == 0:
				return n, nil, protocolError(chunkNoDigits, b)
			case b == '\r':
				c.state = chunkSizeLF
			case b == ';':
				c.state, c.lineLen = chunkExt, 1
			default:
				return n, nil, protocolError(chunkNoDigits, b)
			}
		case chunkExt:
			switch {
			case b == '\r':
				c.state = chunkSizeLF
			case byteClass[b]&valueByte == 0:
				return n, nil, protocolError(chunkBadByte, b)
			default:
				if c.lineLen++; c.lineLen > maxChunkLine {
					return n, nil, protocolError(chunkTooLong)
				}
			}
		case chunkSizeLF:
			if b != '\n' {
				return n, nil, protocolError(chunkNotCRLF, b)
			}
			c.lineLen = 0
			c.state = chunkData
			if c.remaining == 0 {
				c.state = trailerStart
			}
		case chunkDataCR:
			if b != '\r' {
				return n, nil, protocolError(chunkNotCRLF, b)
			}
			c.state = chunkDataLF
		case chunkDataLF:
			if b != '\n' {
				return n, nil, protocolError(chunkNotCRLF, b)
			}
			c.state = chunkSize
		case trailerStart:
			switch {
			case b == '\r':
				c.state = chunkEndLF
			case byteClass[b]&tokenByte == 0:
				return n, nil, protocolError(chunkBadFolded, b)
			default:
				c.lineLen++
				c.remaining = int64(hashName(nameHash, b))
				c.state = trailerName
			}
		case trailerName:
			switch {
			case byteClass[b]&tokenByte != 0:
				c.remaining = int64(hashName(uint64(c.remaining), b))
			case b != ':':
				return n, nil, protocolError(chunkBadName, b)
			case slices.Contains(forbiddenTrailers, uint64(c.remaining)):
				return n, nil, protocolError(chunkForbidden)
			default:
				c.remaining, c.state = 0, trailerLine
			}
			if c.lineLen++; c.lineLen > maxTrailerBytes {
				return n, nil, protocolError(chunkTooLong)
			}
		case trailerLine:
			switch {
			case b == '\r':
				c.state = trailerLF
			case byteClass[b]&valueByte == 0:
				return n, nil, protocolError(chunkBadByte, b)
			}
			if c.lineLen++; c.lineLen > maxTrailerBytes {
				return n, nil, protocolError(chunkTooLong)
			}
		case trailerLF, chunkEndLF:
			if b != '\n' {
				return n, nil, protocolError(chunkNotCRLF, b)
			}
			if c.state == chunkEndLF {
				c.state = chunkDone
				return n + 1, nil, nil
			}
			c.state = trailerStart
		case chunkDone:
			return n, nil, nil
		}
		n++
	}
	return n, nil, nil
}

// forbiddenTrailers are hashes of the names of fields that say how a message is framed,
// sent on, authenticated or read, or that change what a client keeps.
var forbiddenTrailers = func() (all []uint64) {
	for _, name := range []string{
		"content-length", "transfer-encoding", "content-encoding", "content-type", "content-range", "trailer",
		"connection", "keep-alive", "te", "upgrade", "host", "expect",
		"proxy-connection", "proxy-authenticate", "proxy-authorization", "proxy-authentication-info",
		"authorization", "www-authenticate", "authentication-info", "cookie", "set-cookie",
		"cache-control", "age", "expires", "pragma", "date", "location", "retry-after", "vary",
	} {
		hash := uint64(nameHash)
		for i := range len(name) {
			hash = hashName(hash, name[i])
		}
		all = append(all, hash)
	}
	return all
}()

// nameHash is where hashName begins: FNV-1a, of a name without regard to case.
const nameHash = 14695981039346656037

func hashName(hash uint64, b byte) uint64 {
	if 'A' <= b && b <= 'Z' {
		b |= 0x20
	}
	return (hash ^ uint64(b)) * 1099511628211
}

// Done says whether the body's last byte has been consumed.
func (c *Chunks) Done() bool { return c.state == chunkDone }

// Last says whether the size line of the last, empty chunk is complete, or more.
func (c *Chunks) Last() bool { return c.state >= trailerStart }

// InChunk says whether a chunk has begun, if only its size line, and its payload not ended.
func (c *Chunks) InChunk() bool { return c.state == chunkData || c.state < chunkData && c.lineLen > 0 }

// SizeDigits is how many digits of a size were consumed of which the end was not: more may
// follow, and make it no size.
func (c *Chunks) SizeDigits() int {
	if c.state != chunkSize {
		return 0
	}
	return int(c.lineLen)
}

// Boundary says whether a new chunk may be begun here, and what must be
// written before it: the rest of the CRLF behind the last payload.
func (c *Chunks) Boundary() (missing string, ok bool) {
	switch c.state {
	case chunkSize:
		return "", c.lineLen == 0
	case chunkDataCR:
		return "\r\n", true
	case chunkDataLF:
		return "\n", true
	}
	return "", false
}

// InTrailers says whether the last, empty chunk's size line is complete and only
// trailers and the final CRLF are missing; and what would end the body.
func (c *Chunks) InTrailers() (missing string, ok bool) {
	switch c.state {
	case trailerStart:
		return "\r\n", true
	case chunkEndLF:
		return "\n", true
	}
	return "", false
}

// Remaining is how much payload comes next for sure, before any framing: of a chunk whose size
// line is complete.
func (c *Chunks) Remaining() int64 {
	if c.state == chunkData {
		return c.remaining
	}
	return 0
}

// consumed tells that n bytes of what is ahead were read around Next.
func (c *Chunks) consumed(n int) {
	if c.remaining -= int64(n); c.remaining == 0 {
		c.state = chunkDataCR
	}
}

func hexValue(b byte) byte {
	switch {
	case '0' <= b && b <= '9':
		return b - '0'
	case 'a' <= b && b <= 'f':
		return b - 'a' + 10
	case 'A' <= b && b <= 'F':
		return b - 'A' + 10
	}
	return 0xff
}
