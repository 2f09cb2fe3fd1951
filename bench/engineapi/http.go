package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// httpUser has a connection of its own, kept alive between requests. It parses as much
// of a response as a client must: the framing, each event, its token ids.
type httpUser struct {
	nc     net.Conn
	in     *bufio.Reader
	head   string
	format func(dst []byte, prompt []uint32) []byte
	body   []byte
	out    []byte
	buf    []byte
	ids    []uint32
}

func httpUsers(o *options) (func() (user, error), error) {
	u, err := url.Parse(o.target)
	if err != nil {
		return nil, err
	}
	var format func([]byte, []uint32) []byte
	switch u.Path {
	case "/v1/completions":
		tail := fmt.Sprintf(`,"stream":true,"return_token_ids":true,"stream_options":{"include_usage":true},"max_tokens":%d,"ignore_eos":true,"temperature":0}`, o.tokens)
		format = func(dst []byte, prompt []uint32) []byte {
			return append(jsonscan.AppendTokenIDs(append(dst, `{"model":"sim","prompt":`...), prompt), tail...)
		}
	case "/v1/engine/generate":
		tail := fmt.Sprintf(`,"stop_conditions":{"max_tokens":%d,"ignore_eos":true},"sampling_options":{"temperature":0}}`, o.tokens)
		format = func(dst []byte, prompt []uint32) []byte {
			return append(jsonscan.AppendTokenIDs(append(dst, `{"model":"sim","token_ids":`...), prompt), tail...)
		}
	default:
		return nil, fmt.Errorf("engineapi: cannot put load on %q; want /v1/completions or /v1/engine/generate", u.Path)
	}
	head := "POST " + u.Path + " HTTP/1.1\r\nHost: " + u.Host + "\r\nContent-Type: application/json\r\nContent-Length: "
	return func() (user, error) {
		nc, err := net.DialTimeout("tcp", u.Host, o.timeout)
		if err != nil {
			return nil, err
		}
		return &httpUser{nc: nc, in: bufio.NewReader(nc), head: head, format: format, buf: make([]byte, 32<<10)}, nil
	}, nil
}

func (u *httpUser) close() { u.nc.Close() }

func (u *httpUser) request(ctx context.Context, prompt []uint32) (a answer, err error) {
	if by, ok := ctx.Deadline(); ok {
		_ = u.nc.SetDeadline(by)
	}
	u.body = u.format(u.body[:0], prompt)
	u.out = strconv.AppendInt(append(u.out[:0], u.head...), int64(len(u.body)), 10)
	u.out = append(append(u.out, "\r\n\r\n"...), u.body...)
	if _, err := u.nc.Write(u.out); err != nil {
		return a, err
	}
	if err := u.readHead(); err != nil {
		return a, err
	}
	var chunks upstream.Chunks
	var events sse.Splitter
	defer events.Release()
	whole := false
	for !chunks.Done() {
		n, err := u.in.Read(u.buf)
		if err != nil {
			return a, err
		}
		for p := u.buf[:n]; len(p) > 0 && !chunks.Done(); {
			n, payload, err := chunks.Next(p)
			if err != nil {
				return a, err
			}
			p = p[n:]
			for len(payload) > 0 {
				n, event, _ := events.Next(payload)
				payload = payload[n:]
				switch data := sse.EventData(event); {
				case len(data) == 0:
				case string(data) == "[DONE]":
					whole = true
				case bytes.Contains(data, []byte(`"error":{`)):
					return a, fmt.Errorf("the stream carried an error: %.200s", data)
				default:
					if n := u.tokens(data); n > 0 {
						a.items++
						a.tokens += n
					}
				}
			}
		}
	}
	if !whole {
		return a, errors.New("the stream ended without [DONE]")
	}
	return a, nil
}

// tokens counts an event's ids by parsing them as a client would.
func (u *httpUser) tokens(data []byte) int {
	_, ids, ok := bytes.Cut(data, []byte(`"token_ids":`))
	if bytes.HasSuffix(data[:len(data)-len(ids)], []byte(`prompt_token_ids":`)) {
		_, ids, ok = bytes.Cut(ids, []byte(`"token_ids":`)) // the first event has those of the prompt
	}
	end := bytes.IndexByte(ids, ']')
	if !ok || end < 0 {
		return 0
	}
	var err error
	if u.ids, err = jsonscan.TokenIDs(u.ids[:0], ids[:end+1]); err != nil {
		return 0
	}
	return len(u.ids)
}

func (u *httpUser) readHead() error {
	for first := true; ; first = false {
		line, err := u.in.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case first && !bytes.HasPrefix(line, []byte("HTTP/1.1 200")):
			rest, _ := io.ReadAll(io.LimitReader(u.in, int64(u.in.Buffered())))
			return fmt.Errorf("%s: %.300s", line, rest)
		case len(line) == 0:
			return nil
		}
	}
}
