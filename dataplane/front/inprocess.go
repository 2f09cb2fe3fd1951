package front

import (
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"strconv"
	"time"

	"sluice/dataplane/ascii"
	"sluice/dataplane/fieldrules"
	"sluice/dataplane/headerrules"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
)

// InProcessRequest is a request without an HTTP client: the rest of a stream whose engine
// failed, or a request from another protocol such as the framed socket.
type InProcessRequest struct {
	Endpoint  *Endpoint
	RequestID string
	// Body is one JSON object. The Exchange borrows it until the Handler has responded and
	// returned.
	Body     []byte
	MaxDepth int // as Options.MaxDepth
	// CheckFields applies the rules of a client's body (fieldrules.Check) with MediaHosts: for a
	// body with members of a caller's, which the router has not checked.
	CheckFields bool
	MediaHosts  fieldrules.MediaHosts
	// Fields are its header lines. Engines see those that headerrules.RequestTable does not
	// withhold.
	Fields    []upstream.Field
	Received  time.Time
	ClientIP  netip.Addr // invalid: unknown; steering.pinning then trusts it only with "any" or "unix"
	Unix      bool       // it came over a Unix socket, whose file permissions control access
	Principal Principal  // of the caller's key; nil: requests need no key
	Responder Responder
	// LeaseMemory implements Exchange.LeaseMemory; nil: its memory is not counted.
	LeaseMemory func(n int) (membudget.Lease, bool)
	// Budget is the result of Exchange.Budget; nil: memory is not counted.
	Budget *membudget.Budget
	Log    *slog.Logger // [slog.Default]
}

// Responder receives the response of an in-process Exchange: exactly one call of
// RespondError, Respond or Relay on the Handler's goroutine, unless the Handler panics.
type Responder interface {
	ClientGoneNotifier
	// RespondError receives Exchange.Error.
	RespondError(reason Reason, param, message string, retryAfter time.Duration)
	// Respond receives a non-streaming response: an engine's, byte for byte, or the
	// router's. body is borrowed until it returns.
	Respond(status int, body []byte)
	// Relay receives Exchange.Relay. The Responder owns resp and call, and calls the hooks.
	Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks)
}

// inProcessExchange is the Exchange of a request without an HTTP client.
type inProcessExchange struct {
	exchangeBase
	responder   Responder
	fields      []upstream.Field // header lines
	leaseMemory func(n int) (membudget.Lease, bool)
	budget      *membudget.Budget
}

// NewExchange makes the Exchange of an in-process request. It fails with a
// *jsonscan.SyntaxError on a body that Scan refuses, and with a *FieldRefusal. The
// Exchange is valid for one call of a Handler and is not pooled.
func NewExchange(d *InProcessRequest) (Exchange, error) {
	x := &inProcessExchange{responder: d.Responder, fields: d.Fields, leaseMemory: d.LeaseMemory, budget: d.Budget}
	x.Endpoint, x.RequestID, x.Received = d.Endpoint, d.RequestID, d.Received
	x.Principal, x.ClientIP, x.Unix, x.log = d.Principal, d.ClientIP, d.Unix, d.Log
	if err := x.Doc.Scan(d.Body, jsonscan.Limits{MaxDepth: d.MaxDepth}); err != nil {
		return nil, fmt.Errorf("front: cannot parse the body of an in-process request: %w", err)
	}
	if d.CheckFields {
		if bad := fieldrules.Check(&x.Doc, d.MediaHosts); bad != nil {
			return nil, &FieldRefusal{Field: bad.Field(), Reason: reasonOf(bad), message: bad.Message}
		}
	}
	if x.log == nil {
		x.log = slog.Default()
	}
	x.log = x.log.With("request", d.RequestID)
	if d.Principal != nil {
		x.log = x.log.With("key", d.Principal.Name())
	}
	return x, nil
}

// FieldRefusal is the error of NewExchange for a member that a client may not send, or not
// send so.
type FieldRefusal struct {
	Field   string // its path, as messages.0.content.1.image_url
	Reason  Reason
	message string
}

func (r *FieldRefusal) Error() string { return "field " + strconv.Quote(r.Field) + " " + r.message }

// EndpointOf returns the inference endpoint with the given path, nil if there is none.
func EndpointOf(path string) *Endpoint {
	for i := range Endpoints {
		if Endpoints[i].Path == path {
			return &Endpoints[i]
		}
	}
	return nil
}

// Log implements Exchange.
func (x *inProcessExchange) Log() *slog.Logger { return x.log }

// Header implements Exchange.
func (x *inProcessExchange) Header(name string) []byte {
	for i := range x.fields {
		if ascii.EqualFold(x.fields[i].Name, name) {
			return []byte(x.fields[i].Value)
		}
	}
	return nil
}

// HeaderList implements Exchange.
func (x *inProcessExchange) HeaderList(name string) (value []byte) {
	for i := range x.fields {
		if !ascii.EqualFold(x.fields[i].Name, name) {
			continue
		}
		if value != nil {
			value = append(value, ',')
		}
		value = append(value, x.fields[i].Value...)
	}
	return value
}

// OverrideRequestHeader implements Exchange.
func (x *inProcessExchange) OverrideRequestHeader(name, value string) {
	kept := make([]upstream.Field, 0, len(x.fields)+1) // fields is the caller's
	for _, f := range x.fields {
		if !ascii.EqualFold(f.Name, name) {
			kept = append(kept, f)
		}
	}
	x.fields = append(kept, upstream.Field{Name: name, Value: value})
}

// ForwardFields implements Exchange.
func (x *inProcessExchange) ForwardFields(dst []upstream.Field) []upstream.Field {
	typed := false
	for _, f := range x.fields {
		name := []byte(f.Name)
		if c := headerrules.OfRequest(name); c.NeverForwarded() || c == headerrules.Identity {
			continue
		}
		typed = typed || ascii.EqualFold(name, "Content-Type")
		dst = append(dst, f)
	}
	if !typed {
		dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	}
	return dst
}

// LeaseMemory implements Exchange.
func (x *inProcessExchange) LeaseMemory(n int) (membudget.Lease, bool) {
	if x.leaseMemory != nil {
		return x.leaseMemory(n)
	}
	return membudget.Default.Lease(unbounded, n)
}

var unbounded = membudget.NewBudget(math.MaxInt64)

// Budget implements Exchange.
func (x *inProcessExchange) Budget() *membudget.Budget { return x.budget }

// OnClientGone implements Exchange.
func (x *inProcessExchange) OnClientGone(f func()) {
	if x.responseState != responseRelayed {
		x.responder.OnClientGone(f)
	}
}

// ClientGone implements Exchange.
func (x *inProcessExchange) ClientGone() bool { return x.responder.ClientGone() }

// SendsComments implements Exchange.
func (x *inProcessExchange) SendsComments() bool { return false }

// MarkDispatched implements Exchange.
func (x *inProcessExchange) MarkDispatched() {}

// FailAt implements Exchange.
func (x *inProcessExchange) FailAt(time.Time, Reason, string) {}

// Error implements Exchange.
func (x *inProcessExchange) Error(reason Reason, param, message string, retryAfter time.Duration) {
	if x.claimResponse(reason.Status()) {
		x.responder.RespondError(reason, param, message, retryAfter)
	}
}

// Reply implements Exchange.
func (x *inProcessExchange) Reply(resp *upstream.Response, body []byte) {
	x.ReplyJSON(resp.Status, body)
}

// ReplyJSON implements Exchange.
func (x *inProcessExchange) ReplyJSON(status int, body []byte) {
	if x.claimResponse(status) {
		x.responder.Respond(status, body)
	}
}

// ReplyRefusal implements Exchange.
func (x *inProcessExchange) ReplyRefusal(reason Reason, body []byte) {
	x.ReplyJSON(reason.Status(), body)
}

// ReplyEvents implements Exchange.
func (x *inProcessExchange) ReplyEvents(body []byte) { x.ReplyJSON(200, body) }

// Relay implements Exchange.
func (x *inProcessExchange) Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", resp.Status)
		discardSecondRelay(resp, call, hooks)
		return
	}
	x.responseState = responseRelayed
	x.responder.Relay(resp, call, hooks)
}

// claimResponse returns true for the first response.
func (x *inProcessExchange) claimResponse(status int) bool {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", status)
		return false
	}
	x.responseState = responseWhole
	return true
}
