package front

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
)

// InProcessRequest describes a request that no HTTP client of a Server waits for: the rest
// of a stream whose engine failed, or one that came over another wire.
type InProcessRequest struct {
	Endpoint  *Endpoint
	RequestID string
	// Body is one JSON object. It is the Exchange's until the Handler has answered
	// and returned.
	Body     []byte
	MaxDepth int // as Options.MaxDepth
	// CheckFields applies the rules of a client's body (checkDoc) with MediaHosts: for a
	// body with members of a caller's, which the router has not checked.
	CheckFields bool
	MediaHosts  MediaHosts
	// Fields are its header lines: what engines may see of them is sent on.
	Fields    []upstream.Field
	Received  time.Time
	ClientIP  netip.Addr // invalid: none, which no steering.pinning but "any" and "unix" trusts
	Unix      bool       // it came over a unix socket, where file permissions say who may connect
	Principal Principal  // of the caller's key; nil: no keys are asked for
	Responder Responder
	// Lend is Exchange.Lend's; nil: what it lends is counted nowhere.
	LeaseMemory func(n int) (membudget.Lease, bool)
	// Budget is Exchange.Budget's; nil: nothing is counted.
	Budget *membudget.Budget
	Log    *slog.Logger // [slog.Default]
}

// Responder is who gets the answer of a detached Exchange: exactly one call of Refuse,
// Answer or Relay, on the Handler's goroutine, unless the Handler panics.
type Responder interface {
	ClientGoneNotifier
	// Refuse is Exchange.Error.
	RespondError(reason Reason, param, message string, retryAfter time.Duration)
	// Answer is a whole answer: an engine's, byte for byte, or the router's. body
	// is borrowed.
	Respond(status int, body []byte)
	// Relay is Exchange.Relay: the Party owns resp and call, and calls the hooks.
	Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks)
}

// NewExchange makes the Exchange of an in-process request. It fails with a
// *jsonscan.SyntaxError on a body that Scan refuses, and with a *FieldRefusal. It is for one Handler call, and
// not pooled.
func NewExchange(d *InProcessRequest) (*Exchange, error) {
	x := &Exchange{Endpoint: d.Endpoint, RequestID: d.RequestID, Received: d.Received, log: d.Log, responder: d.Responder, fields: d.Fields, ip: d.ClientIP, unix: d.Unix, principal: d.Principal, leaseMemory: d.LeaseMemory, budget: d.Budget}
	if err := x.Doc.Scan(d.Body, jsonscan.Limits{MaxDepth: d.MaxDepth}); err != nil {
		return nil, fmt.Errorf("front: cannot read the body of a detached request: %w", err)
	}
	if d.CheckFields {
		if bad := checkDoc(&x.Doc, d.MediaHosts); bad != nil {
			return nil, &FieldRefusal{Field: bad.name(), Reason: bad.reason, message: bad.message}
		}
	}
	if x.log == nil {
		x.log = slog.Default()
	}
	x.log = x.log.With("request_id", d.RequestID)
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

// EndpointOf is the inference endpoint of a path, nil when there is none.
func EndpointOf(path string) *Endpoint {
	for i := range Endpoints {
		if Endpoints[i].Path == path {
			return &Endpoints[i]
		}
	}
	return nil
}

// ResponseHeader is what SetHeader set, "" for nothing.
func (x *Exchange) ResponseHeader(name string) string {
	for i := range x.responseHeaders {
		if equalFold([]byte(x.responseHeaders[i].name), name) {
			return x.responseHeaders[i].value
		}
	}
	return ""
}

// respondInProcess gives a detached exchange's Party a whole answer.
func (x *Exchange) respondInProcess(status int, body []byte) {
	if x.claimResponse(status) {
		x.responder.Respond(status, body)
	}
}

// claimResponse says whether a detached exchange's Party is to be told now: once.
func (x *Exchange) claimResponse(status int) bool {
	if x.responseState != responsePending {
		x.Log().Error("the handler answered twice", "status", status)
		return false
	}
	x.responseState = responseWhole
	return true
}

// inProcessHeader is Header of a detached exchange; all lines of a name joined where
// they are asked for as a list.
func (x *Exchange) inProcessHeader(name string, list bool) (value []byte) {
	for i := range x.fields {
		if !equalFold([]byte(x.fields[i].Name), name) {
			continue
		}
		if !list {
			return []byte(x.fields[i].Value)
		}
		if value != nil {
			value = append(value, ',')
		}
		value = append(value, x.fields[i].Value...)
	}
	return value
}

// inProcessFields is ForwardFields of a detached exchange.
func (x *Exchange) inProcessFields(dst []upstream.Field) []upstream.Field {
	typed := false
	for _, f := range x.fields {
		name := []byte(f.Name)
		if c := classOf(name); neverForwarded(c) || c == headerIdentity {
			continue
		}
		typed = typed || equalFold(name, "Content-Type")
		dst = append(dst, f)
	}
	if !typed {
		dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	}
	return dst
}
