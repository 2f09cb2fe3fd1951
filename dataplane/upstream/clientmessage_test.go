package upstream

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
)

// TestClientMessage: clients learn what went wrong with an engine, and not where it is.
func TestClientMessage(t *testing.T) {
	refused := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 8000}, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	for _, c := range []struct {
		phase Phase
		err   error
		want  string
	}{
		{PhaseDial, refused, "cannot connect to the engine: connection refused"},
		{PhaseHead, io.EOF, "cannot get an answer from the engine: it closed the connection"},
		{PhaseHead, protocolError("a status line %q", "10.0.0.1 secret"), "cannot get an answer from the engine: the engine sent malformed HTTP"},
		{PhaseHead, fmt.Errorf("%w: %q", ErrContentEncoding, "br"), "cannot get an answer from the engine: the answer has a content coding that was not asked for"},
		{PhaseBody, fmt.Errorf("%w: more than 10 bytes", ErrTooLarge), "cannot read the body of the engine: the body exceeds the limit"},
		{PhaseWrite, errors.New("http://10.0.0.1:8000: no"), "cannot send to the engine: the connection failed"},
	} {
		err := fmt.Errorf("prefill: %w", &Error{Endpoint: "http://10.0.0.1:8000", Phase: c.phase, Err: c.err})
		if got := ClientMessage(err); got != c.want || strings.Contains(got, "10.0.0.1") {
			t.Errorf("%v: %q, want %q", err, got, c.want)
		}
	}
	if got := ClientMessage(errors.New("it answered 503")); got != "it answered 503" {
		t.Errorf("%q", got)
	}
}
