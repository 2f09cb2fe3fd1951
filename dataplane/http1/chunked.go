package http1

import (
	"errors"
	"fmt"
	"io"

	"sluice/dataplane/ascii"
)

const (
	// maxSizeDigits bounds the digits of a chunk's size, including leading zeros, so that no
	// sum with the size overflows, here or in a proxy that counts in 64 bits.
	maxSizeDigits = 15
	// maxExtensionBytes bounds a chunk extension. The reader ignores extensions, as RFC 9112,
	// 7.1.1, requires. Those in use (signatures of chunks) have 81 bytes.
	maxExtensionBytes = 256
	// The framing of a body (sizes, extensions and line ends) may have at most framingBase
	// bytes, plus as many as the payload, plus framingStep for the size and the two line ends
	// of each chunk.
	framingBase = 16 << 10
	framingStep = 8
	// maxTrailerName is how many bytes of a trailer's name are kept. forbiddenTrailer knows no
	// longer name.
	maxTrailerName = 80
)

// ChunkedReader reads the payload of a request body with transfer coding chunked (RFC 9112,
// 7.1). It accepts only CRLF as a line end, and never reads a byte of src behind the body.
// Thus the server and a proxy in front agree on where the body ends, and the connection can
// serve another request.
//
// ChunkedReader is stricter than upstream.Chunks, which passes on what engines send: it accepts
// no white space behind a size. Its errors are meant for the client and quote a few bytes of
// its input.
type ChunkedReader struct {
	Src          io.Reader
	Limit        int64 // of the payload
	maxTrailers  int64 // of all trailers
	read         int64 // payload bytes that Read has returned
	chunks       int64 // chunks that have begun
	framingBytes int64 // bytes of framing, without trailers
	size         int64 // of the current chunk
	remaining    int64 // unread bytes of the current chunk
	lineBytes    int64 // digits of the current size, bytes of the current extension, or bytes of all trailers
	nameLen      int   // of name
	state        chunkState
	buffered     [5]byte              // Parse from src
	name         [maxTrailerName]byte // name of the current trailer, or digits of the current size
}

// chunkState is the position of a ChunkedReader in the framing.
type chunkState uint8

const (
	chunkSize    chunkState = iota // at or in a size's digits
	chunkExt                       // behind the semicolon
	chunkSizeLF                    // behind the CR of a size line
	chunkData                      // in the payload of a chunk
	chunkDataCR                    // behind the payload
	chunkDataLF                    // behind the CR that follows the payload
	trailerStart                   // at the beginning of a trailer or of the last line
	trailerKey                     // in a trailer's name
	trailerValue                   // behind the colon of a trailer
	trailerLF                      // behind the CR of a trailer
	chunkLastLF                    // behind the CR of the last line
	chunkDone
)

// minFraming is, by state, the least number of framing bytes that precede the next payload byte
// or the end of the body. The reader can read that many without reading anything else.
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
	// ErrBodyTooLarge is returned when the chunked body exceeds the size limit.
	ErrBodyTooLarge = errors.New("the chunked body exceeds the size limit")
	errFraming      = errors.New("the framing of its chunks (sizes, extensions) is larger than 16 KiB, " +
		"8 bytes for each and the body itself")
	errTrailers = errors.New("its trailers are not well-formed header lines: " +
		"each must be a name, a colon and a value without control characters, and end with CRLF")
)

// Reset prepares c for a body from src whose trailers have at most maxTrailers bytes in all.
func (c *ChunkedReader) Reset(src io.Reader, maxTrailers int64) {
	c.Src, c.maxTrailers = src, maxTrailers
	c.read, c.chunks, c.framingBytes, c.remaining, c.lineBytes, c.state = 0, 0, 0, 0, 0, chunkSize
}

// Read fills p, or returns the rest of the body with io.EOF. It also reads the framing behind
// the last byte of p, so that a body that just fits into p ends with io.EOF. After
// ErrBodyTooLarge it has read nothing of the chunk that is too large, and the caller may raise
// the limit and go on. All other errors are final.
func (c *ChunkedReader) Read(p []byte) (n int, err error) {
	for {
		var got int
		switch c.state {
		case chunkDone:
			return n, io.EOF
		case chunkData:
			switch {
			case c.remaining > c.Limit-c.read:
				return n, ErrBodyTooLarge
			case n == len(p):
				return n, nil
			}
			got, err = c.Src.Read(p[n:min(int64(len(p)), int64(n)+c.remaining)])
			n += got
			c.read += int64(got)
			if c.remaining -= int64(got); c.remaining == 0 {
				c.state = chunkDataCR
			}
		default:
			got, err = c.Src.Read(c.buffered[:minFraming[c.state]])
			if failed := c.parseFraming(c.buffered[:got]); failed != nil {
				return n, failed
			}
		}
		switch {
		case err == nil || c.state == chunkDone: // the next request's read reports an error behind the body
		case err == io.EOF:
			return n, io.ErrUnexpectedEOF
		default:
			return n, err
		}
	}
}

// parseFraming parses framing bytes, and changes the state with each of them.
func (c *ChunkedReader) parseFraming(p []byte) error {
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

// parseTrailer parses a byte behind the last chunk. The router forwards no trailers. It refuses
// malformed ones, and fields that another reader might treat as a part of the head.
func (c *ChunkedReader) parseTrailer(b byte) error {
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

// forbiddenTrailer reports whether a field must not be a trailer (RFC 9110, 6.5.1), because it
// frames or routes the message, authenticates or identifies the sender, or describes the
// content.
func forbiddenTrailer(name []byte) bool {
	for _, prefix := range [...]string{"X-Forwarded", "X-Real-IP"} {
		if len(name) >= len(prefix) && ascii.EqualFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	for _, field := range [...]string{
		"Authorization", "Connection", "Content-Encoding", "Content-Length", "Content-Range", "Content-Type", "Cookie",
		"Expect", "Host", "Keep-Alive", "Location", "Max-Forwards", "Proxy-Authenticate", "Proxy-Authorization",
		"Proxy-Connection", "Range", "Set-Cookie", "TE", "Trailer", "Transfer-Encoding", "WWW-Authenticate",
	} {
		if ascii.EqualFold(name, field) {
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
