package front

import (
	"context"
	"log/slog"
	"net"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// Handler runs an admitted request to its end. It is called on the
// connection's goroutine and must answer exactly once: Error, Reply or Relay.
// After Relay it must return at once; the rest happens in RelayHooks.
type Handler interface {
	ServeInference(x *Exchange)
}

// Pages answers the routes that are not inference. Each returns status,
// content type and body; bodies are the callee's until the next call returns.
type Pages interface {
	Models() (status int, body []byte)  // GET /v1/models
	Ready() (status int, body []byte)   // GET /readyz
	Health() (status int, body []byte)  // GET /health
	Version() (status int, body []byte) // GET /version
	Metrics(w interface{ Write([]byte) (int, error) })
}

// Observer is told of what the front saw. Methods are called on the request's
// goroutine and must not block or allocate.
type Observer interface {
	Accepted()                                             // an inference request was admitted
	Refused(endpoint string, reason Reason)                // refused before or by the Handler
	Ended(endpoint string, status int, took time.Duration) // a response's last byte was written
	Panicked(requestID string, value any, stack []byte)    // recovered
	Connections(open int)                                  // changed
}

// Options of a Server; zero values mean the default in brackets.
type Options struct {
	Handler  Handler
	Pages    Pages
	Observer Observer // may be nil
	Log      *slog.Logger

	MaxBodyBytes      int64         // [32 MiB]
	BodyBudgetBytes   int64         // all bodies together [1 GiB]
	MaxHeadBytes      int           // [16 KiB]
	MaxDepth          int           // JSON nesting [64]
	HeadTimeout       time.Duration // [10s]
	BodyTimeout       time.Duration // plus size / 256 KiB/s [30s]
	IdleTimeout       time.Duration // keep-alive [75s]
	WriteTimeout      time.Duration // one flush [30s]
	StreamIdleTimeout time.Duration // between two reads from the engine of a stream [0: the Call's own deadlines]
	MaxConns          int           // [100_000]
	MaxConnsPerIP     int           // [0: no limit]
	Concurrency       int           // requests at once [256k, fasthttp's own]

	// StripForbidden: kv_transfer_params, disagg_prefill_resp, bootstrap_* and
	// disaggregated_params sent by a client are cut out instead of refused.
	StripForbidden bool
}

// Server is the front. One Server serves one listener.
type Server struct {
	impl server
}

type server struct{}

// New makes a Server; it fails on impossible Options.
func New(opt Options) (*Server, error) { panic("contract") }

// Serve accepts on ln until Shutdown; it returns nil after a Shutdown.
func (s *Server) Serve(ln net.Listener) error { panic("contract") }

// Shutdown closes the listener, answers new requests on kept-alive connections
// with 503 Draining and Connection: close, and waits for requests and streams
// under way until ctx ends; then it cuts them.
func (s *Server) Shutdown(ctx context.Context) error { panic("contract") }

// Exchange is one admitted request. It is valid until the Handler has answered
// and returned; after Relay, only RequestID and what RelayHooks captured.
type Exchange struct {
	Endpoint  *Endpoint
	RequestID string       // the client's X-Request-Id (checked, at most 128 visible ASCII), or made
	Doc       jsonscan.Doc // scanned; Doc.Body is the body, decoded and whole
	Received  time.Time    // when the head had been read
	Log       *slog.Logger // carries request_id

	impl exchange
}

type exchange struct{}

// Header gives a request header; nil when absent. Borrowed until return.
func (x *Exchange) Header(name string) []byte { panic("contract") }

// ForwardFields appends the client's header lines that an engine may see:
// end-to-end ones only (Authorization, Accept, X-Session-ID, traceparent, …);
// hop-by-hop, Host, Content-Length, Content-Encoding, X-Request-Id, X-Sluice-*
// and X-data-parallel-rank are left out. Strings are valid until return.
func (x *Exchange) ForwardFields(dst []upstream.Field) []upstream.Field { panic("contract") }

// OnGone arranges that f runs once, on another goroutine, within a few
// milliseconds of the client's closing or resetting its connection; at most
// one f at a time, a later call replaces it, nil removes it. f never runs after
// the exchange has ended, nor concurrently with the return of OnGone(nil).
func (x *Exchange) OnGone(f func()) { panic("contract") }

// Gone says whether the client has left.
func (x *Exchange) Gone() bool { panic("contract") }

// SetHeader adds a response header (X-Sluice-Worker, …) to whatever answer follows.
func (x *Exchange) SetHeader(name, value string) { panic("contract") }

// Error answers with the OpenAI error shape ({"error":{message,type,param,code}},
// Anthropic's on /v1/messages), X-Sluice-Reason, and X-Request-Id. param is the
// field at fault, "" for none. retryAfter > 0 adds Retry-After in whole seconds.
func (x *Exchange) Error(reason Reason, param, message string, retryAfter time.Duration) {
	panic("contract")
}

// Reply answers with an engine's status, its end-to-end headers and body, byte
// for byte. resp may be Released after it returns; body is copied.
func (x *Exchange) Reply(resp *upstream.Response, body []byte) { panic("contract") }

// ReplyJSON answers with a body of the router's own.
func (x *Exchange) ReplyJSON(status int, body []byte) { panic("contract") }

// RelayHooks are called from the relaying goroutine.
type RelayHooks struct {
	OnFirstToken func()
	// OnEnd is called once, after the last byte; the response has been
	// Released. Required.
	OnEnd func(relay.Result)
}

// Relay answers by streaming resp: head now, body by package relay after the
// Handler has returned. It owns resp and call from here on: call is cut when
// the client leaves, resp is Released at the end.
func (x *Exchange) Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	panic("contract")
}
