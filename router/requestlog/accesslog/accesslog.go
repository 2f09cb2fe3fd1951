package accesslog

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"

	"sluice/router/requestlog"
)

const (
	// queueLength is how many finished requests may wait to be written.
	queueLength = 8192
	// batchBytes is the size from which lines are written even if more are waiting.
	batchBytes = 64 << 10
	// gather is how long the first of some requests waits for others, so that they take one wake-up of the
	// goroutine and one write. The queue holds as many as 400,000 requests a second make in that time.
	gather = 20 * time.Millisecond
	// closeTimeout bounds how long Close waits for an output that does not accept lines.
	closeTimeout = 2 * time.Second
	// errorInterval is the minimum time between two log messages about a failing output.
	errorInterval = 10 * time.Second
)

// Options configure a Writer.
type Options struct {
	// Output is where lines go: "stdout", "file:PATH", "syslog" (the local daemon), or
	// "syslog://HOST:PORT" (over UDP) and "syslog+tcp://HOST:PORT". See CheckOutput.
	Output string
	// Sample is the share of successful requests that are written, from 0 to 1. Failed requests are
	// always written.
	Sample float64
	// MaxFileBytes is the size at which a file is rotated, MaxFiles how many rotated files are kept.
	MaxFileBytes int64
	MaxFiles     int
	Stdout       io.Writer    // what "stdout" means; nil: os.Stdout
	Log          *slog.Logger // receives errors of the output
}

// Writer is a requestlog.Sink.
type Writer struct {
	sample  float64
	out     io.WriteCloser
	perLine bool // the output takes one line a write
	log     *slog.Logger
	queue   chan *requestlog.Entry
	close   chan struct{} // closed by Close
	done    chan struct{} // closed when the goroutine has ended
	once    sync.Once

	written, dropped, failed atomic.Uint64
	lastError                time.Time // of the goroutine
}

// Stats are counts of lines since the start.
type Stats struct {
	Written uint64
	Dropped uint64 // because the queue was full
	Failed  uint64 // because the output returned an error
}

// CheckOutput returns an error if Options.Output would not be accepted. It opens nothing.
func CheckOutput(output string) error {
	_, _, _, err := parseOutput(output)
	return err
}

func parseOutput(output string) (kind, network, address string, err error) {
	switch {
	case output == "stdout", output == "syslog":
		return output, "", "", nil
	case strings.HasPrefix(output, "file:") && strings.HasPrefix(output[5:], "/"):
		return "file", "", output[5:], nil
	case strings.HasPrefix(output, "syslog://") && len(output) > 9:
		return "syslog", "udp", output[9:], nil
	case strings.HasPrefix(output, "syslog+tcp://") && len(output) > 13:
		return "syslog", "tcp", output[13:], nil
	}
	return "", "", "", fmt.Errorf("%q; want stdout, file:/PATH, syslog, syslog://HOST:PORT or syslog+tcp://HOST:PORT", output)
}

// New opens the output and starts the Writer. The caller must Close it.
func New(opt Options) (*Writer, error) {
	kind, network, address, err := parseOutput(opt.Output)
	if err != nil {
		return nil, fmt.Errorf("accesslog: output %w", err)
	}
	w := &Writer{
		sample: opt.Sample, log: opt.Log, queue: make(chan *requestlog.Entry, queueLength),
		close: make(chan struct{}), done: make(chan struct{}),
	}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	switch kind {
	case "stdout":
		w.out = nopCloser{os.Stdout}
		if opt.Stdout != nil {
			w.out = nopCloser{opt.Stdout}
		}
	case "file":
		// The file is opened here, so that a wrong path is an error at the start.
		if err := createLog(address); err != nil {
			return nil, fmt.Errorf("accesslog: %w", err)
		}
		w.out = &rotatedFile{Logger: lumberjack.Logger{Filename: address, MaxSize: int(max(opt.MaxFileBytes>>20, 1)), MaxBackups: opt.MaxFiles}}
	case "syslog":
		w.out, w.perLine = &syslogOutput{network: network, address: address}, true
	}
	go w.run()
	return w, nil
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// Add implements requestlog.Sink. It does not block.
func (w *Writer) Add(e *requestlog.Entry) {
	if w.sample < 1 && e.Reason == "" && e.Status < 400 && rand.Float64() >= w.sample {
		return
	}
	select {
	case w.queue <- e:
	default:
		w.dropped.Add(1)
	}
}

// Stats returns the counts.
func (w *Writer) Stats() Stats {
	return Stats{Written: w.written.Load(), Dropped: w.dropped.Load(), Failed: w.failed.Load()}
}

// Close writes the lines that are waiting and closes the output. It waits for at most closeTimeout.
func (w *Writer) Close() {
	w.once.Do(func() { close(w.close) })
	select {
	case <-w.done:
	case <-time.After(closeTimeout):
		w.log.Warn("the access log's output accepts no lines; the last ones are lost", "requests", len(w.queue))
	}
}

func (w *Writer) run() {
	defer close(w.done)
	defer w.out.Close()
	buf := make([]byte, 0, batchBytes+4096)
	lines := uint64(0)
	wait := time.NewTimer(gather)
	defer wait.Stop()
	flush := func() {
		if lines == 0 {
			return
		}
		if _, err := w.out.Write(buf); err != nil {
			w.fail(lines, err)
		} else {
			w.written.Add(lines)
		}
		buf, lines = buf[:0], 0
	}
	add := func(e *requestlog.Entry) {
		buf = appendLine(buf, e)
		if lines++; w.perLine || len(buf) >= batchBytes {
			flush()
		}
	}
	for {
		select {
		case e := <-w.queue:
			add(e)
			continue
		default:
			flush()
		}
		select {
		case e := <-w.queue:
			add(e)
			wait.Reset(gather)
			select {
			case <-wait.C:
			case <-w.close:
			}
		case <-w.close:
			for {
				select {
				case e := <-w.queue:
					add(e)
				default:
					flush()
					return
				}
			}
		}
	}
}

func (w *Writer) fail(lines uint64, err error) {
	w.failed.Add(lines)
	if now := time.Now(); now.Sub(w.lastError) >= errorInterval {
		w.lastError = now
		w.log.Warn("the access log cannot be written", "requests", lines, "error", err)
	}
}
