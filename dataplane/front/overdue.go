package front

import (
	"errors"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// Overdue has the client told at the given time, unless an answer has begun by then,
// that it gets none: an error, and the connection's end. To the Handler the client has
// left (OnGone, Gone); what it answers afterwards is nobody's. So the client need not
// wait for what must still be done for the legs. A zero time is none; a detached
// exchange's Party sees to it itself.
func (x *Exchange) Overdue(at time.Time, reason Reason, message string) {
	if at.IsZero() || x.party != nil || x.early != nil || x.answer != unanswered {
		return
	}
	body := appendError(nil, x.Endpoint.Protocol, reason, "", message, x.RequestID)
	status := reason.Status()
	text := append(strconv.AppendInt([]byte("HTTP/1.1 "), int64(status), 10), ' ')
	text = append(append(text, fasthttp.StatusMessage(status)...), "\r\nContent-Type: application/json\r\n"...)
	text = appendLine(text, "Content-Length", strconv.Itoa(len(body)))
	text = appendLine(text, "X-Request-Id", x.RequestID)
	text = appendLine(text, "X-Sluice-Reason", string(reason))
	for i := range x.set {
		text = appendLine(text, x.set[i].name, x.set[i].value)
	}
	text = append(append(text, "Connection: close\r\n\r\n"...), body...)
	x.early = &pulse{c: x.c, head: text, last: status}
	x.early.start(time.Until(at))
}

var errOverdue = errors.New("front: the client's time was over before the answer began")

// relayOverdue is Relay of what comes too late.
func (x *Exchange) relayOverdue(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	call.Cut()
	resp.Release()
	x.endEvents(nil)
	if hooks.OnEnd != nil {
		hooks.OnEnd(relay.Result{Cause: relay.ClientGone, Err: errOverdue})
	}
}

// endWrites tells the client that nothing more comes, while the handler still runs.
func (c *conn) endWrites() {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
