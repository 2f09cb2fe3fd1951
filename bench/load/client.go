package load

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Result is the outcome of one request. Times are counted from when it was due (open
// loop) or sent (closed loop).
type Result struct {
	Sent            time.Time
	SendDelay       time.Duration // delay from its due time until it was sent
	Status          int           // 0 if there was no response
	Err             error         // nil for a complete response with status 200
	TTFT            time.Duration // 0 if no token arrived
	Total           time.Duration
	Chunks          int
	Bytes           int
	Prompt          int // tokens as the engine counted them, -1 unknown
	Output          int
	Cached          int    // tokens as the engine reported them, -1 unknown
	Worker          string // X-Sluice-Worker
	Prefill         string // X-Sluice-Prefill-Worker
	PredictedCached int    // X-Sluice-Cached-Tokens, -1 absent
}

// client is one connection of a user, kept alive between requests.
type client struct {
	addr, head string
	timeout    time.Duration
	conn       net.Conn
	in         *bufio.Reader
	out        []byte
	last       time.Time
	gap        func(time.Duration) // receives the time between two chunks of a stream
}

func newClient(o *Options, gap func(time.Duration)) (*client, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, err
	}
	path := map[string]string{"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/inference/v1/generate"}[o.Endpoint]
	var head strings.Builder
	fmt.Fprintf(&head, "POST %s%s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n", strings.TrimSuffix(u.Path, "/"), path, u.Host)
	for _, h := range o.Headers {
		head.WriteString(h + "\r\n")
	}
	head.WriteString("Content-Length: ")
	return &client{addr: u.Host, head: head.String(), timeout: o.Timeout, gap: gap}, nil
}

func (c *client) close() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// do sends the job and reads the whole response. Latencies are counted from from.
func (c *client) do(job *Job, from time.Time) Result {
	r := Result{Sent: time.Now(), Prompt: -1, Cached: -1, PredictedCached: -1}
	r.SendDelay = r.Sent.Sub(from)
	deadline := r.Sent.Add(c.timeout)
	fresh := c.conn == nil
	r.Err = c.try(job, from, deadline, &r)
	if r.Err != nil {
		c.close()
		if !fresh && r.Status == 0 && errors.Is(r.Err, errIdleClosed) {
			// The server closed the idle connection; this is not a response to the
			// request.
			r.Err = c.try(job, from, deadline, &r)
			if r.Err != nil {
				c.close()
			}
		}
	}
	r.Total = time.Since(from)
	return r
}

var errIdleClosed = errors.New("load: the server closed the idle connection")

func (c *client) try(job *Job, from, deadline time.Time, r *Result) error {
	if c.conn == nil {
		conn, err := net.DialTimeout("tcp", c.addr, min(c.timeout, 10*time.Second))
		if err != nil {
			return fmt.Errorf("load: cannot connect: %w", err)
		}
		c.conn = conn
		if c.in == nil {
			c.in = bufio.NewReaderSize(conn, 16<<10)
		} else {
			c.in.Reset(conn)
		}
	}
	c.conn.SetDeadline(deadline)
	c.out = append(c.out[:0], c.head...)
	c.out = strconv.AppendInt(c.out, int64(len(job.Body)), 10)
	if job.Session != "" {
		c.out = append(append(c.out, "\r\nX-Sluice-Session: "...), job.Session...)
	}
	c.out = append(append(c.out, "\r\n\r\n"...), job.Body...)
	if _, err := c.conn.Write(c.out); err != nil {
		return fmt.Errorf("%w: %w", errIdleClosed, err)
	}
	length, chunked, closes, err := c.readHead(r)
	if err != nil {
		return err
	}
	if closes {
		defer c.close()
	}
	var scan eventScan
	c.last = time.Time{}
	if chunked {
		err = c.readChunks(from, r, &scan)
	} else {
		err = c.readBody(length, from, r, &scan)
	}
	if err != nil {
		return err
	}
	r.Prompt, r.Output, r.Cached = scan.prompt, scan.output, scan.cached
	switch {
	case r.Status != 200:
		return fmt.Errorf("load: status %d: %s", r.Status, cutTo(scan.tail, 200))
	case scan.failed:
		return fmt.Errorf("load: the stream carried an error: %s", cutTo(scan.tail, 200))
	case chunked && scan.events > 0 && !scan.done:
		return errors.New("load: the stream ended without [DONE]")
	}
	return nil
}

func (c *client) readHead(r *Result) (length int, chunked, closes bool, err error) {
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		return 0, false, false, fmt.Errorf("%w: %w", errIdleClosed, err)
	}
	f := bytes.Fields(line)
	if len(f) < 2 || !bytes.HasPrefix(f[0], []byte("HTTP/1.")) {
		return 0, false, false, fmt.Errorf("load: no HTTP response: %q", cutTo(line, 80))
	}
	if r.Status, err = strconv.Atoi(string(f[1])); err != nil {
		return 0, false, false, fmt.Errorf("load: bad status %q", f[1])
	}
	length = -1
	for {
		line, err := c.in.ReadSlice('\n')
		if err != nil {
			return 0, false, false, fmt.Errorf("load: response head cut short: %w", err)
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return length, chunked, closes, nil
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch len(name) {
		case len("Content-Length"):
			if bytes.EqualFold(name, []byte("Content-Length")) {
				if length, err = strconv.Atoi(string(value)); err != nil || length < 0 {
					return 0, false, false, fmt.Errorf("load: bad Content-Length %q", value)
				}
			}
		case len("Transfer-Encoding"):
			if bytes.EqualFold(name, []byte("Transfer-Encoding")) {
				chunked = bytes.EqualFold(value, []byte("chunked"))
			}
		case len("Connection"):
			if bytes.EqualFold(name, []byte("Connection")) {
				closes = bytes.EqualFold(value, []byte("close"))
			}
		case len("X-Sluice-Worker"):
			if bytes.EqualFold(name, []byte("X-Sluice-Worker")) {
				r.Worker = string(value)
			}
		case len("X-Sluice-Prefill-Worker"):
			if bytes.EqualFold(name, []byte("X-Sluice-Prefill-Worker")) {
				r.Prefill = string(value)
			}
		case len("X-Sluice-Cached-Tokens"):
			if bytes.EqualFold(name, []byte("X-Sluice-Cached-Tokens")) {
				r.PredictedCached, _ = strconv.Atoi(string(value))
			}
		}
	}
}

// maxBody limits a response that is read as a whole.
const maxBody = 64 << 20

func (c *client) readBody(length int, from time.Time, r *Result, scan *eventScan) error {
	if length > maxBody {
		return fmt.Errorf("load: an answer of %d bytes; at most %d are read", length, maxBody)
	}
	var body []byte
	var err error
	if length >= 0 {
		body = make([]byte, length)
		_, err = io.ReadFull(c.in, body)
	} else {
		body, err = io.ReadAll(io.LimitReader(c.in, maxBody))
		c.close()
	}
	if err != nil {
		return fmt.Errorf("load: answer cut short: %w", err)
	}
	r.Bytes = len(body)
	r.TTFT = time.Since(from)
	r.Chunks = 1
	scan.scanBody(body)
	return nil
}

func (c *client) readChunks(from time.Time, r *Result, scan *eventScan) error {
	for {
		line, err := c.in.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("load: stream cut short: %w", err)
		}
		size, err := strconv.ParseUint(string(bytes.TrimRight(line, "\r\n")), 16, 31)
		if err != nil {
			return fmt.Errorf("load: bad chunk size %q", cutTo(line, 20))
		}
		for left := int(size); left > 0; {
			part, err := c.in.Peek(min(left, max(1, c.in.Buffered())))
			if err != nil {
				return fmt.Errorf("load: stream cut short: %w", err)
			}
			scan.feed(part)
			n := len(part)
			c.in.Discard(n)
			r.Bytes += n
			left -= n
		}
		if _, err := c.in.Discard(2); err != nil {
			return fmt.Errorf("load: stream cut short: %w", err)
		}
		if size == 0 {
			return nil
		}
		now := time.Now()
		if scan.tokens > 0 && r.TTFT == 0 {
			r.TTFT = now.Sub(from)
		} else if !c.last.IsZero() && scan.tokens > r.Chunks {
			c.gap(now.Sub(c.last))
		}
		r.Chunks = scan.tokens
		c.last = now
	}
}

func cutTo(b []byte, n int) []byte {
	if len(b) > n {
		return b[:n]
	}
	return b
}
