package upstream

import "slices"

// Bounds of chunk framing.
const (
	maxChunkLine    = 256     // bytes of extensions in one chunk-size line
	maxTrailerBytes = 8 << 10 // bytes of all trailer lines
	maxChunkDigits  = 16
	maxChunkSize    = 1 << 62
)

// Chunks finds the payload and the end of a body in transfer coding chunked. Its input may be cut
// anywhere. It is strict, because the bytes go to clients unchanged and lenient spellings are
// parsed differently by different clients: CRLF only, at most 16 hex digits of size, no white space
// around them, extensions and trailers bounded and skipped. A trailer that RFC 9110, 6.5.1, forbids
// is an error, because a client could take it for a header. The zero value is at the beginning of a
// body.
type Chunks struct {
	remaining int64 // payload bytes left in this chunk; in a trailer's name its hash
	lineLen   int32 // bytes of the present line, or of all trailers
	state     chunkState
}

type chunkState uint8

const (
	chunkSize      chunkState = iota // before or in the hex digits
	chunkExt                         // after the semicolon
	chunkSizeLF                      // after the CR of the size line
	chunkData                        // remaining bytes of payload
	chunkDataCR                      // after the payload
	chunkDataLF                      // after its CR
	trailerStart                     // at the beginning of a trailer line
	trailerName                      // in a trailer's name
	trailerLine                      // after the colon
	trailerLF                        // after its CR
	chunkEndLF                       // after the CR of the last, empty line
	chunkDone                        // after the body
	chunkNoDigits  = "chunk size %q: want hex digits"
	chunkNotCRLF   = "byte %q where a chunk line must end with CRLF"
	chunkTooLong   = "a chunk line or trailer over its bound"
	chunkTooBig    = "a chunk size beyond 2^62"
	chunkBadByte   = "control byte %q in a chunk line"
	chunkBadFolded = "a trailer line that begins with %q"
	chunkBadName   = "byte %q in a trailer's name"
	chunkForbidden = "a trailer that only a head may have"
)

// Next consumes p up to and including the next piece of payload. It returns how many bytes were
// consumed, and the payload among them (a part of p; nil: p held only framing). It is called until
// p is consumed or Done. On an error n is the number of well-framed bytes, and the state is the one
// after them.
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
		case chunkDone:
			return n, nil, nil
		default:
			if err := c.nextTrailerByte(b); err != nil {
				return n, nil, err
			}
		}
		n++
	}
	return n, nil, nil
}

// nextTrailerByte is Next for one byte after the last chunk: of the trailers, or of the CRLF that
// ends the body.
func (c *Chunks) nextTrailerByte(b byte) error {
	switch c.state {
	case trailerStart:
		switch {
		case b == '\r':
			c.state = chunkEndLF
		case byteClass[b]&tokenByte == 0:
			return protocolError(chunkBadFolded, b)
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
			return protocolError(chunkBadName, b)
		case slices.Contains(forbiddenTrailers, uint64(c.remaining)):
			return protocolError(chunkForbidden)
		default:
			c.remaining, c.state = 0, trailerLine
		}
		if c.lineLen++; c.lineLen > maxTrailerBytes {
			return protocolError(chunkTooLong)
		}
	case trailerLine:
		switch {
		case b == '\r':
			c.state = trailerLF
		case byteClass[b]&valueByte == 0:
			return protocolError(chunkBadByte, b)
		}
		if c.lineLen++; c.lineLen > maxTrailerBytes {
			return protocolError(chunkTooLong)
		}
	case trailerLF, chunkEndLF:
		if b != '\n' {
			return protocolError(chunkNotCRLF, b)
		}
		if c.state == chunkEndLF {
			c.state = chunkDone
			return nil
		}
		c.state = trailerStart
	}
	return nil
}

// forbiddenTrailers are hashes of the names of fields about framing, forwarding, authentication or
// encoding, or that change what a client stores.
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

// nameHash is the initial value of the hash of a name: FNV-1a, case-insensitive.
const nameHash = 14695981039346656037

func hashName(hash uint64, b byte) uint64 {
	if 'A' <= b && b <= 'Z' {
		b |= 0x20
	}
	return (hash ^ uint64(b)) * 1099511628211
}

// Done reports whether the body's last byte has been consumed.
func (c *Chunks) Done() bool { return c.state == chunkDone }

// Last reports whether at least the size line of the last, empty chunk has been consumed.
func (c *Chunks) Last() bool { return c.state >= trailerStart }

// InChunk reports whether a chunk has begun, if only its size line, and its payload has not ended.
func (c *Chunks) InChunk() bool { return c.state == chunkData || c.state < chunkData && c.lineLen > 0 }

// SizeDigits returns the number of digits of an unfinished chunk size. The bytes that follow may
// make it invalid.
func (c *Chunks) SizeDigits() int {
	if c.state != chunkSize {
		return 0
	}
	return int(c.lineLen)
}

// Boundary reports whether a new chunk may begin here, and what must be written before it: the rest
// of the CRLF after the last payload.
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

// InTrailers reports whether only trailers and the final CRLF are missing, and returns what ends
// the body.
func (c *Chunks) InTrailers() (missing string, ok bool) {
	switch c.state {
	case trailerStart:
		return "\r\n", true
	case chunkEndLF:
		return "\n", true
	}
	return "", false
}

// Remaining returns how much payload of the present chunk comes before any framing.
func (c *Chunks) Remaining() int64 {
	if c.state == chunkData {
		return c.remaining
	}
	return 0
}

// consumed advances the state by n bytes of payload that were read without Next.
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
