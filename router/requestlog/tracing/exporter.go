package tracing

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"sluice/router/requestlog"
)

const (
	// closeTimeout bounds the last export and the end of the connection.
	closeTimeout = 3 * time.Second
	// errorInterval is the minimum time between two log messages about a failing collector.
	errorInterval = time.Minute
)

// Exporter is a requestlog.Sink and a requestlog.TraceSampler.
type Exporter struct {
	client  otlptrace.Client
	sampler sampler
	slow    time.Duration
	batch   batch
	log     *slog.Logger
	encoder encoder

	queue chan *requestlog.Entry
	stop  context.CancelFunc
	ctx   context.Context // ends with Close
	done  chan struct{}
	once  sync.Once

	exported, dropped, failed atomic.Uint64
	lastError                 time.Time // of the goroutine
}

// Stats are counts of traces since the start.
type Stats struct {
	Exported uint64
	Dropped  uint64 // because the queue was full
	Failed   uint64 // because the collector did not accept them
}

// New starts an Exporter. It does not wait for the collector, which may be missing. The caller must
// Close it.
func New(opt Options) (*Exporter, error) {
	if err := opt.checkEndpoint(); err != nil {
		return nil, err
	}
	protocol, err := opt.protocol()
	if err != nil {
		return nil, err
	}
	e := &Exporter{slow: opt.Slow, log: opt.Log, done: make(chan struct{})}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if e.sampler, err = opt.sampler(); err != nil {
		return nil, err
	}
	if e.batch, err = newBatch(); err != nil {
		return nil, err
	}
	if e.encoder, err = newEncoder(opt.Version, opt.TLS); err != nil {
		return nil, err
	}
	otel.SetLogger(logr.New(settingsSink{e.log}))
	if protocol == "grpc" {
		var o []otlptracegrpc.Option
		if opt.Endpoint != "" {
			o = append(o, otlptracegrpc.WithEndpointURL(withPort(opt.Endpoint, "4317")))
		}
		e.client = otlptracegrpc.NewClient(o...)
	} else {
		var o []otlptracehttp.Option
		if opt.Endpoint != "" {
			o = append(o, otlptracehttp.WithEndpointURL(tracesURL(withPort(opt.Endpoint, "4318"))))
		}
		e.client = otlptracehttp.NewClient(o...)
	}
	e.ctx, e.stop = context.WithCancel(context.Background())
	if err := e.client.Start(e.ctx); err != nil {
		e.stop()
		return nil, fmt.Errorf("tracing: cannot start the exporter: %w", err)
	}
	e.queue = make(chan *requestlog.Entry, e.batch.queue)
	go e.run()
	return e, nil
}

// withPort adds the standard port to a URL without one.
func withPort(url, port string) string {
	scheme, rest, ok := strings.Cut(url, "://")
	if !ok {
		scheme, rest = "http", url
	}
	host, path, _ := strings.Cut(rest, "/")
	if colon := strings.LastIndexByte(host, ':'); colon < 0 || strings.HasSuffix(host, "]") {
		host += ":" + port
	}
	if path != "" {
		path = "/" + path
	}
	return scheme + "://" + host + path
}

// tracesURL adds the standard path to a URL without one.
func tracesURL(url string) string {
	_, rest, _ := strings.Cut(url, "://")
	if !strings.Contains(strings.TrimSuffix(rest, "/"), "/") {
		return strings.TrimSuffix(url, "/") + "/v1/traces"
	}
	return url
}

// Sample implements requestlog.TraceSampler.
func (e *Exporter) Sample(parent requestlog.TraceContext, _ string) bool {
	s := &e.sampler
	if s.parentBased && parent.ID != (requestlog.TraceID{}) {
		return parent.Sampled
	}
	switch {
	case s.ratio >= 1:
		return true
	case s.ratio <= 0:
		return false
	}
	// The lower 56 bits of a trace id are random (W3C Trace Context level 2), so that every
	// router decides equally on one trace.
	bits := rand.Uint64() >> 8
	if parent.ID != (requestlog.TraceID{}) {
		bits = binary.BigEndian.Uint64(parent.ID[8:]) & (1<<56 - 1)
	}
	return float64(bits) < s.ratio*math.Exp2(56)
}

// keep reports whether the trace of a finished request is exported.
func (e *Exporter) keep(r *requestlog.Entry) bool {
	return r.Trace.Sampled || r.Migrations > 0 || r.Status >= 500 || r.Reason != "" && r.Status < 400 || e.slow > 0 && r.Total >= e.slow
}

// Add implements requestlog.Sink. It does not block.
func (e *Exporter) Add(r *requestlog.Entry) {
	if !e.keep(r) {
		return
	}
	select {
	case e.queue <- r:
	default:
		e.dropped.Add(1)
	}
}

// Stats returns the counts.
func (e *Exporter) Stats() Stats {
	return Stats{Exported: e.exported.Load(), Dropped: e.dropped.Load(), Failed: e.failed.Load()}
}

// Close exports what is waiting, as far as the collector accepts it within closeTimeout.
func (e *Exporter) Close() {
	e.once.Do(e.stop)
	<-e.done
}

func (e *Exporter) run() {
	defer close(e.done)
	pending := make([]*requestlog.Entry, 0, e.batch.size)
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	for {
		select {
		case r := <-e.queue:
			if pending = append(pending, r); len(pending) == 1 {
				timer.Reset(e.batch.delay)
			}
			if len(pending) < e.batch.size {
				continue
			}
			timer.Stop()
		case <-timer.C:
		case <-e.ctx.Done():
			e.finish(pending)
			return
		}
		e.export(e.ctx, pending, e.batch.timeout)
		clear(pending)
		pending = pending[:0]
	}
}

// finish exports the rest. Its deadline is of its own because e.ctx has ended.
func (e *Exporter) finish(pending []*requestlog.Entry) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	for more := true; more; {
		select {
		case r := <-e.queue:
			if pending = append(pending, r); len(pending) < e.batch.size {
				continue
			}
		default:
			more = false
		}
		e.export(ctx, pending, closeTimeout)
		pending = pending[:0]
	}
	if err := e.client.Stop(ctx); err != nil {
		e.log.Debug("the trace exporter did not end in time", "error", err)
	}
}

func (e *Exporter) export(ctx context.Context, entries []*requestlog.Entry, timeout time.Duration) {
	if len(entries) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := e.client.UploadTraces(ctx, []*tracepb.ResourceSpans{e.encoder.encode(entries)})
	if err == nil {
		e.exported.Add(uint64(len(entries)))
		return
	}
	e.failed.Add(uint64(len(entries)))
	if now := time.Now(); now.Sub(e.lastError) >= errorInterval {
		e.lastError = now
		e.log.Warn("traces could not be exported", "requests", len(entries), "error", err)
	}
}
