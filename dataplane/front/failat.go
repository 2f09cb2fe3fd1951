package front

import (
	"errors"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// FailAt implements Exchange.
func (x *httpExchange) FailAt(at time.Time, reason Reason, message string) {
	if at.IsZero() || x.responseState != responsePending {
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
func (x *httpExchange) discardRelay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
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
