package front

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// failingListener is a listener whose accepts fail with the given errors before they succeed.
type failingListener struct {
	net.Listener
	failures []error
}

func (l *failingListener) Accept() (net.Conn, error) {
	if len(l.failures) > 0 {
		err := l.failures[0]
		l.failures = l.failures[1:]
		return nil, err
	}
	return l.Listener.Accept()
}

func acceptError(errno syscall.Errno) error {
	return &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", errno)}
}

// A lack of descriptors makes accept wait and retry; other errors end the accept loop.
func TestAcceptWaitsOutExhaustion(t *testing.T) {
	s, err := New(Options{Handler: handlerFunc(echo)})
	if err != nil {
		t.Fatal(err)
	}
	inner := otherListener(t)
	defer inner.Close()
	nc, err := net.Dial("tcp", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	l := &listener{Listener: &failingListener{inner, []error{acceptError(syscall.EMFILE), acceptError(syscall.ENFILE), acceptError(syscall.ECONNABORTED)}}, srv: s}
	c, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if n := s.conns.len(); n != 0 {
		t.Errorf("%d connections left", n)
	}

	l = &listener{Listener: &failingListener{inner, []error{acceptError(syscall.EINVAL)}}, srv: s}
	if _, err := l.accept(); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("EINVAL became %v", err)
	}
}

func TestShutdownStopsAcceptRetry(t *testing.T) {
	s, err := New(Options{Handler: handlerFunc(echo)})
	if err != nil {
		t.Fatal(err)
	}
	var fail []error
	for range 1000 {
		fail = append(fail, acceptError(syscall.EMFILE))
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(&failingListener{otherListener(t), fail}) }()
	testwait.Until(t, "serving", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.ln != nil
	})
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testTimeout):
		t.Error("Serve did not return")
	}
}
