package front

import (
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"sluice/dataplane/ascii"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// Exchange is one admitted request and the way to respond to it. It is valid until the Handler has
// responded and returned. After Relay only Request().RequestID and what the RelayHooks captured are
// valid. Its methods must be called on the Handler's goroutine.
//
// An HTTP client's request is an httpExchange. A request without an HTTP client is an
// inProcessExchange; see NewExchange.
type Exchange interface {
	// Request returns what the Handler knows of the request. A Handler may change it before it
	// calls the next one.
	Request() *RequestInfo

	// Header returns the first value of a request header, nil if there is none. The slice is
	// borrowed until the Handler returns.
	Header(name string) []byte
	// HeaderList returns the values of all lines called name, in order, joined by commas (RFC
	// 9110, 5.3); nil if there is none. It allocates only if there are several lines.
	HeaderList(name string) []byte
	// OverrideRequestHeader replaces the client's header lines called name. Engines see the new
	// value too, unless headerrules.RequestTable withholds it.
	OverrideRequestHeader(name, value string)
	// ForwardFields appends the client's header lines that an engine may see to dst, with names
	// as the client wrote them: all except those that headerrules.RequestTable withholds or Connection
	// names. A missing Content-Type becomes application/json. Behind trusted proxies
	// X-Forwarded-For is RequestInfo.ClientIP. The strings are borrowed until the Handler
	// returns. Requests to engines also need HopField.
	ForwardFields(dst []upstream.Field) []upstream.Field

	// LeaseMemory returns n bytes that count against the budget for bodies, for a copy that may
	// outlive the exchange. It returns false if the budget refuses them. The caller must release
	// the lease.
	LeaseMemory(n int) (membudget.Lease, bool)
	// Budget returns the budget for the exchange's bodies. It is nil for an in-process exchange
	// without a budget.
	Budget() *membudget.Budget

	ClientGoneNotifier
	// SendsComments reports whether comments follow the engine's head of a stream
	// (Options.KeepAlive), so that the head must be sent as soon as the engine sends it.
	SendsComments() bool
	// MarkDispatched tells the server that the Handler sends a streaming request to an engine now.
	// With Options.EarlyHeaders the client then gets the response head when EarlyHeadersAfter has
	// passed, even if no engine has responded. The Handler need not know: a later response becomes
	// the rest of an event stream, and a refusal becomes an error event in the client's protocol.
	// MarkDispatched has no effect on other requests, or when it is called again.
	MarkDispatched()
	// FailAt sends the client an error and ends the connection at the given time, unless a
	// response has begun by then. For the Handler this looks like a client that has disconnected
	// (OnClientGone, ClientGone), and its later response is discarded. Thus the client does not
	// wait for work that the legs still need. FailAt has no effect for a zero time or an
	// in-process exchange, whose Responder handles deadlines itself.
	FailAt(at time.Time, reason Reason, message string)

	// SetHeader sets a response header, such as X-Sluice-Worker, for the response that follows. A
	// later call with the same name replaces the value. Control characters become spaces.
	SetHeader(name, value string)
	// ResponseHeader returns the value that SetHeader set, "" if it set none.
	ResponseHeader(name string) string
	// Error answers with an error body, X-Sluice-Reason and X-Request-Id. The body has OpenAI's
	// form ({"error":{message,type,param,code}}) or, for clients of the Messages API, Anthropic's.
	// param is the field at fault, "" for none. retryAfter > 0 adds Retry-After in whole seconds.
	// If the head of an event stream has been sent, the error becomes the stream's last event.
	Error(reason Reason, param, message string, retryAfter time.Duration)
	// Reply responds with an engine's status, its end-to-end headers and its body, byte for byte.
	// Only Date is the router's. Reply copies body, and the caller may release resp afterwards.
	Reply(resp *upstream.Response, body []byte)
	// ReplyJSON responds with a JSON body of the router. It copies body.
	ReplyJSON(status int, body []byte)
	// ReplyRefusal is ReplyJSON with the reason's status and X-Sluice-Reason, for a refusal in an
	// engine's own words. It is reported like that of Error.
	ReplyRefusal(reason Reason, body []byte)
	// ReplyEvents responds with status 200 and a complete event stream. It copies body.
	ReplyEvents(body []byte)
	// Relay answers with the engine's response resp. It composes the head now; package relay sends
	// the body after the Handler has returned. Relay owns resp and call: it cancels call when the
	// client disconnects, and releases resp at the end.
	Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks)

	// Log returns a logger whose lines carry the request id, the client and the key.
	Log() *slog.Logger
}

// RequestInfo is what a Handler knows of a request.
type RequestInfo struct {
	Endpoint  *Endpoint
	RequestID string       // the client's X-Request-Id if valid (1 to 128 visible ASCII), or a new one
	Doc       jsonscan.Doc // scanned; Doc.Body is the complete decoded body
	Received  time.Time    // when the head had been read
	// Principal is the holder of the request's key; nil: requests need no key.
	Principal Principal
	// ClientIP is the address of the client: the peer of the connection, or the address that
	// trusted proxies name (Options.Proxies). It is invalid if neither is known. All clients
	// behind an untrusted proxy have the proxy's address.
	ClientIP netip.Addr
	// Unix: the request came over a Unix socket, and thus not through a proxy. It is false for all
	// HTTP clients.
	Unix bool
	// Stored is the request of kind StoredResponse.
	Stored StoredRequest
	// SessionID is the session that a request of kind SessionFinish names, as the client has escaped
	// it in the path. It is not checked.
	SessionID string
	// Converter may be set by the Handler. It is called if the response is an event stream,
	// and returns the last conversion of that stream. chunked says that the stream has
	// chunk framing.
	Converter func(chunked bool) relay.Converter
	// Attached carries a value from one Handler to the next.
	Attached any
	// Reported may be set by a Handler that reports the request's end itself. A later Error is
	// then not passed to Options.OnRefused.
	Reported bool
}

// exchangeBase is what all kinds of Exchange have in common.
type exchangeBase struct {
	RequestInfo
	responseState   responseState
	responseHeaders []setHeader
	log             *slog.Logger
}

type setHeader struct{ name, value string }

// responseState says how an Exchange was responded to.
type responseState uint8

const (
	responsePending responseState = iota
	responseWhole                 // non-streaming
	responseRelayed               // the stream owns the connection
)

// Request implements Exchange.
func (x *exchangeBase) Request() *RequestInfo { return &x.RequestInfo }

// SetHeader implements Exchange.
func (x *exchangeBase) SetHeader(name, value string) {
	if strings.ContainsFunc(value, isControl) {
		value = strings.Map(func(r rune) rune {
			if isControl(r) {
				return ' '
			}
			return r
		}, value)
	}
	for i := range x.responseHeaders {
		if ascii.EqualFold(x.responseHeaders[i].name, name) {
			x.responseHeaders[i].value = value
			return
		}
	}
	x.responseHeaders = append(x.responseHeaders, setHeader{name, value})
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// ResponseHeader implements Exchange.
func (x *exchangeBase) ResponseHeader(name string) string {
	for i := range x.responseHeaders {
		if ascii.EqualFold(x.responseHeaders[i].name, name) {
			return x.responseHeaders[i].value
		}
	}
	return ""
}

// reset prepares x for the next request. It keeps the memory of Doc.
func (x *exchangeBase) reset() {
	x.Doc.Body = nil
	x.Endpoint, x.RequestID, x.Principal, x.ClientIP, x.Unix = nil, "", nil, netip.Addr{}, false
	x.Stored, x.SessionID, x.Converter, x.Attached, x.Reported = StoredRequest{}, "", nil, nil, false
	x.responseState, x.log = responsePending, nil
	clear(x.responseHeaders)
	x.responseHeaders = x.responseHeaders[:0]
}
