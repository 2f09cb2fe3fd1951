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

	"sluice/dataplane/loop"
	"sluice/dataplane/membudget"
	"sluice/dataplane/reuse"
	"sluice/dataplane/sock"
)

// bodyRate is the slowest rate, in bytes a second, at which a body may come
// after BodyTimeout has passed.
const bodyRate = 256 << 10

// Server is the front. One Server serves one listener.
type Server struct {
	opt       Options                 // as New was given them
	now       atomic.Pointer[Options] // likewise, but for what Change has changed
	fh        fasthttp.Server
	routes    routes
	budget    *membudget.Budget
	parts     *membudget.Budget // of budget: what streams hold of events that have not come whole
	ids       requestIDs
	conns     connSet
	watch     *watcher    // set by Serve
	lobby     *lobby      // likewise; nil: heads are waited for on goroutines
	loops     *loop.Loops // likewise; nil: streams are relayed on goroutines
	exchanges reuse.Pool[Exchange]
	streams   reuse.Pool[stream]
	scarce    scarcity
	encoded   atomic.Int32
	shakes    sparse // TLS handshakes that failed, or came where no TLS is spoken
	strangers sparse // lines about PROXY headers
	heldUp    sparse // loops that got no processor
	refusals  brisk  // lines about requests that were refused

	leaving  atomic.Bool   // every answer ends its connection
	draining atomic.Bool   // requests are refused
	cutting  atomic.Bool   // the drain's time is over
	telling  sync.Mutex    // while it answers for a handler
	emptied  sync.Once     // closes watch and loops behind the last connection
	stop     chan struct{} // closed when accepting is to end
	accepted chan struct{} // closed when it has; nil where it never began
	mu       sync.Mutex    // of ln, byHand, watch and the end of accepting
	ln       net.Listener
	byHand   *sock.Listener // of ln's socket, where connections are accepted by hand
	serving  chan struct{}  // closed when connections may be served
	heir     Heir           // set by Retire, before a connection is claimed; nil: none
}

// partsShare is the divisor for the share of the budget that streams' parts of events may
// take: engines that stop within events leave the rest to request bodies.
const partsShare = 2

// New makes a Server; it fails on impossible Options.
func New(opt Options) (*Server, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return nil, err
	}
	if opt.Budget == nil {
		opt.Budget = membudget.NewBudget(opt.BodyBudgetBytes)
	}
	s := &Server{
		opt:    opt,
		routes: newRoutes(opt.Pages != nil),
		budget: opt.Budget,
		parts:  opt.Budget.Within(),
		conns:  connSet{byIP: make(map[netip.Addr]int)},
		stop:   make(chan struct{}),

		serving: make(chan struct{}),
	}
	s.now.Store(&opt)
	s.parts.SetLimit(opt.BodyBudgetBytes / partsShare)
	s.ids.init()
	s.exchanges.New = func() *Exchange { return newExchange(s) }
	s.streams.New = func() *stream { return new(stream) }
	s.fh = fasthttp.Server{
		Handler:        s.handle,
		ErrorHandler:   s.parseFailed,
		HeaderReceived: s.headRead,
		ExpectHandler:  s.expected,
		ConnState:      connState,
		Logger:         quietLogger{opt.Log},

		Concurrency:    math.MaxInt32, // MaxConns is the limit
		ReadBufferSize: opt.MaxHeadBytes,
		// An answer of this size, head and all, is one write.
		WriteBufferSize: 16 << 10,
		ReadTimeout:     opt.HeadTimeout,
		IdleTimeout:     opt.IdleTimeout,

		// A body is read by us, as it comes: by default its declared length is
		// allocated before the first byte.
		StreamRequestBody: true,
		// Bodies being streamed, this is no limit but how much of a body is read
		// into a buffer of fasthttp's before the handler is called (8 KiB at
		// most): bytes to copy once more, and to wait for where we will refuse.
		MaxRequestBodySize: 1,

		DisablePreParseMultipartForm: true,
		// Besides its saving, an answer is flushed although a request waits behind it
		// that came too early.
		ReduceMemoryUsage:     true,
		NoDefaultServerHeader: true,
		NoDefaultContentType:  true,
		SecureErrorLogMessage: true,
	}
	return s, nil
}

// live are the Options of now.
func (s *Server) live() *Options { return s.now.Load() }

// Change takes over what of opt may change while the Server runs, see
// Options.Changeable; the rest is left as it was. Requests under way may see some of
// both. It fails, and changes nothing, on what New would refuse.
func (s *Server) Change(opt Options) error {
	opt.Handler = s.opt.Handler
	next, err := opt.withDefaults()
	if err != nil {
		return err
	}
	fixed := s.opt
	next.Changeable().into(&fixed)
	s.budget.SetLimit(fixed.BodyBudgetBytes)
	s.parts.SetLimit(fixed.BodyBudgetBytes / partsShare)
	s.now.Store(&fixed)
	return nil
}

// BodyBytes is how much memory request bodies hold now, of BodyBudgetBytes.
func (s *Server) BodyBytes() int64 { return s.budget.Used() }

// Serve accepts on ln until Shutdown or Retire, and returns nil after one.
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
	w, err := newWatcher()
	if err != nil {
		s.mu.Unlock()
		return err
	}
	lobby, err := newLobby(s)
	if err != nil {
		s.mu.Unlock()
		w.close()
		return err
	}
	s.ln, s.watch, s.lobby = ln, w, lobby
	s.accepted = make(chan struct{})
	defer close(s.accepted)
	s.loops = s.startLoops()
	close(s.serving)
	threads := 0
	if s.loops != nil {
		threads = s.loops.Threads()
	}
	s.mu.Unlock()
	by := RelayLoop
	if threads == 0 {
		by = RelayGoroutine
	}
	s.opt.Log.Info("the relay is ready", "driver", by, "threads", threads)
	from, err := s.listenOn(ln)
	if err == nil {
		from.way.bell.hang()
		defer from.way.bell.close()
	}
	for err == nil {
		var c *conn
		if c, err = from.accept(); err == nil {
			go s.serveConn(c)
		}
	}
	if s.stopped() {
		return nil
	}
	return fmt.Errorf("front: cannot serve %q: %w", ln.Addr(), err)
}

// Loops is how many event loops drive streams, 0 where they are on goroutines, and how
// many streams those hold now.
func (s *Server) Loops() (threads, streams int) {
	s.mu.Lock()
	loops := s.loops
	s.mu.Unlock()
	if loops == nil {
		return 0, 0
	}
	return loops.Threads(), loops.Streams()
}

// startLoops starts what drives streams; nil where they stay on goroutines.
func (s *Server) startLoops() *loop.Loops {
	if s.opt.Relay == RelayGoroutine {
		return nil
	}
	tick := min(time.Second, s.live().WriteTimeout/8)
	if idle := s.live().StreamIdleTimeout; idle > 0 {
		tick = min(tick, idle/8)
	}
	loops, err := loop.Start(loop.Options{
		Loops: s.opt.RelayThreads, Budget: s.budget, Tick: max(tick, 10*time.Millisecond),
		OnFail: func(err error) { s.opt.Log.Error("an event loop failed; its streams were ended", "error", err) },
		OnHeldUp: func(d time.Duration) {
			s.heldUp.warn(s.opt.Log, "the router was held up: it was stopped, or other processes had its cores; streams' time-outs do not count that", "for", d)
		},
	})
	if err != nil {
		s.opt.Log.Warn("event loops are not to be had here", "error", err)
		return nil
	}
	return loops
}

// stopped says whether the listener was closed by us.
func (s *Server) stopped() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// handle is fasthttp's handler, for requests that are not plain.
func (s *Server) handle(ctx *fasthttp.RequestCtx) {
	x := s.exchanges.Get()
	x.ctx, x.Received = ctx, ctx.Time()
	x.c, _ = ctx.Conn().(*conn)
	defer x.finish()
	x.c.asked()
	x.c.uncountHead()
	x.c.awaited = awaited{}
	x.serve()
}

// endless is the length that fasthttp is told of a chunked body.
const endless = math.MaxInt

// headRead gives the first byte of the body its time: fasthttp waits for it before the
// handler is called, which sees to the rest. Its own reading of chunks is too lenient for
// a connection that goes on behind them, so of what the guard takes for a chunked body it
// hands out the bytes as they are.
func (s *Server) headRead(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
	var conf fasthttp.RequestConfig
	judgeExpect(h)
	n := h.ContentLength()
	if n != 0 && n != framingNone {
		live := s.live()
		conf.ReadTimeout = min(live.BodyIdleTimeout, s.bodyTime(min(int64(max(n, 0)), live.MaxBodyBytes)))
	}
	if n == framingChunked && s.isChunked(h) {
		h.SetContentLength(endless)
	}
	return conf
}

// isChunked says whether the guard takes a head with a chunked body.
func (s *Server) isChunked(h *fasthttp.RequestHeader) bool {
	x := s.exchanges.Get()
	refused := x.head.read(h.Method(), h.RequestURI(), h.Protocol(), h.RawHeaders())
	chunked := refused == "" && x.head.length == framingChunked
	x.head.raw, x.head.path = nil, nil
	s.exchanges.Put(x)
	return chunked
}

func (s *Server) bodyTime(size int64) time.Duration {
	return s.live().BodyTimeout + time.Duration(size)*time.Second/bodyRate
}

// parseFailed answers what fasthttp could not read; it closes afterwards.
func (s *Server) parseFailed(ctx *fasthttp.RequestCtx, err error) {
	if c, _ := ctx.Conn().(*conn); c != nil && c.awaited.endpoint != nil {
		s.awaitedFailed(ctx, c, err)
		return
	}
	reason, message := BadHTTP, ""
	c, _ := ctx.Conn().(*conn)
	var small *fasthttp.ErrSmallBuffer
	switch {
	case errors.As(err, &small):
		reason, message = HeadTooLarge, fmt.Sprintf("the request head is larger than %d bytes", s.opt.MaxHeadBytes)
	case c != nil && c.readFailure() == RequestTimeout:
		reason, message = RequestTimeout, lateRequest
	case c != nil && c.wasCut():
		reason, message = Drained, partingText
		ctx.Response.Header.Set("Retry-After", retrySeconds(drainRetry))
	case c != nil && c.scan.room == headRefused:
		reason, message = BudgetSpent, headMemory
		ctx.Response.Header.Set("Retry-After", retrySeconds(budgetRetry))
	case c != nil && c.scan.bare:
		message = bareLF
	default:
		message = unreadable(&ctx.Request.Header, err)
	}
	if c != nil {
		c.lingered = true
	}
	id := s.ids.make()
	resp := &ctx.Response
	resp.SetStatusCode(reason.Status())
	resp.Header.SetContentType("application/json")
	resp.Header.Set("X-Request-Id", id)
	resp.Header.Set("X-Sluice-Reason", string(reason))
	resp.SetBody(appendError(nil, 0, reason, "", message, id))
	r := refusal{id: id}
	if c != nil {
		r.client = c.ip
	}
	s.refused("", reason, r)
}

const lateRequest = "the request did not come in time"

// quietLogger takes fasthttp's complaints about single connections.
type quietLogger struct{ log *slog.Logger }

func (l quietLogger) Printf(format string, args ...any) {
	l.log.Debug("http server", "detail", fmt.Sprintf(format, args...))
}
