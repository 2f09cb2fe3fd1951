package front

import (
	"errors"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// Overdue has the client told at the given time, unless an answer has begun by then,
// that it gets none: an error, and the connection's end. To the Handler the client has
// left (OnGone, Gone); what it answers afterwards is nobody's. So the client need not
// wait for what must still be done for the legs. A zero time is none; a detached
// exchange's Party sees to it itself.
func (x *Exchange) Overdue(at time.Time, reason Reason, message string) {
	if at.IsZero() || x.party != nil || x.answer != unanswered {
		return
	}
	if x.settle(); x.early != nil {
		x.opens()
		return
	}
	x.early = &pulse{c: x.c, head: x.wholeError(reason, message, 0, x.set), last: reason.Status()}
	x.early.start(time.Until(at))
	x.opens()
}

var errOverdue = errors.New("front: the client was told that it gets no answer before this one began")

// relayOverdue is Relay of what comes too late.
func (x *Exchange) relayOverdue(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	call.Cut()
	resp.Release()
	x.endEvents(nil)
	cause := relay.Deadline
	if x.srv.cutting.Load() {
		cause = relay.Drained
	}
	hooks.end(relay.Result{Cause: cause, Err: errOverdue})
}

// endWrites tells the client that nothing more comes, while the handler still runs.
func (c *conn) endWrites() {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
