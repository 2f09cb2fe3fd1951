package front

import (
	"errors"
	"fmt"
	"io"
)

const (
	// A chunk's size has at most so many digits, leading zeros among them: no sum of it
	// with anything overflows, here or at a proxy that counts in 64 bits.
	sizeDigits = 15
	// An extension says nothing to us and is passed over, as RFC 9112, 7.1.1, asks; those that
	// are in use (signatures of chunks) have 81 bytes.
	extensionBytes = 256
	// The framing of a body, its sizes, extensions and line ends, may have so much: framingBase,
	// as many bytes as the body, and framingStep for each chunk: its size and two line ends.
	framingBase = 16 << 10
	framingStep = 8
	// trailerName is how much of a trailer's name is kept: longer ones are no field we know.
	trailerName = 80
)

// chunked reads the payload of a body of transfer coding chunked (RFC 9112, 7.1). It takes
// CRLF for a line end and nothing else, and of src not a byte that is not the body's for
// sure. So what comes behind the body lies where the framing says, to us as to any proxy in
// front, and the connection may serve another request.
//
// It is stricter than upstream.Chunks, which passes on what engines send: no white space
// behind a size. Its errors are for the client, and repeat a few bytes of what it sent.
type chunked struct {
	src   io.Reader
	limit int64 // of the payload
	most  int64 // of all trailers
	read  int64 // payload that was given
	count int64 // chunks that have begun
	over  int64 // bytes of framing, but for trailers
	size  int64 // of this chunk
	left  int64 // of it
	line  int64 // digits of this size, bytes of this extension or of all trailers
	named int   // of name
	state chunkState
	ahead [5]byte           // read from src
	name  [trailerName]byte // of this trailer; the digits of this size
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

// sure is how many bytes of framing come in a state before any of the payload, at least: so
// many can be read without one that is not the framing's.
var sure = [...]int{
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
	errAnnounced = errors.New("a chunk goes beyond the limit of the body")
	errFraming   = errors.New("the framing of its chunks (sizes, extensions) is larger than 16 KiB, " +
		"8 bytes for each and the body itself")
	errTrailers = errors.New("its trailers are no well-formed header lines: " +
		"each must be a name, a colon and a value without control characters, and end with CRLF")
)

// begins makes c ready for a body that comes from src, with trailers of at most most bytes.
func (c *chunked) begins(src io.Reader, most int64) {
	c.src, c.most = src, most
	c.read, c.count, c.over, c.left, c.line, c.state = 0, 0, 0, 0, 0, chunkSize
}

// Read fills p, or gives the rest of the body with io.EOF; what comes behind p's last byte
// before the next of the payload it takes as well, so that a body which just fits ends in
// it. With errAnnounced nothing of the chunk at fault has been taken, and a higher limit
// lets it come. No other error can be gone on from.
func (c *chunked) Read(p []byte) (n int, err error) {
	for {
		var got int
		switch c.state {
		case chunkDone:
			return n, io.EOF
		case chunkData:
			switch {
			case c.left > c.limit-c.read:
				return n, errAnnounced
			case n == len(p):
				return n, nil
			}
			got, err = c.src.Read(p[n:min(int64(len(p)), int64(n)+c.left)])
			n += got
			c.read += int64(got)
			if c.left -= int64(got); c.left == 0 {
				c.state = chunkDataCR
			}
		default:
			got, err = c.src.Read(c.ahead[:sure[c.state]])
			if failed := c.step(c.ahead[:got]); failed != nil {
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

// step takes bytes of framing.
func (c *chunked) step(p []byte) error {
	for _, b := range p {
		if c.state < trailerStart {
			c.over++
		}
		switch c.state {
		case chunkSize:
			d := hexDigit(b)
			switch {
			case d < 16 && c.line < sizeDigits:
				c.name[c.line] = b
				c.line++
				c.left = c.left<<4 | int64(d)
			case b == '\r' && c.line > 0:
				c.state = chunkSizeLF
			case b == ';' && c.line > 0:
				c.state, c.line = chunkExt, 1
			default:
				return fmt.Errorf("a chunk's size must be 1 to %d hexadecimal digits with CRLF, "+
					"or a semicolon and an extension, right behind them, got %q", sizeDigits, append(c.name[:c.line:c.line], b))
			}
		case chunkExt:
			switch c.line++; {
			case b == '\r':
				c.state = chunkSizeLF
			case b < ' ' && b != '\t' || b == 0x7f:
				return fmt.Errorf("a chunk's extension must not hold control characters and must end with CRLF, got %q", b)
			case c.line > extensionBytes:
				return fmt.Errorf("a chunk's extension must not be larger than %d bytes", extensionBytes)
			}
		case chunkSizeLF:
			if b != '\n' {
				return fmt.Errorf("a chunk's size must end with CRLF, got %q", []byte{'\r', b})
			}
			c.size, c.line, c.state = c.left, 0, chunkData
			if c.size == 0 {
				c.state = trailerStart
				continue
			}
			if c.count++; c.over > framingBase+c.read+framingStep*c.count {
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
			if err := c.trailer(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// trailer takes a byte behind the last chunk. Trailers go nowhere; those are refused that
// are not for a reader of the lines, and might be taken for a part of the head.
func (c *chunked) trailer(b byte) error {
	if c.line++; c.line > c.most {
		return fmt.Errorf("its trailers are larger than %d bytes", c.most)
	}
	switch c.state {
	case trailerStart, trailerKey:
		switch {
		case c.state == trailerStart && b == '\r':
			c.state = chunkLastLF
		case c.state == trailerKey && b == ':':
			if name := c.name[:c.named]; belongsInHead(name) {
				return fmt.Errorf("a trailer must not be a field that belongs in the head, as %s does", name)
			}
			c.state = trailerValue
		case !tokenByte[b]:
			return errTrailers
		default:
			if c.state == trailerStart {
				c.state, c.named = trailerKey, 0
			}
			c.named += copy(c.name[c.named:], []byte{b})
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

// belongsInHead says whether a field is none for trailers (RFC 9110, 6.5.1): it frames or
// routes the message, says who sends it, or tells how to read it.
func belongsInHead(name []byte) bool {
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
