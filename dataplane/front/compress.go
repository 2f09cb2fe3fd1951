package front

import (
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"

	"sluice/dataplane/compression"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// decode takes a coding off the body; when it cannot, it answers and gives false.
func (x *Exchange) decode(c compression.Algorithm) bool {
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

// setCompressedBody makes a copy of body the answer's, in a coding that the client accepts
// where that makes it shorter.
func (x *Exchange) setCompressedBody(body []byte) {
	minSize := x.srv.options().CompressMin
	if minSize == 0 || len(body) < minSize {
		x.setIdentityBody(body)
		return
	}
	addHeaderLine(x, "Vary", "Accept-Encoding") // one more line: an engine's own stays
	c := compression.Negotiate(x.head.findAll("Accept-Encoding"))
	if c == compression.Identity {
		x.setIdentityBody(body)
		return
	}
	dst := membudget.Default.Get(len(body))
	defer membudget.Default.Put(dst)
	encoded := c.Append(dst.B[:0], body)
	if len(encoded) >= len(body) {
		x.setIdentityBody(body)
		return
	}
	addHeaderLine(x, "Content-Encoding", c.String())
	x.setIdentityBody(encoded)
}

// maxCompressing is how many answers that are no streams are encoded as they come at once, by
// Server.encoded: an encoder has up to 1 MB, which a slow client holds. Those beyond go out
// as they are.
const maxCompressing = 32

// streamCompressor puts a coding on a stream; its buffers are kept from one stream to the next.
type streamCompressor struct {
	active     bool
	inUse      *atomic.Int32       // of maxCompressing; nil: not counted
	stream     *compression.Stream // nil once the end is written
	payload    []byte
	compressed []byte
	out        []byte
}

// compressRelayed has an answer that is relayed encoded where that was configured and the
// client accepts it, and says so in the head. Its body goes out in chunks then, whatever
// its framing was.
func (x *Exchange) compressRelayed(st *stream, kind []byte) (on bool) {
	resp, opt := st.resp, x.srv.options()
	asStream := opt.CompressStreams && resp.ContentLength == upstream.LengthChunked
	if !x.head.http11 || !asStream && !x.compressesUnbuffered(resp, kind) || len(resp.Header("Content-Encoding")) > 0 {
		return false
	}
	st.head = append(st.head, "Vary: Accept-Encoding\r\n"...)
	c := compression.Negotiate(x.head.findAll("Accept-Encoding"))
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
	if err != nil { // of a coding that cannot come in pieces
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

// compressesUnbuffered says whether an answer that is relayed is encoded as one that is held
// whole would be: JSON that is as long as CompressMin, or does not tell how long. Nobody
// can say whether a coding makes another kind shorter before it has gone out.
func (x *Exchange) compressesUnbuffered(resp *upstream.Response, kind []byte) bool {
	minSize := int64(x.srv.options().CompressMin)
	return minSize > 0 && (resp.ContentLength < 0 || resp.ContentLength >= minSize) && x.Converter == nil && namesJSON(kind)
}

// writeCompressed takes p out of the engine's chunks, where it has any, and sends what it held
// as one chunk of the coding, flushed: an event never waits for the next.
func (st *stream) writeCompressed(p []byte) (int, error) {
	c := st.compressor
	if c.stream == nil {
		return len(p), nil // behind the end
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
		c.out = relay.AppendChunk(c.out, c.compressed)
	}
	if done {
		c.out = append(c.out, lastChunk...)
	}
	if len(c.out) == 0 {
		return len(p), nil
	}
	if _, err := st.send(c.out); err != nil {
		// The coding's state has gone on: nothing can be sent again.
		return 0, fmt.Errorf("front: cannot write an encoded stream: %w", err)
	}
	return len(p), nil
}

// appendBodyEnd puts what ends a body that was framed here behind the head, if that is not
// out: the end of its coding and the last chunk.
func (st *stream) appendBodyEnd() error {
	if c := st.compressor; c.enabled() && c.stream != nil {
		var err error
		c.compressed, err = c.stream.Close(c.compressed[:0])
		if c.stream = nil; err != nil {
			return err
		}
		st.head = relay.AppendChunk(st.head, c.compressed)
	}
	st.head = append(st.head, lastChunk...)
	return nil
}

// enabled says whether there is a coding on the stream.
func (c *streamCompressor) enabled() bool { return c != nil && c.active }

// release gives the encoder of a stream back that broke before its end.
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
