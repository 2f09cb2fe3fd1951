package front

import (
	"errors"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// FailAt has the client told at the given time, unless an answer has begun by then,
// that it gets none: an error, and the connection's end. To the Handler the client has
// left (OnClientGone, Gone); what it answers afterwards is nobody's. So the client need not
// wait for what must still be done for the legs. A zero time is none; a detached
// exchange's Party sees to it itself.
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

var errRespondedAtDeadline = errors.New("front: the client was told that it gets no answer before this one began")

// discardRelay is Relay of what comes too late.
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

// closeWrite tells the client that nothing more comes, while the handler still runs.
func (c *conn) closeWrite() {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
