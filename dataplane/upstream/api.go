package upstream

import (
	"crypto/tls"
	"errors"
	"time"
)

// Options of an Endpoint; zero values mean the default in brackets.
type Options struct {
	TLS            *tls.Config   // for https; ServerName is always set
	MaxConns       int           // open at once [4096]; beyond it Do fails with ErrTooManyConns
	MaxIdle        int           // kept alive [256]
	IdleTimeout    time.Duration // an idle connection older than this is not reused [4s, below uvicorn's 5s]
	ConnectTimeout time.Duration // [2s]
	MaxHeadBytes   int           // response head [64 KiB]
}

// Endpoint is one engine server ("http://host:port" with an optional path
// prefix) and its pool of connections. Safe for concurrent use.
type Endpoint struct {
	impl endpoint
}

type endpoint struct{}

// NewEndpoint makes an Endpoint for rawURL; nothing is dialled yet.
func NewEndpoint(rawURL string, opt Options) (*Endpoint, error) { panic("contract") }

// URL is the endpoint's base URL.
func (e *Endpoint) URL() string { panic("contract") }

// Close closes idle connections; calls under way go on, and their connections
// are closed when they end.
func (e *Endpoint) Close() { panic("contract") }

// Field is one header line.
type Field struct{ Name, Value string }

// Request is one HTTP/1.1 request. Host, Content-Length and Connection are the
// endpoint's own to write; Fields must not hold them (they are dropped).
type Request struct {
	Method string
	Path   string // with query, beginning with "/"
	Fields []Field
	Body   [][]byte // written by one writev with the head; borrowed until Do returns
	// HeadTimeout bounds the wait from the request's last byte to the
	// response head; 0 means no bound but Deadline.
	HeadTimeout time.Duration
	// Deadline bounds the whole call, body included; zero means none.
	Deadline time.Time
}

// Sentinels a caller decides on (errors.Is).
var (
	ErrCut          = errors.New("upstream: call was cut")
	ErrTooManyConns = errors.New("upstream: too many connections to the engine")
	ErrTimeout      = errors.New("upstream: engine did not answer in time")
	ErrProtocol     = errors.New("upstream: engine broke HTTP")
)

// Phase says how far a failed call had come.
type Phase uint8

// The phases of a call.
const (
	PhaseDial  Phase = iota // no byte was sent: always safe to run elsewhere
	PhaseWrite              // part or all of the request was sent
	PhaseHead               // sent, no whole response head came
	PhaseBody               // the head came, the body did not end well
)

// Error is what Do and the Response's methods fail with.
type Error struct {
	Endpoint string
	Phase    Phase
	Err      error
}

// Error implements error.
func (e *Error) Error() string { panic("contract") }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Call is the handle by which another goroutine ends a leg. The zero value is
// ready; one Call serves one Do.
type Call struct {
	impl call
}

type call struct{}

// Cut closes the leg's connection; a Do or read under way returns ErrCut. It
// may be called at any time, before Do as well, more than once, from anywhere.
func (c *Call) Cut() { panic("contract") }

// WasCut says whether Cut was called.
func (c *Call) WasCut() bool { panic("contract") }

// Do sends req and reads the response head. A request that fails on a reused
// connection before any response byte came, because the engine had closed that
// idle connection, is sent once more on a fresh one.
func (e *Endpoint) Do(req *Request, call *Call) (*Response, error) { panic("contract") }

// Response is a response whose head has been read. Exactly one of ReadAll,
// relay's use of Raw, or Discard consumes the body; then Release.
type Response struct {
	Status        int
	ContentLength int64 // -1: chunked; -2: ends with the connection
	impl          response
}

type response struct{}

// Header gives the first value of a header, matched without case; nil when
// absent. Borrowed until Release.
func (r *Response) Header(name string) []byte { panic("contract") }

// VisitHeaders calls f for every header line in order, hop-by-hop ones
// (Connection and those it names, Keep-Alive, Transfer-Encoding, Content-Length,
// Upgrade, Trailer, TE, Proxy-*) left out. Slices are borrowed until Release.
func (r *Response) VisitHeaders(f func(name, value []byte)) { panic("contract") }

// ReadAll appends the decoded body to dst; a body over limit is an error.
func (r *Response) ReadAll(dst []byte, limit int) ([]byte, error) { panic("contract") }

// ReadRaw reads the next bytes of the response as they came after the head,
// chunk framing included (relay parses it). SetReadDeadline applies.
func (r *Response) ReadRaw(p []byte) (int, error) { panic("contract") }

// SetReadDeadline bounds the next reads.
func (r *Response) SetReadDeadline(t time.Time) error { panic("contract") }

// Finish tells that the raw body was consumed to its very end, so that Release
// may keep the connection.
func (r *Response) Finish() { panic("contract") }

// Release gives the connection back to the pool when the body was consumed to
// its end and the engine keeps it alive, else closes it. Call exactly once.
func (r *Response) Release() { panic("contract") }
