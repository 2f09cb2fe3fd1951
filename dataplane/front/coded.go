package front

import (
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"

	"sluice/dataplane/coding"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// decode takes a coding off the body; when it cannot, it answers and gives false.
func (x *Exchange) decode(c coding.Coding) bool {
	if c == coding.Identity {
		return true
	}
	limit := x.srv.live().MaxBodyBytes
	var room membudget.Lease
	decoded, err := c.Decode(x.Doc.Body, &room, x.srv.budget, limit)
	x.body.lease.Release()
	x.body.lease, x.Doc.Body = room, decoded
	switch {
	case err == nil:
		return true
	case errors.Is(err, coding.ErrTooLarge):
		x.Error(BodyTooLarge, "", "the request body is larger than "+strconv.FormatInt(limit, 10)+" bytes when its "+c.String()+" is decoded", 0)
	case errors.Is(err, coding.ErrBudget):
		return x.budgetSpent()
	case errors.Is(err, coding.ErrBusy):
		x.Error(DecodersBusy, "", "too many compressed request bodies are being decoded; try again, or send the body without Content-Encoding", budgetRetry)
	default:
		x.Error(BadHTTP, "", "cannot decode the request body: "+err.Error(), 0)
	}
	return false
}

// setBody makes a copy of body the answer's, in a coding that the client accepts
// where that makes it shorter.
func (x *Exchange) setBody(body []byte) {
	least := x.srv.live().CompressMin
	if least == 0 || len(body) < least {
		x.putBody(body)
		return
	}
	addLine(x, "Vary", "Accept-Encoding") // one more line: an engine's own stays
	c := coding.Accepted(x.head.findAll("Accept-Encoding"))
	if c == coding.Identity {
		x.putBody(body)
		return
	}
	room := membudget.Default.Get(len(body))
	defer membudget.Default.Put(room)
	encoded := c.Append(room.B[:0], body)
	if len(encoded) >= len(body) {
		x.putBody(body)
		return
	}
	addLine(x, "Content-Encoding", c.String())
	x.putBody(encoded)
}

// mostEncoded is how many answers that are no streams are encoded as they come at once, by
// Server.encoded: an encoder has up to 1 MB, which a slow client holds. Those beyond go out
// as they are.
const mostEncoded = 32

// coder puts a coding on a stream; its buffers are kept from one stream to the next.
type coder struct {
	on      bool
	counted *atomic.Int32  // of mostEncoded; nil: not counted
	stream  *coding.Stream // nil once the end is written
	payload []byte
	coded   []byte
	out     []byte
}

// encodeRelayed has an answer that is relayed encoded where that was configured and the
// client accepts it, and says so in the head. Its body goes out in chunks then, whatever
// its framing was.
func (x *Exchange) encodeRelayed(st *stream, kind []byte) (on bool) {
	resp, opt := st.resp, x.srv.live()
	asStream := opt.CompressStreams && resp.ContentLength == upstream.LengthChunked
	if !x.head.http11 || !asStream && !x.encodesAsItComes(resp, kind) || len(resp.Header("Content-Encoding")) > 0 {
		return false
	}
	st.head = append(st.head, "Vary: Accept-Encoding\r\n"...)
	c := coding.Accepted(x.head.findAll("Accept-Encoding"))
	if c == coding.Identity {
		return false
	}
	var counted *atomic.Int32
	if !asStream {
		counted = &x.srv.encoded
		if counted.Add(1) > mostEncoded {
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
	if st.coder == nil {
		st.coder = new(coder)
	}
	st.coder.on, st.coder.stream, st.coder.counted = true, stream, counted
	st.head = appendLine(st.head, "Content-Encoding", c.String())
	st.chunked = resp.ContentLength != upstream.LengthChunked
	return true
}

// encodesAsItComes says whether an answer that is relayed is encoded as one that is held
// whole would be: JSON that is as long as CompressMin, or does not tell how long. Nobody
// can say whether a coding makes another kind shorter before it has gone out.
func (x *Exchange) encodesAsItComes(resp *upstream.Response, kind []byte) bool {
	least := int64(x.srv.live().CompressMin)
	return least > 0 && (resp.ContentLength < 0 || resp.ContentLength >= least) && x.Converter == nil && namesJSON(kind)
}

// writeCoded takes p out of the engine's chunks, where it has any, and sends what it held
// as one chunk of the coding, flushed: an event never waits for the next.
func (st *stream) writeCoded(p []byte) (int, error) {
	c := st.coder
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
	if c.coded = c.coded[:0]; len(payload) > 0 {
		if c.coded, err = c.stream.Append(c.coded, payload); err != nil {
			return 0, err
		}
	}
	done := st.chunks.Done()
	if done {
		c.coded, err = c.stream.Close(c.coded)
		if c.stream = nil; err != nil {
			return 0, err
		}
	}
	if len(c.coded) > 0 {
		c.out = relay.AppendChunk(c.out, c.coded)
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

// endChunks puts what ends a body that was framed here behind the head, if that is not
// out: the end of its coding and the last chunk.
func (st *stream) endChunks() error {
	if c := st.coder; c.works() && c.stream != nil {
		var err error
		c.coded, err = c.stream.Close(c.coded[:0])
		if c.stream = nil; err != nil {
			return err
		}
		st.head = relay.AppendChunk(st.head, c.coded)
	}
	st.head = append(st.head, lastChunk...)
	return nil
}

// works says whether there is a coding on the stream.
func (c *coder) works() bool { return c != nil && c.on }

// end gives the encoder of a stream back that broke before its end.
func (c *coder) end() {
	if c == nil {
		return
	}
	const most = 64 << 10
	if c.stream != nil {
		_, _ = c.stream.Close(nil)
	}
	if c.counted != nil {
		c.counted.Add(-1)
		c.counted = nil
	}
	if cap(c.payload)+cap(c.coded)+cap(c.out) > most {
		*c = coder{}
		return
	}
	c.on, c.stream = false, nil
}
