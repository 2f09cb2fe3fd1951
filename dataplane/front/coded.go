package front

import (
	"errors"
	"fmt"
	"strconv"

	"sluice/dataplane/coding"
	"sluice/dataplane/membudget"
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

// coder puts a coding on a stream; its buffers are kept from one stream to the next.
type coder struct {
	on      bool
	stream  *coding.Stream // nil once the end is written
	payload []byte
	coded   []byte
	out     []byte
}

// encodeStream has a stream encoded where that was configured and the client accepts
// it, and says so in the head.
func (x *Exchange) encodeStream(st *stream) {
	if !x.srv.live().CompressStreams || len(st.resp.Header("Content-Encoding")) > 0 {
		return
	}
	st.head = append(st.head, "Vary: Accept-Encoding\r\n"...)
	c := coding.Accepted(x.head.findAll("Accept-Encoding"))
	if c == coding.Identity {
		return
	}
	stream, err := c.NewStream()
	if err != nil {
		return // of a coding that cannot come in pieces
	}
	if st.coder == nil {
		st.coder = new(coder)
	}
	st.coder.on, st.coder.stream = true, stream
	st.head = appendLine(st.head, "Content-Encoding", c.String())
}

// writeCoded takes p out of the engine's chunks and sends what it held as one chunk of
// the coding, flushed: an event never waits for the next.
func (st *stream) writeCoded(p []byte) (int, error) {
	c := st.coder
	if c.stream == nil {
		return len(p), nil // behind the end
	}
	c.payload, c.out = c.payload[:0], c.out[:0]
	for at := 0; at < len(p) && !st.chunks.Done(); {
		n, payload, err := st.chunks.Next(p[at:])
		if err != nil {
			return 0, err
		}
		c.payload = append(c.payload, payload...)
		at += n
	}
	var err error
	if c.coded = c.coded[:0]; len(c.payload) > 0 {
		if c.coded, err = c.stream.Append(c.coded, c.payload); err != nil {
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
		c.out = strconv.AppendInt(c.out, int64(len(c.coded)), 16)
		c.out = append(c.out, "\r\n"...)
		c.out = append(c.out, c.coded...)
		c.out = append(c.out, "\r\n"...)
	}
	if done {
		c.out = append(c.out, "0\r\n\r\n"...)
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
	if cap(c.payload)+cap(c.coded)+cap(c.out) > most {
		*c = coder{}
		return
	}
	c.on, c.stream = false, nil
}
