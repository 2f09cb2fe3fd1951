package front

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"time"

	"sluice/dataplane/ascii"
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
	// CheckFields applies the rules of a client's body (checkDoc) with MediaHosts: for a
	// body with members of a caller's, which the router has not checked.
	CheckFields bool
	MediaHosts  MediaHosts
	// Fields are its header lines. Engines see those that requestHeaderTable does not
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

// NewExchange makes the Exchange of an in-process request. It fails with a
// *jsonscan.SyntaxError on a body that Scan refuses, and with a *FieldRefusal. The
// Exchange is valid for one call of a Handler and is not pooled.
func NewExchange(d *InProcessRequest) (*Exchange, error) {
	x := &Exchange{Endpoint: d.Endpoint, RequestID: d.RequestID, Received: d.Received, log: d.Log, responder: d.Responder, fields: d.Fields, ip: d.ClientIP, unix: d.Unix, principal: d.Principal, leaseMemory: d.LeaseMemory, budget: d.Budget}
	if err := x.Doc.Scan(d.Body, jsonscan.Limits{MaxDepth: d.MaxDepth}); err != nil {
		return nil, fmt.Errorf("front: cannot parse the body of an in-process request: %w", err)
	}
	if d.CheckFields {
		if bad := checkDoc(&x.Doc, d.MediaHosts); bad != nil {
			return nil, &FieldRefusal{Field: bad.name(), Reason: bad.reason, message: bad.message}
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

// ResponseHeader returns the value that SetHeader set, "" if it set none.
func (x *Exchange) ResponseHeader(name string) string {
	for i := range x.responseHeaders {
		if ascii.EqualFold(x.responseHeaders[i].name, name) {
			return x.responseHeaders[i].value
		}
	}
	return ""
}

// respondInProcess passes a non-streaming response to the Responder.
func (x *Exchange) respondInProcess(status int, body []byte) {
	if x.claimResponse(status) {
		x.responder.Respond(status, body)
	}
}

// claimResponse returns true for the first response of an in-process exchange.
func (x *Exchange) claimResponse(status int) bool {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", status)
		return false
	}
	x.responseState = responseWhole
	return true
}

// inProcessHeader is Header of an in-process exchange, or HeaderList if list is true.
func (x *Exchange) inProcessHeader(name string, list bool) (value []byte) {
	for i := range x.fields {
		if !ascii.EqualFold(x.fields[i].Name, name) {
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

// inProcessFields is ForwardFields of an in-process exchange.
func (x *Exchange) inProcessFields(dst []upstream.Field) []upstream.Field {
	typed := false
	for _, f := range x.fields {
		name := []byte(f.Name)
		if c := classOf(name); neverForwarded(c) || c == headerIdentity {
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
