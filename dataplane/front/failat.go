package front

import (
	"errors"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// FailAt sends the client an error and ends the connection at the given time, unless a response
// has begun by then. For the Handler this looks like a client that has disconnected
// (OnClientGone, ClientGone), and its later response is discarded. Thus the client does not
// wait for work that the legs still need. FailAt has no effect for a zero time or an
// in-process exchange, whose Responder handles deadlines itself.
func (x *Exchange) FailAt(at time.Time, reason Reason, message string) {
	if at.IsZero() || x.responder != nil || x.responseState != responsePending {
		return
	}
	if x.clearDrainTarget(); x.keepAlive != nil {
		x.setDrainTarget()
		return
	}
	x.keepAlive = &keepAliveWriter{c: x.c, head: x.rawErrorResponse(reason, message, 0, x.responseHeaders), finalStatus: reason.Status()}
	x.keepAlive.start(time.Until(at))
	x.setDrainTarget()
}

var errRespondedAtDeadline = errors.New("front: the client already has the answer that its deadline passed")

// discardRelay is Relay of a response that comes after the error of FailAt.
func (x *Exchange) discardRelay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	call.Cancel()
	resp.Release()
	x.finishEventStream(nil)
	cause := relay.Deadline
	if x.srv.drainExpired.Load() {
		cause = relay.Drained
	}
	hooks.notifyEnd(relay.Result{Cause: cause, Err: errRespondedAtDeadline})
}

// closeWrite shuts down the sending side of the connection, so that the client sees the end of
// the response while the Handler still runs.
func (c *conn) closeWrite() {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
