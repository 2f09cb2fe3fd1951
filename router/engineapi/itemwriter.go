package engineapi

import (
	"fmt"
	"time"

	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// itemWriter is the client side of a relayed stream: it receives the relay's bytes, splits them
// into events and converts each to an item. Everything else is done by the relay, as for every
// stream: idle timeouts, migration, the rewriting of the P/D families, an error event when the
// engine disconnects.
type itemWriter struct {
	converter
	chunked   bool
	idRecords bool // the relay replaces events that contain only ids by records
	chunks    upstream.Chunks
	events    sse.Splitter
}

// Write implements relay.ClientConn.
func (o *itemWriter) Write(p []byte) (int, error) {
	if !o.chunked {
		return len(p), o.payload(p)
	}
	for at := 0; at < len(p) && !o.chunks.Done(); {
		n, payload, err := o.chunks.Next(p[at:])
		at += n
		if err != nil {
			return at, fmt.Errorf("engineapi: the relay's framing: %w", err)
		}
		if err := o.payload(payload); err != nil {
			return at, err
		}
	}
	return len(p), nil
}

// maxEvent is the maximum size of an event. An event of a cumulative stream contains all text
// and ids so far.
const maxEvent = 8 << 20

func (o *itemWriter) payload(p []byte) error {
	o.events.MaxEvent = maxEvent
	for len(p) > 0 {
		if o.idRecords {
			if n, err := o.readRecord(p); err != nil {
				return err
			} else if n > 0 {
				p = p[n:]
				continue
			}
		}
		n, event, tooBig := o.events.Next(p)
		p = p[n:]
		switch {
		case tooBig:
			if err := o.fail(&failure{message: "an event of the engine is too long", kind: "upstream_error", code: 502}); err != nil {
				return err
			}
		case event != nil:
			if err := o.handleEvent(event); err != nil {
				return err
			}
		}
	}
	return nil
}

// SetWriteDeadline implements relay.ClientConn. It does nothing, because the receiver of the
// items has its own timeout.
func (o *itemWriter) SetWriteDeadline(time.Time) error { return nil }
