package routed

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// outlet is the caller's end of a relayed stream: it takes the relay's bytes,
// finds the events in them, and has each made an item. The relay does the rest,
// as for every stream: idle times, migration, the families' rewriting, an error
// event where the engine leaves.
type outlet struct {
	converter
	chunked bool
	chunks  upstream.Chunks
	events  relay.Events
}

// Write implements relay.ClientConn.
func (o *outlet) Write(p []byte) (int, error) {
	if !o.chunked {
		return len(p), o.payload(p)
	}
	for at := 0; at < len(p) && !o.chunks.Done(); {
		n, payload, err := o.chunks.Next(p[at:])
		at += n
		if err != nil {
			return at, fmt.Errorf("routed: the relay's framing: %w", err)
		}
		if err := o.payload(payload); err != nil {
			return at, err
		}
	}
	return len(p), nil
}

// maxEvent bounds an event: one of a cumulative stream has all of its text and ids.
const maxEvent = 8 << 20

func (o *outlet) payload(p []byte) error {
	o.events.Most = maxEvent
	for len(p) > 0 {
		n, event, tooBig := o.events.Next(p)
		p = p[n:]
		switch {
		case tooBig:
			if err := o.fail(&failure{message: "an event of the engine is too long to be read", kind: "upstream_error", code: 502}); err != nil {
				return err
			}
		case event != nil:
			if err := o.event(event); err != nil {
				return err
			}
		}
	}
	return nil
}

// SetWriteDeadline implements relay.ClientConn: whoever takes the items has a
// bound of its own.
func (o *outlet) SetWriteDeadline(time.Time) error { return nil }

// eventsOut is an outlet over HTTP: items leave as events, in the framing that the
// stream began with.
type eventsOut struct {
	outlet
	dst     relay.ClientConn
	buf     []byte
	frame   []byte // the last one's memory
	ready   []byte
	closing bool
}

func newEventsOut(c converter, dst relay.ClientConn, chunked bool) *eventsOut {
	e := &eventsOut{dst: dst, outlet: outlet{converter: c, chunked: chunked}}
	e.send = e.take
	return e
}

// take gathers the items of one write of the relay's.
func (e *eventsOut) take(it *item) error {
	e.buf = asJSON{}.append(e.buf, it)
	return nil
}

// Write implements relay.ClientConn. What the relay wrote counts as written when
// all that was made of it is.
func (e *eventsOut) Write(p []byte) (int, error) {
	if len(e.ready) == 0 {
		e.buf = e.buf[:0]
		if _, err := e.outlet.Write(p); err != nil {
			return 0, err
		}
		done := e.chunked && e.chunks.Done()
		if done && !e.ended {
			// The engine ended without its last event.
			if err := e.flush(); err != nil {
				return 0, err
			}
		}
		if e.ended && !e.closing {
			e.closing = true
			e.buf = append(e.buf, "data: [DONE]\n\n"...)
		}
		e.ready = e.framed(e.buf, done)
	}
	n, err := e.dst.Write(e.ready)
	e.ready = e.ready[n:]
	if err == nil && len(e.ready) > 0 {
		err = errors.New("routed: a short write")
	}
	if err != nil {
		// Nothing of p may be given again as it is: the relay goes on from here.
		return 0, err
	}
	return len(p), nil
}

// framed puts what is to go out in the stream's framing.
func (e *eventsOut) framed(payload []byte, last bool) []byte {
	if !e.chunked {
		return payload
	}
	out := e.frame[:0]
	if len(payload) > 0 {
		out = strconv.AppendInt(out, int64(len(payload)), 16)
		out = append(append(append(out, "\r\n"...), payload...), "\r\n"...)
	}
	if last {
		out = append(out, "0\r\n\r\n"...)
	}
	e.frame = out
	return out
}

// SetWriteDeadline implements relay.ClientConn.
func (e *eventsOut) SetWriteDeadline(t time.Time) error { return e.dst.SetWriteDeadline(t) }
