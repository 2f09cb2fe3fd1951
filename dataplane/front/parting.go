package front

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/relay"
)

// Requests whose answer has not begun when a drain's time is over are answered by the
// drain in their handlers' place: a handler may have to wait for what must still be done
// for its legs, longer than the process has left.
//
// Which of the two answers is settled by one swap on the connection. The drain takes the
// exchange out of conn.open, has a pulse write what it has to say, and leaves that in
// Exchange.parting; a handler that comes to answer and finds its exchange taken out goes
// on with that pulse, as with one of Overdue: if it has written, nothing else is.

// openTo is where a drain finds the exchange of a connection; nil while there is none
// whose answer is still to begin.
type openTo = atomic.Pointer[Exchange]

const partingText = "the router is shutting down, and the answer to this request had not begun; send it again, another will answer"

// opens lets a drain answer this exchange from now on.
func (x *Exchange) opens() {
	x.opened = true
	x.c.open.Store(x)
}

// settle ends that: what x.early is from here on is no one else's to change.
func (x *Exchange) settle() {
	if !x.opened {
		return
	}
	x.opened = false
	if x.c.open.CompareAndSwap(x, nil) {
		return
	}
	x.srv.telling.Lock()
	x.early, x.parting = x.parting, nil
	x.srv.telling.Unlock()
}

// tellOpen has every request told whose answer has not begun, and gives their number.
func (s *Server) tellOpen() (n int) {
	for _, c := range s.conns.list() {
		s.telling.Lock()
		if x := c.open.Swap(nil); x != nil {
			x.parting = x.part()
			n++
		}
		s.telling.Unlock()
	}
	return n
}

// part makes the pulse that tells the client of x, or has the one there is do so. The
// handler runs meanwhile: of x only what was there before it began is looked at.
func (x *Exchange) part() *pulse {
	p := x.early
	if p == nil {
		p = &pulse{c: x.c}
	}
	path, id, ip, log, o := x.Endpoint.Path, x.RequestID, x.ip, x.srv.opt.Log, x.srv.opt.Observer
	if !p.mu.TryLock() {
		return p // it writes to a client that may take nothing: not to be waited for
	}
	defer p.mu.Unlock()
	if p.over || p.out && p.last != 0 {
		return p // the client has its answer, or has left
	}
	if p.out {
		events := appendErrorEvent(nil, x.Endpoint.Protocol, Drained, Drained.Status(), "", partingText, id)
		p.head, p.last = append(relay.AppendChunk(nil, events), lastChunk...), fasthttp.StatusOK
	} else {
		p.head, p.last = x.wholeError(Drained, partingText, drainRetry, nil), Drained.Status()
	}
	p.wrote = func() {
		if o != nil {
			o.Refused(path, Drained)
		}
		log.Warn("request ended by the end of the drain: its answer had not begun", "request_id", id, "client", ip, "endpoint", path, "reason", string(Drained))
	}
	p.at(0)
	return p
}

// wholeError is a refusal as the last answer of its connection, written by whom no
// fasthttp helps, with the header lines set. retryAfter > 0 adds Retry-After.
func (x *Exchange) wholeError(reason Reason, message string, retryAfter time.Duration, set []setHeader) []byte {
	body := appendError(nil, x.Endpoint.Protocol, reason, "", message, x.RequestID)
	status := reason.Status()
	text := append(strconv.AppendInt([]byte("HTTP/1.1 "), int64(status), 10), ' ')
	text = append(append(text, phrase(status)...), "\r\nContent-Type: application/json\r\n"...)
	text = appendLine(text, "Content-Length", strconv.Itoa(len(body)))
	text = appendLine(appendDate(text, time.Now()), "X-Request-Id", x.RequestID)
	text = appendLine(text, "X-Sluice-Reason", string(reason))
	if retryAfter > 0 {
		text = appendLine(text, "Retry-After", retrySeconds(retryAfter))
	}
	for i := range set {
		text = appendLine(text, set[i].name, set[i].value)
	}
	return append(append(text, "Connection: close\r\n\r\n"...), body...)
}

// retrySeconds is a Retry-After: whole seconds, rounded up.
func retrySeconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}
