package front

import (
	"crypto/tls"
	"io"
	"log/slog"
	"time"

	"sluice/dataplane/fieldrules"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
)

// Handler runs an admitted request. It is called on the connection's goroutine and must
// respond exactly once, by Error, Reply or Relay. After Relay it must return at once; the
// RelayHooks are called for the rest.
type Handler interface {
	ServeInference(x Exchange)
}

// Pages renders the routes that are not inference. A returned body belongs to the callee and
// is valid until the next call of the method returns.
type Pages interface {
	Models() (status int, body []byte) // GET /v1/models
	// Ready and Health render GET /readyz and GET /health. With details they name workers,
	// models, addresses and files; without details they must not.
	Ready(details bool) (status int, body []byte)
	Health(details bool) (status int, body []byte)
	Version() (status int, body []byte) // GET /version
	// Metrics writes GET /metrics to w, in the format that the request's Accept header asks for,
	// and returns its Content-Type.
	Metrics(w io.Writer, accept string) (contentType string)
}

// Observer receives the server's events. Its methods are called on the request's goroutine and
// must not block or allocate.
type Observer interface {
	Accepted()                                                     // an inference request was admitted
	Refused(endpoint string, reason Reason)                        // refused before or by the Handler
	ResponseIncomplete(endpoint string, cause relay.Cause)         // a client did not read a non-streaming response; ResponseEnded follows
	ResponseEnded(endpoint string, status int, took time.Duration) // a response's last byte was written
	Panicked(requestID string, value any, stack []byte)            // recovered
	Connections(open int)                                          // the number of open connections changed
}

// Authenticator decides by API keys who may send requests. It is called on the request's
// goroutine before the body is read, and must not block.
type Authenticator interface {
	// Authenticate returns the principal of key, or the reason to reject the request; both
	// if the principal is known. key is borrowed until it returns and nil if the client
	// sent none. With counts the request counts against the principal's limits; requests
	// for pages do not.
	Authenticate(key []byte, counts bool) (Principal, *Rejection)
}

// Principal is the holder of an API key. It outlives the request.
type Principal interface {
	// Name returns the name of the key in the configuration. It is not secret; logs and metrics show it.
	Name() string
	Allows(model string) bool // "": every model
	// CheckLimits returns why a request would be rejected now, nil if it would not be. It
	// reserves nothing.
	CheckLimits() *Rejection
	// Reserve reserves tokens for a request, or returns why it cannot. One Commit must
	// follow each successful Reserve.
	Reserve(tokens int) *Rejection
	// Commit replaces the tokens reserved for a request by those that it has spent.
	Commit(reserved, spent int)
	// Adjust replaces the tokens that an earlier Commit has charged by those that were spent.
	Adjust(charged, spent int)
	// VisitLimitHeaders calls show with the response headers about the remaining quota.
	VisitLimitHeaders(show func(name, value string))
}

// Rejection is the reason why a request is not admitted.
type Rejection struct {
	Reason     Reason
	Message    string
	RetryAfter time.Duration
}

// Options of a Server. A zero value means the default in brackets.
type Options struct {
	Handler  Handler
	Pages    Pages
	Observer Observer // may be nil
	// OnRefused is called for each request that the router answers with an error of its own; it
	// may be nil, and must not block.
	OnRefused     func(Refusal)
	Log           *slog.Logger
	Authenticator Authenticator // nil: requests need no key
	TLS           *tls.Config   // nil: plain HTTP

	MaxBodyBytes    int64 // [32 MiB]
	BodyBudgetBytes int64 // all bodies together [1 GiB]
	// Budget counts the bodies; other components may count in it too. Change sets its limit
	// to BodyBudgetBytes. [a budget of the server's own with BodyBudgetBytes]
	Budget            *membudget.Budget
	MaxHeadBytes      int           // [16 KiB]
	MaxDepth          int           // JSON nesting [64]
	HeadTimeout       time.Duration // [10s]
	BodyTimeout       time.Duration // plus size / 256 KiB/s [30s]
	BodyIdleTimeout   time.Duration // without a byte of the body [15s]
	IdleTimeout       time.Duration // keep-alive [75s]
	WriteTimeout      time.Duration // one flush [30s]
	StreamIdleTimeout time.Duration // between two reads from the engine of a stream [0: the Call's own deadlines]
	MaxConns          int           // [100_000]
	MaxConnsPerIP     int           // [0: no limit]

	// CompressMin is the smallest non-streaming response in bytes that is compressed for
	// clients that accept it; 0: none is. Of relayed responses JSON alone is compressed,
	// see compressRelayed. Compressed requests are always accepted; MaxBodyBytes bounds
	// their decoded length.
	CompressMin int
	// CompressStreams compresses streams too, event by event.
	CompressStreams bool

	CORS    *CORS   // nil: no CORS headers
	Proxies Proxies // which proxies are trusted about the client's address

	// WithholdClientKeys keeps the clients' API keys from engines, because the keys are
	// meant for this router or the router sends engines its own. It is always true with an
	// Authenticator.
	WithholdClientKeys bool

	// EarlyHeaders sends the head of a stream EarlyHeadersAfter after the request was sent
	// to an engine (Exchange.MarkDispatched) if the engine has not responded by then. The
	// status is then 200 already, so that later failures become error events.
	EarlyHeaders      bool
	EarlyHeadersAfter time.Duration // [0: at once]
	// KeepAlive is the interval of comments to a client whose stream has begun while the
	// engine's first byte is awaited; 0: none.
	KeepAlive time.Duration

	drainTime time.Duration // for the rest of an unwanted body; tests change it

	RelayMode    RelayMode // what drives streams [RelayLoop]
	RelayThreads int       // event loops [one for each CPU]

	// StripForbidden removes members that only the router may write (kv_transfer_params,
	// bootstrap_* and others, see engineFields) from a client's body instead of refusing it.
	StripForbidden bool
	// MediaHosts are the hosts from which engines may fetch images, video and audio that
	// clients name by URL [none: data: URLs only].
	MediaHosts fieldrules.MediaHosts
}

// ClientGoneNotifier reports that a client has disconnected.
type ClientGoneNotifier interface {
	// OnClientGone registers f, which runs once on another goroutine within a few milliseconds
	// after the client closes or resets its connection. A later call replaces f, and nil removes
	// it. f does not run after the exchange has ended or after OnClientGone(nil) has returned,
	// which waits for a running f. Therefore f must neither block nor call OnClientGone.
	OnClientGone(f func())
	// ClientGone reports whether the client has disconnected.
	ClientGone() bool
}

// RelayMode says what drives streams after their head has been sent.
type RelayMode string

// The relay modes.
const (
	RelayLoop      RelayMode = "loop"      // event loops; goroutines if the kernel refuses them
	RelayGoroutine RelayMode = "goroutine" // a goroutine for each stream
)

// StreamHandler receives the events of one relayed stream. It is an interface and not a set
// of functions because there is one for each stream.
type StreamHandler interface {
	// FirstToken is called on the relaying thread and must not block.
	FirstToken()
	// Ended is called once after the last byte, on a goroutine. The response has been
	// released by then.
	Ended(relay.Result)
	// NextEngine is called when the engine of a stream with a Transcript fails. It returns
	// the response of another worker and its call, which the server owns from then on; nil
	// if there is none. It is called on a goroutine and may block. client reports a
	// disconnect of the client, as an Exchange does for a Handler.
	NextEngine(b relay.Interruption, client ClientGoneNotifier) (*upstream.Response, *upstream.Call)
}

// ResponseIDObserver is a StreamHandler that receives the id of the streamed response.
type ResponseIDObserver interface {
	// ResponseID is called at most once, on the relaying thread, and must not block.
	ResponseID(id string)
}

// Doner is a StreamHandler that is called when the last event of the stream has been read. The
// engine's HTTP response may end later. See relay.ClientConn.
type Doner interface {
	// Done is called at most once, on the relaying thread, and must not block.
	Done(usage relay.Usage, failed bool)
}

// RelayHooks are the options of Exchange.Relay for one stream.
type RelayHooks struct {
	// Handler receives the stream's events; may be nil.
	Handler StreamHandler
	// Rewrite changes the events of the stream; may be nil.
	Rewrite sse.Rewriter
	// Transcript lets another engine continue the stream if its engine fails; may be nil.
	// With a Transcript, Rewrite is not used.
	Transcript *transcript.Transcript
	// Usage: the client asked for the usage at the end of the stream.
	Usage bool
	// Intervals, when set, counts the times between the stream's events.
	Intervals *relay.Intervals
	// Choices is the number of choices that the client asked for (n); 0: it did not say. See
	// relay.Options.
	Choices int
	// EndsWithChoices: Choices is exact. See relay.Options.
	EndsWithChoices bool
	// ClientDeadline is the client's deadline, the zero time for none. See relay.Options.
	ClientDeadline time.Time
}
