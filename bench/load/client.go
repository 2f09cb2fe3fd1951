package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
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
	TPOT            time.Duration // mean time of an output token after the first; 0 with fewer than two
	Total           time.Duration
	Chunks          int
	Bytes           int
	Prompt          int // tokens as the engine counted them, -1 unknown
	Output          int
	Cached          int           // tokens as the engine reported them, -1 unknown
	Worker          string        // X-Sluice-Worker
	Prefill         string        // X-Sluice-Prefill-Worker
	PredictedCached int           // X-Sluice-Cached-Tokens, -1 absent
	RetryAfter      time.Duration // of a refusal
	Queued          bool          // the server says that the request waited in its queue

	output    output // of a job that collects it
	lastToken time.Duration
}

// refused reports whether the server sent the request away because it is busy.
func (r *Result) refused() bool { return r.Status == 429 || r.Status == 503 }

// unanswered reports whether the answer did not end in time.
func (r *Result) unanswered() bool { return errors.Is(r.Err, errTimeout) }

// client is one connection of a user, kept alive between requests.
type client struct {
	addr, head string
	heads      []string // of the sources
	timeout    time.Duration
	conn       net.Conn
	in         *bufio.Reader
	out        []byte
	last       time.Time
	gap        func(time.Duration) // receives the time between two chunks of a stream; may be nil
	dial       func() (net.Conn, error)
}

// newClient returns a client of valid options, not connected.
func newClient(o *Options, heads []string) *client {
	u, err := url.Parse(o.URL)
	if err != nil {
		panic(err) // Validate parsed the same URL
	}
	path := map[string]string{"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/inference/v1/generate"}[o.Endpoint]
	var head strings.Builder
	fmt.Fprintf(&head, "POST %s%s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n", strings.TrimSuffix(u.Path, "/"), path, u.Host)
	for _, h := range o.Headers {
		head.WriteString(h + "\r\n")
	}
	head.WriteString("Content-Length: ")
	c := &client{addr: u.Host, head: head.String(), heads: heads, timeout: o.Timeout, dial: o.dial}
	if c.dial == nil {
		c.dial = func() (net.Conn, error) { return net.DialTimeout("tcp", c.addr, min(c.timeout, 10*time.Second)) }
	}
	return c
}

func (c *client) close() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// do sends the job and reads the whole response, until the timeout or the end of ctx.
// Latencies are counted from from.
func (c *client) do(ctx context.Context, job *Job, from time.Time) Result {
	r := Result{Sent: time.Now(), Prompt: -1, Cached: -1, PredictedCached: -1}
	r.SendDelay = r.Sent.Sub(from)
	deadline := r.Sent.Add(c.timeout)
	fresh := c.conn == nil
	r.Err = c.try(ctx, job, from, deadline, &r)
	if r.Err != nil {
		c.close()
		if !fresh && r.Status == 0 && errors.Is(r.Err, errIdleClosed) && !errors.Is(r.Err, os.ErrDeadlineExceeded) {
			// The server closed the idle connection; this is not a response to the
			// request.
			r.Err = c.try(ctx, job, from, deadline, &r)
			if r.Err != nil {
				c.close()
			}
		}
	}
	r.Total = time.Since(from)
	if errors.Is(r.Err, os.ErrDeadlineExceeded) {
		r.Err = errTimeout
	}
	if n := max(r.Output, r.Chunks); r.Chunks > 1 && r.lastToken > r.TTFT {
		r.TPOT = (r.lastToken - r.TTFT) / time.Duration(n-1)
	}
	return r
}

var (
	errIdleClosed = errors.New("load: the server closed the idle connection")
	errTimeout    = errors.New("load: no complete answer within the timeout, or by the end of the run")
)

func (c *client) try(ctx context.Context, job *Job, from, deadline time.Time, r *Result) error {
	if c.conn == nil {
		conn, err := c.dial()
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
	conn := c.conn
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(longAgo) })()
	c.out = append(c.out[:0], c.head...)
	c.out = strconv.AppendInt(c.out, int64(len(job.Body)), 10)
	if job.Session != "" {
		c.out = append(append(c.out, "\r\nX-Sluice-Session: "...), job.Session...)
	}
	c.out = append(c.out, "\r\n"...)
	c.out = append(c.out, c.heads[job.source]...)
	if job.final {
		c.out = append(c.out, "X-Sluice-Session-Final: true\r\n"...)
	}
	c.out = append(append(c.out, "\r\n"...), job.Body...)
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
	if job.collect {
		r.output = output{}
		scan.answer = &r.output
	}
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
		case len("Retry-After"):
			if bytes.EqualFold(name, []byte("Retry-After")) {
				seconds, _ := strconv.ParseUint(string(value), 10, 16) // a date counts as none
				r.RetryAfter = time.Duration(seconds) * time.Second
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
		case len("X-Sluice-Queue-Time"):
			if bytes.EqualFold(name, []byte("X-Sluice-Queue-Time")) {
				r.Queued = true
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

// longAgo is a deadline that ends reads and writes at once.
var longAgo = time.Unix(1, 0)

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
		} else if !c.last.IsZero() && scan.tokens > r.Chunks && c.gap != nil {
			c.gap(now.Sub(c.last))
		}
		if scan.tokens > r.Chunks {
			r.lastToken = now.Sub(from)
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
