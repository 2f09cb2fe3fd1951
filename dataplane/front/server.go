package front

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/clientwatch"
	"sluice/dataplane/eventloop"
	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
	"sluice/dataplane/objpool"
	"sluice/dataplane/rawsocket"
)

// bodyRate is the slowest rate, in bytes a second, at which a body may arrive after BodyTimeout.
const bodyRate = 256 << 10

// Server is the router's HTTP server for clients. One Server serves one listener. Its exported
// methods are safe for concurrent use.
type Server struct {
	initial           Options                 // as passed to New, with defaults
	current           atomic.Pointer[Options] // initial with the values of the last Change
	fh                fasthttp.Server
	routes            routes
	budget            *membudget.Budget
	partialEvents     *membudget.Budget // child of budget: incomplete events of streams
	ids               requestIDs
	conns             connSet
	clientWatcher     *clientwatch.Watcher // set by Serve
	pendingHeads      *pendingQueue        // set by Serve; nil: goroutines wait for heads
	loops             *eventloop.Loops     // set by Serve; nil: goroutines relay streams
	fastExchanges     objpool.Pool[fastExchange]
	fasthttpExchanges objpool.Pool[fasthttpExchange]
	streams           objpool.Pool[stream]
	fdStats           fdStats
	compressing       atomic.Int32
	tlsErrorLog       sampledLog     // failed TLS handshakes, and TLS handshakes on a listener without TLS
	proxyHeaderLog    sampledLog     // lines about PROXY headers
	starvedLog        sampledLog     // event loops that the operating system did not run
	refusalLog        rateLimitedLog // lines about refused requests

	closeAfterResponse atomic.Bool   // each response closes its connection
	draining           atomic.Bool   // requests are refused
	drainExpired       atomic.Bool   // the drain's time is over
	drainMu            sync.Mutex    // held while the drain responds in place of a handler
	closeOnce          sync.Once     // closes clientWatcher and loops after the last connection
	stop               chan struct{} // closed to stop accepting
	acceptDone         chan struct{} // closed when accepting has stopped; nil before Serve
	mu                 sync.Mutex    // guards the fields below, stop and acceptDone
	ln                 net.Listener
	rawListener        *rawsocket.Listener // set if rawsocket accepts on ln's socket
	serveReady         chan struct{}       // closed when connections may be served
	successor          Successor           // set by Retire, before a connection is claimed; nil: none
}

// partialEventsShare is the divisor for the part of the budget that incomplete events of streams may
// use. Engines that stop within an event therefore leave the rest to request bodies.
const partialEventsShare = 2

// New returns a Server. It fails if the Options are invalid.
func New(opt Options) (*Server, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return nil, err
	}
	if opt.Budget == nil {
		opt.Budget = membudget.NewBudget(opt.BodyBudgetBytes)
	}
	s := &Server{
		initial:       opt,
		routes:        newRoutes(opt.Pages != nil),
		budget:        opt.Budget,
		partialEvents: opt.Budget.NewChild(),
		conns:         connSet{byIP: make(map[netip.Addr]int)},
		stop:          make(chan struct{}),

		serveReady: make(chan struct{}),
	}
	s.current.Store(&opt)
	s.partialEvents.SetLimit(opt.BodyBudgetBytes / partialEventsShare)
	s.ids.init()
	s.fastExchanges.New = func() *fastExchange { return newFastExchange(s) }
	s.fasthttpExchanges.New = func() *fasthttpExchange { return newFasthttpExchange(s) }
	s.streams.New = func() *stream { return new(stream) }
	s.fh = fasthttp.Server{
		Handler:        s.handle,
		ErrorHandler:   s.onParseError,
		HeaderReceived: s.onHeadRead,
		ExpectHandler:  s.onExpectContinue,
		ConnState:      onConnState,
		Logger:         quietLogger{opt.Log},

		Concurrency:    math.MaxInt32, // MaxConns is the limit
		ReadBufferSize: opt.MaxHeadBytes,
		// A response up to this size, head included, is one write.
		WriteBufferSize: 16 << 10,
		ReadTimeout:     opt.HeadTimeout,
		IdleTimeout:     opt.IdleTimeout,

		// This package reads bodies as they arrive. By default fasthttp allocates the declared
		// length before the first byte.
		StreamRequestBody: true,
		// This does not limit streamed bodies. It is how much of a body fasthttp reads into its
		// own buffer before it calls the handler (8 KiB at most). Those bytes would be copied
		// once more, and a refused request would wait for them.
		MaxRequestBodySize: 1,

		DisablePreParseMultipartForm: true,
		// Besides the memory, this makes fasthttp flush a response although a pipelined
		// request follows it.
		ReduceMemoryUsage:     true,
		NoDefaultServerHeader: true,
		NoDefaultContentType:  true,
		SecureErrorLogMessage: true,
	}
	return s, nil
}

// options returns the current Options.
func (s *Server) options() *Options { return s.current.Load() }

// Change applies the options in opt that may change while the Server runs, see
// Options.Changeable, and ignores the others. Requests in progress may see old and new values. It
// fails, and changes nothing, if New would refuse opt.
func (s *Server) Change(opt Options) error {
	opt.Handler = s.initial.Handler
	next, err := opt.withDefaults()
	if err != nil {
		return err
	}
	fixed := s.initial
	next.Changeable().copyChangeable(&fixed)
	s.budget.SetLimit(fixed.BodyBudgetBytes)
	s.partialEvents.SetLimit(fixed.BodyBudgetBytes / partialEventsShare)
	s.current.Store(&fixed)
	return nil
}

// BodyBytes returns the memory that counts against BodyBudgetBytes now.
func (s *Server) BodyBytes() int64 { return s.budget.Used() }

// BodyLimit returns BodyBudgetBytes.
func (s *Server) BodyLimit() int64 { return s.budget.Limit() }

// Serve accepts connections on ln until Shutdown or Retire; then it returns nil. It fails if it
// is called twice or ln fails.
func (s *Server) Serve(ln net.Listener) error {
	s.mu.Lock()
	if s.stopped() {
		s.mu.Unlock()
		_ = ln.Close()
		return nil
	}
	if s.ln != nil {
		s.mu.Unlock()
		return errors.New("front: cannot serve a second listener")
	}
	w, err := clientwatch.NewWatcher()
	if err != nil {
		s.mu.Unlock()
		return err
	}
	pending, err := newPendingQueue(s)
	if err != nil {
		s.mu.Unlock()
		w.Close()
		return err
	}
	s.ln, s.clientWatcher, s.pendingHeads = ln, w, pending
	s.acceptDone = make(chan struct{})
	defer close(s.acceptDone)
	s.loops = s.startLoops()
	close(s.serveReady)
	threads := 0
	if s.loops != nil {
		threads = s.loops.Threads()
	}
	s.mu.Unlock()
	driver := RelayLoop
	if threads == 0 {
		driver = RelayGoroutine
	}
	s.initial.Log.Info("the relay is ready", "driver", driver, "threads", threads)
	listener, err := s.newListener(ln)
	if err == nil {
		listener.yielder.poll.Open()
		defer listener.yielder.poll.Close()
	}
	for err == nil {
		var c *conn
		if c, err = listener.accept(); err == nil {
			go s.serveConn(c)
		}
	}
	if s.stopped() {
		return nil
	}
	return fmt.Errorf("front: cannot serve %q: %w", ln.Addr(), err)
}

// Loops returns the number of event loops and of the streams that they drive now. It returns
// zeros if goroutines drive the streams.
func (s *Server) Loops() (threads, streams int) {
	s.mu.Lock()
	loops := s.loops
	s.mu.Unlock()
	if loops == nil {
		return 0, 0
	}
	return loops.Threads(), loops.Streams()
}

// startLoops starts the event loops. It returns nil if goroutines drive the streams.
func (s *Server) startLoops() *eventloop.Loops {
	if s.initial.RelayMode == RelayGoroutine {
		return nil
	}
	tick := min(time.Second, s.options().WriteTimeout/8)
	if idle := s.options().StreamIdleTimeout; idle > 0 {
		tick = min(tick, idle/8)
	}
	loops, err := eventloop.Start(eventloop.Options{
		Loops: s.initial.RelayThreads, Budget: s.budget, Tick: max(tick, 10*time.Millisecond),
		OnFail: func(err error) { s.initial.Log.Error("an event loop failed; its streams were ended", "error", err) },
		OnStarved: func(d time.Duration) {
			s.starvedLog.warn(s.initial.Log, "the router could not run: it was stopped, or other processes used its cores; this time does not count towards timeouts of streams", "duration", d)
		},
	})
	if err != nil {
		s.initial.Log.Warn("cannot start event loops; streams use goroutines", "error", err)
		return nil
	}
	return loops
}

// stopped reports whether Shutdown or Retire has closed the listener.
func (s *Server) stopped() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// handle is fasthttp's handler, for requests that the fast path does not serve.
func (s *Server) handle(ctx *fasthttp.RequestCtx) {
	x := s.fasthttpExchanges.Get()
	x.ctx, x.Received = ctx, ctx.Time()
	x.c, _ = ctx.Conn().(*conn)
	defer x.finish()
	x.c.clearIncompleteRequest()
	x.c.uncountHead()
	x.c.continued = continuedRequest{}
	x.serve()
}

// unknownLength is the Content-Length that onHeadRead sets for a chunked body.
const unknownLength = math.MaxInt

// onHeadRead sets the timeout for the first byte of the body, for which fasthttp waits before
// it calls the handler. fasthttp's parser of chunks is too lenient for a connection that is
// reused afterwards. Therefore a chunked body gets unknownLength, so that fasthttp passes
// its bytes through unparsed.
func (s *Server) onHeadRead(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
	var conf fasthttp.RequestConfig
	normalizeExpect(h)
	n := h.ContentLength()
	if n != 0 && n != http1.LengthNone {
		live := s.options()
		conf.ReadTimeout = min(live.BodyIdleTimeout, s.bodyTime(min(int64(max(n, 0)), live.MaxBodyBytes)))
	}
	if n == http1.LengthChunked && s.isChunked(h) {
		h.SetContentLength(unknownLength)
	}
	return conf
}

// isChunked reports whether http1.Head accepts the head and its body is chunked.
func (s *Server) isChunked(h *fasthttp.RequestHeader) bool {
	x := s.fasthttpExchanges.Get()
	refused := x.head.Parse(h.Method(), h.RequestURI(), h.Protocol(), h.RawHeaders())
	chunked := refused == "" && x.head.Length == http1.LengthChunked
	x.head.Release()
	s.fasthttpExchanges.Put(x)
	return chunked
}

func (s *Server) bodyTime(size int64) time.Duration {
	return s.options().BodyTimeout + time.Duration(size)*time.Second/bodyRate
}

// onParseError responds to a request that fasthttp could not read. fasthttp then closes the
// connection.
func (s *Server) onParseError(ctx *fasthttp.RequestCtx, err error) {
	if c, _ := ctx.Conn().(*conn); c != nil && c.continued.endpoint != nil {
		s.rejectContinuedBody(ctx, c, err)
		return
	}
	reason, message := BadHTTP, ""
	c, _ := ctx.Conn().(*conn)
	var small *fasthttp.ErrSmallBuffer
	switch {
	case errors.As(err, &small):
		reason, message = HeadTooLarge, fmt.Sprintf("the request head is larger than %d bytes", s.initial.MaxHeadBytes)
	case c != nil && c.readFailure() == RequestTimeout:
		reason, message = RequestTimeout, headTimeoutMessage
	case c != nil && c.endedByDrain():
		reason, message = Drained, drainedMessage
		ctx.Response.Header.Set("Retry-After", retryAfterSeconds(drainRetry))
	case c != nil && c.headBudget.state == headRefused:
		reason, message = BudgetExhausted, headMemoryMessage
		ctx.Response.Header.Set("Retry-After", retryAfterSeconds(budgetRetry))
	case c != nil && c.scan.Bare:
		message = http1.BareEndMessage
	default:
		message = parseErrorText(&ctx.Request.Header, err)
	}
	if c != nil {
		c.needsLinger = true
	}
	id := s.ids.next()
	resp := &ctx.Response
	resp.SetStatusCode(reason.Status())
	resp.Header.SetContentType("application/json")
	resp.Header.Set("X-Request-Id", id)
	resp.Header.Set("X-Sluice-Reason", string(reason))
	resp.SetBody(appendError(nil, 0, reason, "", message, id))
	r := Refusal{Reason: reason, RequestID: id}
	if c != nil {
		r.Client = c.ip
	}
	s.reportRefused(r)
}

const headTimeoutMessage = "the request head did not arrive in time"

// quietLogger logs fasthttp's errors of single connections at level debug.
type quietLogger struct{ log *slog.Logger }

func (l quietLogger) Printf(format string, args ...any) {
	l.log.Debug("http server", "detail", fmt.Sprintf(format, args...))
}
