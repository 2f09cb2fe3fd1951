package engineapi

import "sluice/dataplane/relay"

// sseWriter is an outlet over HTTP: it makes events of the items, in the framing that
// the stream began with. It is the relay's Converter.
type sseWriter struct {
	itemWriter
	buf         []byte // the last answer's memory; room for a chunk's head before the events
	finished    bool   // the last bytes are made
	doneWritten bool   // [DONE] is
}

func newSSEWriter(c converter, chunked bool) *sseWriter {
	e := &sseWriter{itemWriter: itemWriter{converter: c, chunked: chunked}, buf: make([]byte, relay.ChunkHeaderSize)}
	e.send = e.collect
	return e
}

// collect gathers the items of one piece of the relay's.
func (e *sseWriter) collect(it *item) error {
	e.buf = jsonItems{}.append(e.buf, it)
	return nil
}

// Convert implements relay.Converter.
func (e *sseWriter) Convert(p []byte) ([]byte, error) {
	e.buf = e.buf[:relay.ChunkHeaderSize]
	if e.finished {
		return nil, nil
	}
	if _, err := e.itemWriter.Write(p); err != nil {
		return nil, err
	}
	last := e.chunked && e.chunks.Done()
	if last && !e.ended { // the engine ended without its last event
		if err := e.flush(); err != nil {
			return nil, err
		}
	}
	return e.framed(last), nil
}

// End implements relay.Converter.
func (e *sseWriter) End(cause relay.Cause) []byte {
	e.buf = e.buf[:relay.ChunkHeaderSize]
	if e.finished {
		return nil
	}
	if e.hasPending { // what is missing is the usage, which was counted
		_ = e.flush()
	} else {
		_ = e.fail(endReason(cause))
	}
	return e.framed(true)
}

// framed is what was gathered in the stream's framing; last: it is the last of it.
func (e *sseWriter) framed(last bool) []byte {
	if e.ended && !e.doneWritten {
		e.doneWritten = true
		e.buf = append(e.buf, "data: [DONE]\n\n"...)
	}
	if !e.chunked {
		return e.buf[relay.ChunkHeaderSize:]
	}
	var from int
	e.buf, from = relay.FrameChunk(e.buf)
	if last {
		e.finished = true
		e.buf = append(e.buf, "0\r\n\r\n"...)
	}
	return e.buf[from:]
}
