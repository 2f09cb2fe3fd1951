package routed

import "sluice/dataplane/relay"

// eventsOut is an outlet over HTTP: it makes events of the items, in the framing that
// the stream began with. It is the relay's Converter.
type eventsOut struct {
	outlet
	buf     []byte // the last answer's memory; room for a chunk's head before the events
	whole   bool   // the last bytes are made
	closing bool   // [DONE] is
}

func newEventsOut(c converter, chunked bool) *eventsOut {
	e := &eventsOut{outlet: outlet{converter: c, chunked: chunked}, buf: make([]byte, relay.ChunkHead)}
	e.send = e.take
	return e
}

// take gathers the items of one piece of the relay's.
func (e *eventsOut) take(it *item) error {
	e.buf = asJSON{}.append(e.buf, it)
	return nil
}

// Convert implements relay.Converter.
func (e *eventsOut) Convert(p []byte) ([]byte, error) {
	e.buf = e.buf[:relay.ChunkHead]
	if e.whole {
		return nil, nil
	}
	if _, err := e.outlet.Write(p); err != nil {
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
func (e *eventsOut) End(cause relay.Cause) []byte {
	e.buf = e.buf[:relay.ChunkHead]
	if e.whole {
		return nil
	}
	if e.pending { // what is missing is the usage, which was counted
		_ = e.flush()
	} else {
		_ = e.fail(endedBy(cause))
	}
	return e.framed(true)
}

// framed is what was gathered in the stream's framing; last: it is the last of it.
func (e *eventsOut) framed(last bool) []byte {
	if e.ended && !e.closing {
		e.closing = true
		e.buf = append(e.buf, "data: [DONE]\n\n"...)
	}
	if !e.chunked {
		return e.buf[relay.ChunkHead:]
	}
	var from int
	e.buf, from = relay.FrameChunk(e.buf)
	if last {
		e.whole = true
		e.buf = append(e.buf, "0\r\n\r\n"...)
	}
	return e.buf[from:]
}
