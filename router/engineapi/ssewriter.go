package engineapi

import (
	"sluice/dataplane/relay"
	"sluice/dataplane/sse"
)

// sseWriter writes the answer over HTTP: it encodes items as events in the framing with which
// the stream began. It is the relay's Converter.
type sseWriter struct {
	itemWriter
	buf         []byte // the last result's memory, with space for a chunk header before the events
	finished    bool   // the end of the stream was returned
	doneWritten bool   // [DONE] was written
}

func newSSEWriter(c converter, chunked bool) *sseWriter {
	e := &sseWriter{itemWriter: itemWriter{converter: c, chunked: chunked}, buf: make([]byte, sse.ChunkHeaderSize)}
	e.send = e.collect
	return e
}

// collect appends an item to the events of the current Convert.
func (e *sseWriter) collect(it *item) error {
	e.buf = jsonItems{}.append(e.buf, it)
	return nil
}

// Convert implements relay.Converter.
func (e *sseWriter) Convert(p []byte) ([]byte, error) {
	e.buf = e.buf[:sse.ChunkHeaderSize]
	if e.finished {
		return nil, nil
	}
	if _, err := e.itemWriter.Write(p); err != nil {
		return nil, err
	}
	last := e.chunked && e.chunks.Done()
	if last && !e.ended { // the engine ended the stream without a final event
		if err := e.flush(); err != nil {
			return nil, err
		}
	}
	return e.framed(last), nil
}

// End implements relay.Converter.
func (e *sseWriter) End(cause relay.Cause) []byte {
	e.buf = e.buf[:sse.ChunkHeaderSize]
	if e.finished {
		return nil
	}
	if e.hasPending { // only the usage is missing, and the converter has counted it
		_ = e.flush()
	} else {
		_ = e.fail(endReason(cause))
	}
	return e.framed(true)
}

// framed returns the collected events in the stream's framing. last marks the end of the
// stream.
func (e *sseWriter) framed(last bool) []byte {
	if e.ended && !e.doneWritten {
		e.doneWritten = true
		e.buf = append(e.buf, "data: [DONE]\n\n"...)
	}
	if !e.chunked {
		return e.buf[sse.ChunkHeaderSize:]
	}
	var from int
	e.buf, from = sse.FrameChunk(e.buf)
	if last {
		e.finished = true
		e.buf = append(e.buf, "0\r\n\r\n"...)
	}
	return e.buf[from:]
}
