package front

import (
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"

	"sluice/dataplane/compression"
	"sluice/dataplane/membudget"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// decode decompresses the request body. If it cannot, it answers with an error and returns
// false.
func (x *httpExchange) decode(c compression.Algorithm) bool {
	if c == compression.Identity {
		return true
	}
	limit := x.srv.options().MaxBodyBytes
	var lease membudget.Lease
	decoded, err := c.Decode(x.Doc.Body, &lease, x.srv.budget, limit)
	x.body.lease.Release()
	x.body.lease, x.Doc.Body = lease, decoded
	switch {
	case err == nil:
		return true
	case errors.Is(err, compression.ErrTooLarge):
		x.Error(BodyTooLarge, "", "the request body is larger than "+strconv.FormatInt(limit, 10)+" bytes when its "+c.String()+" is decoded", 0)
	case errors.Is(err, compression.ErrBudget):
		return x.rejectBudgetExhausted()
	case errors.Is(err, compression.ErrBusy):
		x.Error(DecodersBusy, "", "too many compressed request bodies are being decoded; try again, or send the body without Content-Encoding", budgetRetry)
	default:
		x.Error(BadHTTP, "", "cannot decode the request body: "+err.Error(), 0)
	}
	return false
}

// setCompressedBody sets a copy of body as the response body, compressed if the client accepts
// a coding and the result is shorter.
func (x *httpExchange) setCompressedBody(body []byte) {
	minSize := x.srv.options().CompressMin
	if minSize == 0 || len(body) < minSize {
		x.path.setBody(body)
		return
	}
	x.path.addHeader("Vary", "Accept-Encoding") // in addition to an engine's Vary line
	c := compression.Negotiate(x.head.FindAll("Accept-Encoding"))
	if c == compression.Identity {
		x.path.setBody(body)
		return
	}
	dst := membudget.Default.Get(len(body))
	defer membudget.Default.Put(dst)
	encoded := c.Append(dst.B[:0], body)
	if len(encoded) >= len(body) {
		x.path.setBody(body)
		return
	}
	x.path.addHeader("Content-Encoding", c.String())
	x.path.setBody(encoded)
}

// maxCompressing bounds how many non-streaming responses are compressed while they are relayed,
// counted in Server.compressing. An encoder has up to 1 MB for as long as its client reads.
// Further responses are relayed uncompressed.
const maxCompressing = 32

// streamCompressor compresses the body of a stream. Its buffers are reused for the next stream.
type streamCompressor struct {
	active     bool
	inUse      *atomic.Int32       // Server.compressing if the stream is counted there, else nil
	stream     *compression.Stream // nil once its end is written
	payload    []byte
	compressed []byte
	out        []byte
}

// compressRelayed compresses a relayed response if the configuration and the client allow it,
// and adds the header lines for it. The body is then sent in chunks, whatever its framing was.
// on reports whether the body is compressed.
func (x *httpExchange) compressRelayed(st *stream, kind []byte) (on bool) {
	resp, opt := st.resp, x.srv.options()
	asStream := opt.CompressStreams && resp.ContentLength == upstream.LengthChunked
	if !x.head.HTTP11 || !asStream && !x.compressesUnbuffered(resp, kind) || len(resp.Header("Content-Encoding")) > 0 {
		return false
	}
	st.head = append(st.head, "Vary: Accept-Encoding\r\n"...)
	c := compression.Negotiate(x.head.FindAll("Accept-Encoding"))
	if c == compression.Identity {
		return false
	}
	var counted *atomic.Int32
	if !asStream {
		counted = &x.srv.compressing
		if counted.Add(1) > maxCompressing {
			counted.Add(-1)
			return false
		}
	}
	stream, err := c.NewStream()
	if err != nil { // the coding cannot be written in pieces
		if counted != nil {
			counted.Add(-1)
		}
		return false
	}
	if st.compressor == nil {
		st.compressor = new(streamCompressor)
	}
	st.compressor.active, st.compressor.stream, st.compressor.inUse = true, stream, counted
	st.head = appendLine(st.head, "Content-Encoding", c.String())
	st.chunked = resp.ContentLength != upstream.LengthChunked
	return true
}

// compressesUnbuffered reports whether a relayed non-streaming response is compressed: JSON of
// CompressMin bytes or more, or of unknown length. For other content types nobody knows, before
// the body has been sent, whether compression makes it shorter.
func (x *httpExchange) compressesUnbuffered(resp *upstream.Response, kind []byte) bool {
	minSize := int64(x.srv.options().CompressMin)
	return minSize > 0 && (resp.ContentLength < 0 || resp.ContentLength >= minSize) && x.Converter == nil && namesJSON(kind)
}

// writeCompressed removes the engine's chunk framing from p, if there is any, and sends the
// payload compressed as one chunk. It flushes the encoder, so that no event waits for the next.
func (st *stream) writeCompressed(p []byte) (int, error) {
	c := st.compressor
	if c.stream == nil {
		return len(p), nil // the body has ended
	}
	c.payload, c.out = c.payload[:0], c.out[:0]
	payload := p
	if !st.chunked {
		for at := 0; at < len(p) && !st.chunks.Done(); {
			n, piece, err := st.chunks.Next(p[at:])
			if err != nil {
				return 0, err
			}
			c.payload = append(c.payload, piece...)
			at += n
		}
		payload = c.payload
	}
	var err error
	if c.compressed = c.compressed[:0]; len(payload) > 0 {
		if c.compressed, err = c.stream.Append(c.compressed, payload); err != nil {
			return 0, err
		}
	}
	done := st.chunks.Done()
	if done {
		c.compressed, err = c.stream.Close(c.compressed)
		if c.stream = nil; err != nil {
			return 0, err
		}
	}
	if len(c.compressed) > 0 {
		c.out = sse.AppendChunk(c.out, c.compressed)
	}
	if done {
		c.out = append(c.out, lastChunk...)
	}
	if len(c.out) == 0 {
		return len(p), nil
	}
	if _, err := st.send(c.out); err != nil {
		// The encoder's state has advanced, so the caller cannot send p again.
		return 0, fmt.Errorf("front: cannot write an encoded stream: %w", err)
	}
	return len(p), nil
}

// appendBodyEnd appends the end of a body that this server frames to st.head: the end of the
// compressed data, if it is not written, and the last chunk.
func (st *stream) appendBodyEnd() error {
	if c := st.compressor; c.enabled() && c.stream != nil {
		var err error
		c.compressed, err = c.stream.Close(c.compressed[:0])
		if c.stream = nil; err != nil {
			return err
		}
		st.head = sse.AppendChunk(st.head, c.compressed)
	}
	st.head = append(st.head, lastChunk...)
	return nil
}

// enabled reports whether the stream is compressed. c may be nil.
func (c *streamCompressor) enabled() bool { return c != nil && c.active }

// release ends the use of c by a stream: it closes an encoder whose stream broke before its
// end, and drops buffers of more than 64 KiB. c may be nil.
func (c *streamCompressor) release() {
	if c == nil {
		return
	}
	const maxRetained = 64 << 10
	if c.stream != nil {
		_, _ = c.stream.Close(nil)
	}
	if c.inUse != nil {
		c.inUse.Add(-1)
		c.inUse = nil
	}
	if cap(c.payload)+cap(c.compressed)+cap(c.out) > maxRetained {
		*c = streamCompressor{}
		return
	}
	c.active, c.stream = false, nil
}
