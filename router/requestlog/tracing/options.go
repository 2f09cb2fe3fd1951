package tracing

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// Options configure an Exporter. OTEL_* variables of the environment apply where an option is not
// set; the exporter reads those of OTEL_EXPORTER_OTLP_* (headers, certificates, compression,
// timeout) itself.
type Options struct {
	// Endpoint is the collector's URL, as http://127.0.0.1:4317; "" leaves it to
	// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT.
	Endpoint string
	Protocol string // grpc or http; "": OTEL_EXPORTER_OTLP_(TRACES_)PROTOCOL, else http
	// Sample is the share of requests whose traces are kept, from 0 to 1. A client's traceparent
	// decides instead if it has one. OTEL_TRACES_SAMPLER overrides both.
	Sample float64
	// Slow is the time from which a request's trace is kept although it was not sampled; 0: none is.
	// Traces of failed and of migrated requests are always kept.
	Slow    time.Duration
	Version string // of Sluice, for the resource
	TLS     bool   // clients reach the router by https
	Log     *slog.Logger
}

// Enabled reports whether traces are exported: an endpoint is configured, in the options or by the
// standard variables, and OTEL_SDK_DISABLED and OTEL_TRACES_EXPORTER do not forbid it.
func (o *Options) Enabled() bool {
	if v, _ := strconv.ParseBool(os.Getenv("OTEL_SDK_DISABLED")); v || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return o.Endpoint != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != ""
}

// checkEndpoint returns an error for a collector that the standard variables name by something else than a URL: the
// exporter would ignore it, and send to its default instead. The value may contain credentials and is not shown.
func (o *Options) checkEndpoint() error {
	if o.Endpoint != "" {
		return nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		v := os.Getenv(name)
		if v == "" {
			continue
		}
		if u, err := url.Parse(v); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("tracing: %s is not a URL; want one such as http://127.0.0.1:4318", name)
		}
		return nil
	}
	return nil
}

// protocol returns grpc or http.
func (o *Options) protocol() (string, error) {
	p, from := o.Protocol, "tracing.protocol"
	for _, v := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if p == "" {
			p, from = os.Getenv(v), v
		}
	}
	switch p {
	case "grpc":
		return "grpc", nil
	case "", "http", "http/protobuf":
		return "http", nil
	}
	return "", fmt.Errorf("tracing: %s %q; want grpc or http/protobuf", from, p)
}

// sampler decides at a request's start.
type sampler struct {
	ratio       float64
	parentBased bool // a traceparent decides instead
}

func (o *Options) sampler() (sampler, error) {
	name := os.Getenv("OTEL_TRACES_SAMPLER")
	root, parentBased := strings.CutPrefix(name, "parentbased_")
	switch root {
	case "":
		if name == "" {
			return sampler{o.Sample, true}, nil
		}
	case "always_on":
		return sampler{1, parentBased}, nil
	case "always_off":
		return sampler{0, parentBased}, nil
	case "traceidratio":
		arg := os.Getenv("OTEL_TRACES_SAMPLER_ARG")
		if arg == "" {
			return sampler{1, parentBased}, nil
		}
		ratio, err := strconv.ParseFloat(arg, 64)
		if err != nil || math.IsNaN(ratio) || ratio < 0 || ratio > 1 {
			return sampler{}, fmt.Errorf("tracing: OTEL_TRACES_SAMPLER_ARG %q; want a number from 0 to 1", arg)
		}
		return sampler{ratio, parentBased}, nil
	}
	return sampler{}, fmt.Errorf("tracing: OTEL_TRACES_SAMPLER %q; want always_on, always_off or traceidratio, also with parentbased_ before it", name)
}

// batch has the bounds of the queue and of one export, in the units of the standard variables.
type batch struct {
	queue   int           // entries, each with up to some twenty spans
	size    int           // entries of one export
	delay   time.Duration // from an entry to its export
	timeout time.Duration // of one export
}

func newBatch() (b batch, err error) {
	read := func(name string, def int) int {
		v := os.Getenv(name)
		if v == "" {
			return def
		}
		n, bad := strconv.Atoi(v)
		if bad != nil || n < 1 || n > 1<<24 {
			err = errors.Join(err, fmt.Errorf("tracing: %s %q; want a number from 1 to %d", name, v, 1<<24))
			return def
		}
		return n
	}
	b = batch{
		queue:   read("OTEL_BSP_MAX_QUEUE_SIZE", 2048),
		size:    read("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
		delay:   time.Duration(read("OTEL_BSP_SCHEDULE_DELAY", 5000)) * time.Millisecond,
		timeout: time.Duration(read("OTEL_BSP_EXPORT_TIMEOUT", 30000)) * time.Millisecond,
	}
	b.size = min(b.size, b.queue)
	return b, err
}
