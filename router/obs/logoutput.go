package obs

import (
	"io"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// logWriteTimeout bounds how long a line waits until the file takes it. After one has waited so long,
	// the following ones do not wait.
	logWriteTimeout = 100 * time.Millisecond
	// atomicWrite is Linux's PIPE_BUF: a pipe that is writable takes as many bytes without blocking.
	atomicWrite = 4096
)

// droppedLogLines counts the lines that the process's logs have dropped.
var droppedLogLines atomic.Uint64

// logOutput writes the lines of a log to a file whose reader may stall: a pipe, a terminal, the socket
// of a log daemon. A write that blocks would stop each goroutine and event loop that logs, and so all
// requests. While the file takes no more, lines are dropped; the first line after that says how many.
// The mutex of slog's handler makes its calls one after the other.
type logOutput struct {
	file    io.Writer
	fd      int32
	note    func(dropped int) []byte // the line that says how many were dropped
	dropped int                      // lines since the file took one
	cut     bool                     // the file has the beginning of a line that was dropped
}

// newLogOutput returns w if it is not a file that can be polled.
func newLogOutput(w io.Writer, note func(dropped int) []byte) io.Writer {
	f, ok := w.(*os.File)
	if !ok {
		return w
	}
	o := &logOutput{file: f, note: note}
	c, err := f.SyscallConn()
	if err != nil || c.Control(func(fd uintptr) { o.fd = int32(fd) }) != nil { // the log's file is never closed
		return w
	}
	return o
}

// Write implements io.Writer. It returns nil for a line that it drops.
func (o *logOutput) Write(line []byte) (int, error) {
	if o.dropped > 0 {
		if !o.writable(0) {
			o.dropped++
			droppedLogLines.Add(1)
			return len(line), nil
		}
		note := o.note(o.dropped)
		if o.cut {
			note = append([]byte("\n"), note...)
		}
		o.dropped, o.cut = 0, false
		if _, err := o.file.Write(note); err != nil {
			return 0, err
		}
	}
	for rest := line; len(rest) > 0; {
		if !o.writable(logWriteTimeout) {
			o.dropped, o.cut = 1, len(rest) < len(line)
			droppedLogLines.Add(1)
			break
		}
		n, err := o.file.Write(rest[:min(len(rest), atomicWrite)])
		if err != nil {
			return 0, err
		}
		rest = rest[n:]
	}
	return len(line), nil
}

// writable reports whether a write does not block, or fails at once.
func (o *logOutput) writable(wait time.Duration) bool {
	fds := []unix.PollFd{{Fd: o.fd, Events: unix.POLLOUT}}
	for {
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		if err != unix.EINTR {
			return n > 0 || err != nil
		}
	}
}
