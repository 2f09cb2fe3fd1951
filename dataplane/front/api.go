package front

import (
	"crypto/tls"
	"log/slog"
	"time"

	"sluice/dataplane/membudget"
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
	Models() (status int, body []byte) // GET /v1/models
	// Ready and Health answer GET /readyz and GET /health. Details name workers, models,
	// addresses and files; without details neither may.
	Ready(details bool) (status int, body []byte)
	Health(details bool) (status int, body []byte)
	Version() (status int, body []byte) // GET /version
	Metrics(w interface{ Write([]byte) (int, error) })
}

// Observer is told of what the front saw. Methods are called on the request's
// goroutine and must not block or allocate.
type Observer interface {
	Accepted()                                                     // an inference request was admitted
	Refused(endpoint string, reason Reason)                        // refused before or by the Handler
	ResponseCut(endpoint string, cause relay.Cause)                // a whole answer's client did not take it; Ended follows
	ResponseEnded(endpoint string, status int, took time.Duration) // a response's last byte was written
	Panicked(requestID string, value any, stack []byte)            // recovered
	Connections(open int)                                          // changed
}

// Authenticator says who may send requests, by the keys they show. It is asked on the
// request path, before the body is read, and must not block.
type Authenticator interface {
	// Enter gives the holder of key, or why the request may not enter; the holder
	// too, where it is known who it is. key is borrowed, nil when none was shown.
	// counts: the request counts against the holder's limits; not so that for a page.
	Authenticate(key []byte, counts bool) (Principal, *Rejection)
}

// Principal is the right of one key's holder. It outlives the request.
type Principal interface {
	Name() string
	Allows(model string) bool // "": every model
	// Reached says why a request that came now would be refused for a limit, nil when
	// it would not; it takes nothing.
	CheckLimits() *Rejection
	// Reserve takes tokens of what the holder may use, for a request about to use them,
	// or says why they are not to be had. Each Reserve is followed by one Settle.
	Reserve(tokens int) *Rejection
	// Settle puts the tokens that a request has spent in the place of those reserved for it.
	Commit(reserved, spent int)
	// Limits tells show the header lines that say what is left.
	VisitLimitHeaders(show func(name, value string))
}

// Rejection is why a request may not enter.
type Rejection struct {
	Reason     Reason
	Message    string
	RetryAfter time.Duration
}

// Options of a Server; zero values mean the default in brackets.
type Options struct {
	Handler       Handler
	Pages         Pages
	Observer      Observer // may be nil
	Log           *slog.Logger
	Authenticator Authenticator // nil: anybody may send requests
	TLS           *tls.Config   // nil: plain HTTP

	MaxBodyBytes    int64 // [32 MiB]
	BodyBudgetBytes int64 // all bodies together [1 GiB]
	// Budget counts the bodies, where others count in it too; its limit becomes
	// BodyBudgetBytes at each Change. [the server's own, of BodyBudgetBytes]
	Budget            *membudget.Budget
	MaxHeadBytes      int           // [16 KiB]
	MaxDepth          int           // JSON nesting [64]
	HeadTimeout       time.Duration // [10s]
	BodyTimeout       time.Duration // plus size / 256 KiB/s [30s]
	BodyIdleTimeout   time.Duration // of these, without a byte of the body [15s]
	IdleTimeout       time.Duration // keep-alive [75s]
	WriteTimeout      time.Duration // one flush [30s]
	StreamIdleTimeout time.Duration // between two reads from the engine of a stream [0: the Call's own deadlines]
	MaxConns          int           // [100_000]
	MaxConnsPerIP     int           // [0: no limit]

	// CompressMin: answers of so many bytes and more that are no streams go out in
	// the coding that the client accepts; 0: none does. Of those that are relayed JSON
	// does, see compressRelayed. Encoded requests are always read, MaxBodyBytes being the
	// bound of what they hold.
	CompressMin int
	// CompressStreams: streams too, event by event.
	CompressStreams bool

	CORS    *CORS   // nil: browsers' pages of other origins are told nothing
	Proxies Proxies // whom to believe where a request comes from

	// WithholdClientKeys: the keys that clients show are meant for this router, or the engines
	// are shown one of its own: clients' do not reach engines. True with a Gate.
	WithholdClientKeys bool

	// EarlyHeaders: a stream's head goes out EarlyHeadersAfter after its request was given to
	// an engine (Exchange.Dispatched) where that has not answered by then; else with
	// the engine's. What fails from then on is told by an event: the status was 200.
	EarlyHeaders      bool
	EarlyHeadersAfter time.Duration // [0: at once]
	// KeepAlive is how often a comment goes to a client whose stream has begun and who
	// waits for the engine's first byte; 0: never.
	KeepAlive time.Duration

	RelayMode    RelayMode // what drives streams [RelayLoop]
	RelayThreads int       // event loops [one for each CPU]

	// StripForbidden: kv_transfer_params, disagg_prefill_resp, bootstrap_* and
	// disaggregated_params sent by a client are cut out instead of refused.
	StripForbidden bool
	// MediaHosts are the hosts from which engines may fetch images, video and audio that
	// clients name by URL [none: data: URLs only].
	MediaHosts MediaHosts
}

// ClientGoneNotifier tells of a client's leaving; see Exchange.OnClientGone and Exchange.Gone.
type ClientGoneNotifier interface {
	OnClientGone(f func())
	ClientGone() bool
}

// RelayMode says what drives streams once their head is out.
type RelayMode string

// What may drive streams.
const (
	RelayLoop      RelayMode = "loop"      // event loops; goroutines where the kernel refuses them
	RelayGoroutine RelayMode = "goroutine" // a goroutine for each stream
)

// StreamHandler is whose stream is relayed: one for each, which is why it is no functions.
type StreamHandler interface {
	// FirstToken is called on the thread that relays, and must not block.
	FirstToken()
	// End is called once, after the last byte, on a goroutine; the response has been
	// Released.
	Ended(relay.Result)
	// Next asks other workers for a stream with a Transcript, when its own engine fails, and
	// gives the answer of one, which the front owns from then on, with the call; nil
	// when there is none. It has a goroutine, may block, and hears of a client that leaves by
	// client as a Handler does by its Exchange.
	NextEngine(b relay.Interruption, client ClientGoneNotifier) (*upstream.Response, *upstream.Call)
}

// ResponseIDObserver is a Relayed that wants to know the id of the response that its stream is about.
type ResponseIDObserver interface {
	// Stored is called at most once, on the thread that relays, and must not block.
	ResponseID(id string)
}

// Doner is a Relayed that wants to know when its stream's own last event has been read; the
// engine's response may end later. See relay.ClientConn.
type Doner interface {
	// Done is called at most once, on the thread that relays, and must not block.
	Done(usage relay.Usage, failed bool)
}

// RelayHooks is what else is to be done with a stream.
type RelayHooks struct {
	// Of is whose it is; nil: nobody is told, or asked.
	Handler StreamHandler
	// Rewrite, when set, changes the events of the stream on their way.
	Rewrite relay.Rewriter
	// Transcript, when set, lets the stream go on from another engine when its own fails;
	// Rewrite is not used then. See relay.Carry, also for Usage.
	Transcript *relay.Transcript
	Usage      bool
	// Choices is how many the client asked for (n); 0: it said nothing. See relay.Options.
	Choices int
	// By, when set, is the end of the client's time: see relay.Options.
	ClientDeadline time.Time
}
