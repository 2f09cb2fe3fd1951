package nixl

import (
	"context"
	"fmt"
)

// Notification is a message from a peer. From is the sender's own name, which NIXL does
// not verify. Message is borrowed until the handler returns.
type Notification struct {
	From    string
	Message []byte
}

// maxMessage limits a message; NIXL sends a notification eagerly, in one piece.
const maxMessage = 1 << 20

// maxSenders limits the table of names.
const maxSenders = 4096

// Post sends a message without waiting for NIXL's result. Up to 184 bytes, it costs no
// lock, no cgo call and no allocation. It returns ErrPeerDead if the peer is known to
// be down, and ErrFull if the agent does not keep up; a later failure is reported to
// OnPeerDown.
func (a *Agent) Post(p *Peer, message []byte) error {
	switch {
	case a.closing.Load():
		return ErrClosed
	case p.down.Load():
		return ErrPeerDead
	case len(message) > maxMessage:
		return &Error{Operation: "post a message", Status: InvalidParam, Hint: "it is longer than 1 MiB"}
	}
	return a.driver.post(p.handle, message)
}

// Notify sends a message and returns NIXL's result. Success means that the message was
// sent, not that it has arrived; sends to a peer that has just died may succeed.
func (a *Agent) Notify(ctx context.Context, p *Peer, message []byte) error {
	operation := fmt.Sprintf("notify %q", p.name)
	if len(message) > maxMessage {
		return &Error{Operation: operation, Status: InvalidParam, Hint: fmt.Sprintf("%d bytes; want at most %d", len(message), maxMessage)}
	}
	if p.Down() {
		return p.explain(&Error{Operation: operation, Status: PeerDead}, a.library)
	}
	_, err := a.call(ctx, &command{op: opNotify, handle: p.handle, data: message}, operation)
	return p.explain(err, a.library)
}

// notified passes a notification to the handler.
func (a *Agent) notified(e *event) {
	if int(e.aux) > len(e.data) {
		return
	}
	if p := a.probe.Load(); p != nil && string(e.data[:e.aux]) == p.from && string(e.data[e.aux:]) == probeMessage {
		select {
		case p.arrived <- struct{}{}:
		default:
		}
		return
	}
	if a.cfg.OnNotification == nil {
		return
	}
	from, ok := a.senderNames[string(e.data[:e.aux])]
	if !ok {
		from = string(e.data[:e.aux])
		if len(a.senderNames) >= maxSenders {
			clear(a.senderNames)
		}
		a.senderNames[from] = from
	}
	a.cfg.OnNotification(Notification{From: from, Message: e.data[e.aux:]})
}
