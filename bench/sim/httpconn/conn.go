package httpconn

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Header is one header line as received; names keep their case.
type Header struct{ Name, Value string }

// Request is one request as read from the connection.
type Request struct {
	Method, Path, Query string
	Headers             []Header
	Body                []byte
	Close               bool
	HeadTime            time.Time // when the head was complete
}

// Get returns the first value of a header, case-insensitive, and whether there is one.
func (r *Request) Get(name string) (string, bool) {
	for _, h := range r.Headers {
		if strings.EqualFold(h.Name, name) {
			return h.Value, true
		}
	}
	return "", false
}

// ProtocolError is a request that cannot be parsed; the response has its status.
type ProtocolError struct {
	Status int
	Msg    string
}

func (e *ProtocolError) Error() string { return e.Msg }

// MaxHead bounds the head of a request, in bytes; a larger one is answered with 431.
const (
	MaxHead      = 64 << 10
	flushTimeout = 10 * time.Minute // for the data buffered for one slow reader
)

// Config is what the connections of one server have in common.
type Config struct {
	BodyLimit    int             // bytes of a request body
	StreamBuffer int             // bytes buffered for one slow reader before its connection is closed
	Stopping     <-chan struct{} // closed when the server ends
	Background   func(func())    // runs a goroutine for which the server waits
	SlowReader   func()          // called when a connection is closed for its slow reader
}

// Conn is one client connection. Its own goroutine reads requests; while one is
// served it waits in a read, to notice when the client disconnects or sends more. The
// goroutine that produces the response also writes it (the scheduler, for generated
// tokens), so a streamed token costs one system call and no goroutine switch.
type Conn struct {
	nc     *net.TCPConn
	br     *bufio.Reader
	config *Config
	raw    syscall.RawConn

	wmu      sync.Mutex
	unsent   []byte // data that the socket has not accepted yet
	flushing bool
	dead     error // set once; nothing is written after
	wbuf     []byte
	wn       int
	werr     error
	wfn      func(uintptr) bool
}

var errSlowReader = errors.New("sim: the client reads too slowly")

// New returns a connection for a socket that was accepted.
func New(nc *net.TCPConn, config *Config) (*Conn, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &Conn{nc: nc, br: bufio.NewReaderSize(nc, 4096), config: config, raw: raw}
	c.wfn = func(fd uintptr) bool {
		for {
			c.wn, c.werr = syscall.Write(int(fd), c.wbuf)
			if c.werr != syscall.EINTR {
				return true
			}
		}
	}
	return c, nil
}

// Send writes b without ever blocking. What the socket does not accept is buffered, up
// to the limit, and written by a goroutine that runs while the buffer is not empty. The
// caller may reuse b when send returns.
func (c *Conn) Send(b []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.dead != nil {
		return c.dead
	}
	if !c.flushing {
		c.wbuf = b
		err := c.raw.Write(c.wfn)
		c.wbuf = nil
		if err == nil {
			err = c.werr
		}
		switch {
		case err == nil:
			b = b[c.wn:]
		case err != syscall.EAGAIN:
			c.dead = err
			return err
		}
		if len(b) == 0 {
			return nil
		}
	}
	if len(c.unsent)+len(b) > c.config.StreamBuffer {
		c.dead = errSlowReader
		c.config.SlowReader()
		c.Reset()
		return c.dead
	}
	c.unsent = append(c.unsent, b...)
	if !c.flushing {
		c.flushing = true
		c.config.Background(c.flush)
	}
	return nil
}

// flush writes the buffer of send and ends when it is empty.
func (c *Conn) flush() {
	var buf []byte
	for {
		c.wmu.Lock()
		if len(c.unsent) == 0 || c.dead != nil {
			c.flushing = false
			c.nc.SetWriteDeadline(time.Time{})
			c.wmu.Unlock()
			return
		}
		buf, c.unsent = c.unsent, buf[:0]
		c.wmu.Unlock()
		c.nc.SetWriteDeadline(time.Now().Add(flushTimeout))
		if _, err := c.nc.Write(buf); err != nil {
			c.wmu.Lock()
			c.dead = err
			c.wmu.Unlock()
		}
	}
}

// Drain waits until everything is written, the client has disconnected, or the
// server ends.
func (c *Conn) Drain() {
	t := time.NewTicker(2 * time.Millisecond)
	defer t.Stop()
	for {
		c.wmu.Lock()
		idle := !c.flushing
		c.wmu.Unlock()
		if idle {
			return
		}
		select {
		case <-t.C:
		case <-c.config.Stopping:
			return
		}
	}
}

// InterruptRead ends a read of the connection's goroutine, and those after it.
func (c *Conn) InterruptRead() { c.nc.SetReadDeadline(time.Unix(1, 0)) }

// Peek waits for input and returns its first byte without consuming it. A deadline of the
// read ends it too.
func (c *Conn) Peek() (byte, error) {
	b, err := c.br.Peek(1)
	if err != nil {
		return 0, err
	}
	return b[0], nil
}

// Hijack returns the parts of a connection that speaks another protocol: a reader, which
// may have read ahead, and the connection to write to and to close.
func (c *Conn) Hijack() (io.Reader, *net.TCPConn) { return c.br, c.nc }

// Close closes the connection.
func (c *Conn) Close() { c.nc.Close() }

// CloseWrite ends what the client can read.
func (c *Conn) CloseWrite() { c.nc.CloseWrite() }

// Reset closes with RST.
func (c *Conn) Reset() {
	c.nc.SetLinger(0)
	c.nc.Close()
}

// ReadRequest reads one request. It returns io.EOF if the client closed between
// requests.
func (c *Conn) ReadRequest() (*Request, error) {
	line, err := c.line(MaxHead)
	if err != nil {
		return nil, err
	}
	method, rest, ok := strings.Cut(line, " ")
	target, proto, ok2 := strings.Cut(rest, " ")
	if !ok || !ok2 || !strings.HasPrefix(proto, "HTTP/1.") {
		return nil, &ProtocolError{400, "Invalid HTTP request received."}
	}
	r := &Request{Method: method, Close: proto == "HTTP/1.0"}
	r.Path, r.Query, _ = strings.Cut(target, "?")
	left := MaxHead - len(line)
	length, chunked, expect := -1, false, false
	for {
		if line, err = c.line(left); err != nil {
			return nil, unexpected(err)
		}
		if line == "" {
			break
		}
		left -= len(line)
		name, value, ok := strings.Cut(line, ":")
		if !ok || name == "" || strings.TrimSpace(name) != name {
			return nil, &ProtocolError{400, "Invalid HTTP request received."}
		}
		value = strings.Trim(value, " \t")
		r.Headers = append(r.Headers, Header{name, value})
		switch strings.ToLower(name) {
		case "content-length":
			n, err := strconv.Atoi(value)
			if err != nil || n < 0 || length >= 0 && n != length {
				return nil, &ProtocolError{400, "Invalid HTTP request received."}
			}
			length = n
		case "transfer-encoding":
			if !strings.EqualFold(value, "chunked") {
				return nil, &ProtocolError{501, "Unsupported transfer-encoding."}
			}
			chunked = true
		case "connection":
			r.Close = r.Close || strings.EqualFold(value, "close")
		case "expect":
			expect = strings.EqualFold(value, "100-continue")
		}
	}
	r.HeadTime = time.Now()
	if chunked && length >= 0 {
		return nil, &ProtocolError{400, "Invalid HTTP request received."}
	}
	if expect && (chunked || length > 0) {
		if err := c.Send([]byte("HTTP/1.1 100 Continue\r\n\r\n")); err != nil {
			return nil, err
		}
	}
	limit := c.config.BodyLimit
	switch {
	case chunked:
		r.Body, err = c.chunkedBody(limit)
	case length > limit:
		return nil, &ProtocolError{413, fmt.Sprintf("Request body of %d bytes is over the limit of %d.", length, limit)}
	case length > 0:
		r.Body = make([]byte, length)
		_, err = io.ReadFull(c.br, r.Body)
	}
	if err != nil {
		return nil, unexpected(err)
	}
	return r, nil
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// line reads one line without its line ending, at most limit bytes.
func (c *Conn) line(limit int) (string, error) {
	var long []byte
	for {
		part, err := c.br.ReadSlice('\n')
		if err != nil && err != bufio.ErrBufferFull {
			return "", err
		}
		if len(long)+len(part) > limit {
			return "", &ProtocolError{431, "Request header fields are too large."}
		}
		if err == nil && long == nil {
			return string(bytes.TrimRight(part, "\r\n")), nil
		}
		long = append(long, part...)
		if err == nil {
			return string(bytes.TrimRight(long, "\r\n")), nil
		}
	}
}

func (c *Conn) chunkedBody(limit int) ([]byte, error) {
	var body []byte
	for {
		line, err := c.line(1024)
		if err != nil {
			return nil, err
		}
		size, _, _ := strings.Cut(line, ";")
		n, err := strconv.ParseUint(strings.TrimSpace(size), 16, 31)
		if err != nil {
			return nil, &ProtocolError{400, "Invalid HTTP request received."}
		}
		if n == 0 {
			for {
				if line, err = c.line(MaxHead); err != nil || line == "" {
					return body, err
				}
			}
		}
		if len(body)+int(n) > limit {
			return nil, &ProtocolError{413, fmt.Sprintf("Request body is over the limit of %d bytes.", limit)}
		}
		at := len(body)
		body = append(body, make([]byte, n)...)
		if _, err = io.ReadFull(c.br, body[at:]); err != nil {
			return nil, err
		}
		if line, err = c.line(2); err != nil || line != "" {
			return nil, &ProtocolError{400, "Invalid HTTP request received."}
		}
	}
}

// WaitOrGone waits d and reports whether the client disconnected meanwhile. Pipelined
// input also ends the wait, because it proves that the client is there.
func (c *Conn) WaitOrGone(d time.Duration) bool { return c.WaitOrGoneUntil(d, nil) }

// WaitOrGoneUntil waits d, or until the channel is closed; a nil channel never is.
func (c *Conn) WaitOrGoneUntil(d time.Duration, until <-chan struct{}) bool {
	if d <= 0 {
		return false
	}
	c.readUntil(time.Now().Add(d))
	woken := func() {}
	if until != nil {
		over, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			select {
			case <-until:
				c.InterruptRead()
			case <-over:
			}
		}()
		woken = func() { close(over); <-ended }
	}
	_, err := c.Peek()
	woken() // it must not interrupt a later read
	c.readUntil(time.Time{})
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// readUntil sets the read deadline, unless the server is ending: it interrupts the read
// once, after closing Stopping, and this must not undo that.
func (c *Conn) readUntil(t time.Time) {
	c.nc.SetReadDeadline(t)
	select {
	case <-c.config.Stopping:
		c.InterruptRead()
	default:
	}
}

// Respond writes a whole response.
func (c *Conn) Respond(r *Request, status int, contentType string, body []byte) {
	b := make([]byte, 0, len(body)+256)
	b = appendHead(b, status, contentType, len(body), r == nil || r.Close)
	if r == nil || r.Method != "HEAD" {
		b = append(b, body...)
	}
	c.Send(b)
}

// appendHead appends a response head; length -1 means chunked.
func appendHead(b []byte, status int, contentType string, length int, closing bool) []byte {
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	b = append(b, cmp.Or(http.StatusText(status), "Unknown")...)
	b = append(b, "\r\ndate: "...)
	b = time.Now().UTC().AppendFormat(b, "Mon, 02 Jan 2006 15:04:05 GMT")
	b = append(b, "\r\nserver: uvicorn\r\n"...)
	if contentType != "" {
		b = append(b, "content-type: "...)
		b = append(b, contentType...)
		b = append(b, "\r\n"...)
	}
	if length >= 0 {
		b = append(b, "content-length: "...)
		b = strconv.AppendInt(b, int64(length), 10)
		b = append(b, "\r\n"...)
	} else {
		b = append(b, "transfer-encoding: chunked\r\n"...)
	}
	if closing {
		b = append(b, "connection: close\r\n"...)
	}
	return append(b, "\r\n"...)
}

// StreamHead is the response head of every event stream.
func StreamHead(closing bool) []byte {
	return appendHead(nil, 200, "text/event-stream; charset=utf-8", -1, closing)
}
