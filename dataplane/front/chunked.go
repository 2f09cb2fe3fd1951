package front

import (
	"errors"
	"fmt"
	"io"
)

const (
	// A chunk's size has at most so many digits, leading zeros among them: no sum of it
	// with anything overflows, here or at a proxy that counts in 64 bits.
	maxSizeDigits = 15
	// An extension says nothing to us and is passed over, as RFC 9112, 7.1.1, asks; those that
	// are in use (signatures of chunks) have 81 bytes.
	maxExtensionBytes = 256
	// The framing of a body, its sizes, extensions and line ends, may have so much: framingBase,
	// as many bytes as the body, and framingStep for each chunk: its size and two line ends.
	framingBase = 16 << 10
	framingStep = 8
	// maxTrailerName is how much of a trailer's name is kept: longer ones are no field we know.
	maxTrailerName = 80
)

// chunkedReader reads the payload of a body of transfer coding chunked (RFC 9112, 7.1). It takes
// CRLF for a line end and nothing else, and of src not a byte that is not the body's for
// sure. So what comes behind the body lies where the framing says, to us as to any proxy in
// front, and the connection may serve another request.
//
// It is stricter than upstream.Chunks, which passes on what engines send: no white space
// behind a size. Its errors are for the client, and repeat a few bytes of what it sent.
type chunkedReader struct {
	src          io.Reader
	limit        int64 // of the payload
	maxTrailers  int64 // of all trailers
	read         int64 // payload that was given
	chunks       int64 // chunks that have begun
	framingBytes int64 // bytes of framing, but for trailers
	size         int64 // of this chunk
	remaining    int64 // of it
	lineBytes    int64 // digits of this size, bytes of this extension or of all trailers
	nameLen      int   // of name
	state        chunkState
	buffered     [5]byte              // read from src
	name         [maxTrailerName]byte // of this trailer; the digits of this size
}

type chunkState uint8

const (
	chunkSize    chunkState = iota // at or in a size's digits
	chunkExt                       // behind the semicolon
	chunkSizeLF                    // behind the CR of a size line
	chunkData                      // left bytes of payload
	chunkDataCR                    // behind them
	chunkDataLF                    // behind their CR
	trailerStart                   // at the beginning of a trailer or of the last line
	trailerKey                     // in a trailer's name
	trailerValue                   // behind its colon
	trailerLF                      // behind its CR
	chunkLastLF                    // behind the CR of the last line
	chunkDone
)

// minFraming is how many bytes of framing come in a state before any of the payload, at least: so
// many can be read without one that is not the framing's.
var minFraming = [...]int{
	chunkSize:    len("\r\n"),
	chunkExt:     len("\r\n"),
	chunkSizeLF:  len("\n"),
	chunkDataCR:  len("\r\n0\r\n"),
	chunkDataLF:  len("\n0\r\n"),
	trailerStart: len("\r\n"),
	trailerKey:   len(":\r\n\r\n"),
	trailerValue: len("\r\n\r\n"),
	trailerLF:    len("\n\r\n"),
	chunkLastLF:  len("\n"),
}

var (
	errBodyTooLarge = errors.New("a chunk goes beyond the limit of the body")
	errFraming      = errors.New("the framing of its chunks (sizes, extensions) is larger than 16 KiB, " +
		"8 bytes for each and the body itself")
	errTrailers = errors.New("its trailers are no well-formed header lines: " +
		"each must be a name, a colon and a value without control characters, and end with CRLF")
)

// reset makes c ready for a body that comes from src, with trailers of at most most bytes.
func (c *chunkedReader) reset(src io.Reader, maxTrailers int64) {
	c.src, c.maxTrailers = src, maxTrailers
	c.read, c.chunks, c.framingBytes, c.remaining, c.lineBytes, c.state = 0, 0, 0, 0, 0, chunkSize
}

// Read fills p, or gives the rest of the body with io.EOF; what comes behind p's last byte
// before the next of the payload it takes as well, so that a body which just fits ends in
// it. With errBodyTooLarge nothing of the chunk at fault has been taken, and a higher limit
// lets it come. No other error can be gone on from.
func (c *chunkedReader) Read(p []byte) (n int, err error) {
	for {
		var got int
		switch c.state {
		case chunkDone:
			return n, io.EOF
		case chunkData:
			switch {
			case c.remaining > c.limit-c.read:
				return n, errBodyTooLarge
			case n == len(p):
				return n, nil
			}
			got, err = c.src.Read(p[n:min(int64(len(p)), int64(n)+c.remaining)])
			n += got
			c.read += int64(got)
			if c.remaining -= int64(got); c.remaining == 0 {
				c.state = chunkDataCR
			}
		default:
			got, err = c.src.Read(c.buffered[:minFraming[c.state]])
			if failed := c.parseFraming(c.buffered[:got]); failed != nil {
				return n, failed
			}
		}
		switch {
		case err == nil || c.state == chunkDone: // what failed behind the body is the next request's
		case err == io.EOF:
			return n, io.ErrUnexpectedEOF
		default:
			return n, err
		}
	}
}

// parseFraming takes bytes of framing.
func (c *chunkedReader) parseFraming(p []byte) error {
	for _, b := range p {
		if c.state < trailerStart {
			c.framingBytes++
		}
		switch c.state {
		case chunkSize:
			d := hexDigit(b)
			switch {
			case d < 16 && c.lineBytes < maxSizeDigits:
				c.name[c.lineBytes] = b
				c.lineBytes++
				c.remaining = c.remaining<<4 | int64(d)
			case b == '\r' && c.lineBytes > 0:
				c.state = chunkSizeLF
			case b == ';' && c.lineBytes > 0:
				c.state, c.lineBytes = chunkExt, 1
			default:
				return fmt.Errorf("a chunk's size must be 1 to %d hexadecimal digits with CRLF, "+
					"or a semicolon and an extension, right behind them, got %q", maxSizeDigits, append(c.name[:c.lineBytes:c.lineBytes], b))
			}
		case chunkExt:
			switch c.lineBytes++; {
			case b == '\r':
				c.state = chunkSizeLF
			case b < ' ' && b != '\t' || b == 0x7f:
				return fmt.Errorf("a chunk's extension must not hold control characters and must end with CRLF, got %q", b)
			case c.lineBytes > maxExtensionBytes:
				return fmt.Errorf("a chunk's extension must not be larger than %d bytes", maxExtensionBytes)
			}
		case chunkSizeLF:
			if b != '\n' {
				return fmt.Errorf("a chunk's size must end with CRLF, got %q", []byte{'\r', b})
			}
			c.size, c.lineBytes, c.state = c.remaining, 0, chunkData
			if c.size == 0 {
				c.state = trailerStart
				continue
			}
			if c.chunks++; c.framingBytes > framingBase+c.read+framingStep*c.chunks {
				return errFraming
			}
		case chunkDataCR:
			if b != '\r' {
				return fmt.Errorf("the %d bytes of a chunk must be followed by CRLF, got %q", c.size, []byte{b})
			}
			c.state = chunkDataLF
		case chunkDataLF:
			if b != '\n' {
				return fmt.Errorf("the %d bytes of a chunk must be followed by CRLF, got %q", c.size, []byte{'\r', b})
			}
			c.state = chunkSize
		default:
			if err := c.parseTrailer(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// parseTrailer takes a byte behind the last chunk. Trailers go nowhere; those are refused that
// are not for a reader of the lines, and might be taken for a part of the head.
func (c *chunkedReader) parseTrailer(b byte) error {
	if c.lineBytes++; c.lineBytes > c.maxTrailers {
		return fmt.Errorf("its trailers are larger than %d bytes", c.maxTrailers)
	}
	switch c.state {
	case trailerStart, trailerKey:
		switch {
		case c.state == trailerStart && b == '\r':
			c.state = chunkLastLF
		case c.state == trailerKey && b == ':':
			if name := c.name[:c.nameLen]; forbiddenTrailer(name) {
				return fmt.Errorf("a trailer must not be a field that belongs in the head, as %s does", name)
			}
			c.state = trailerValue
		case !tokenByte[b]:
			return errTrailers
		default:
			if c.state == trailerStart {
				c.state, c.nameLen = trailerKey, 0
			}
			c.nameLen += copy(c.name[c.nameLen:], []byte{b})
		}
	case trailerValue:
		switch {
		case b == '\r':
			c.state = trailerLF
		case b < ' ' && b != '\t' || b == 0x7f:
			return errTrailers
		}
	default:
		if b != '\n' {
			return errTrailers
		}
		if c.state == chunkLastLF {
			c.state = chunkDone
			break
		}
		c.state = trailerStart
	}
	return nil
}

// forbiddenTrailer says whether a field is none for trailers (RFC 9110, 6.5.1): it frames or
// routes the message, says who sends it, or tells how to read it.
func forbiddenTrailer(name []byte) bool {
	for _, prefix := range [...]string{"X-Forwarded", "X-Real-IP"} {
		if len(name) >= len(prefix) && equalFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	for _, field := range [...]string{
		"Authorization", "Connection", "Content-Encoding", "Content-Length", "Content-Range", "Content-Type", "Cookie",
		"Expect", "Host", "Keep-Alive", "Location", "Max-Forwards", "Proxy-Authenticate", "Proxy-Authorization",
		"Proxy-Connection", "Range", "Set-Cookie", "TE", "Trailer", "Transfer-Encoding", "WWW-Authenticate",
	} {
		if equalFold(name, field) {
			return true
		}
	}
	return false
}

func hexDigit(b byte) byte {
	switch {
	case '0' <= b && b <= '9':
		return b - '0'
	case 'a' <= b|0x20 && b|0x20 <= 'f':
		return b | 0x20 - 'a' + 10
	}
	return 0xff
}
