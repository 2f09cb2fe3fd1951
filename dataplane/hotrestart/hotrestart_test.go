package hotrestart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The new process of these tests is this test's own program.
func TestMain(m *testing.M) {
	if mode := os.Getenv("TAKEOVER_TEST"); mode != "" {
		os.Exit(child(mode))
	}
	os.Exit(m.Run())
}

func child(mode string) int {
	in, err := Inherit(nil, "client")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ln, err := in.Listen("client", "configured")
	if err != nil {
		in.ReportFailed(err)
		return 1
	}
	if os.Getenv(linkVar) != "" || os.Getenv(formerLinkVar) != "" {
		return 3
	}
	switch mode {
	case "fails":
		in.ReportFailed(errors.New("no engine, no service"))
		hang()
	case "dies":
		return 4
	case "hangs":
		hang()
	case "takes":
		in.AcceptConnections("client", func(fd int, state []byte) bool {
			if string(state) == "not this one" {
				return false
			}
			f := os.NewFile(uintptr(fd), "client")
			defer f.Close()
			fmt.Fprintf(f, "taken %s", state)
			return true
		})
	case "dies as it takes":
		in.AcceptConnections("client", func(int, []byte) bool { os.Exit(6); return false })
	case "listens elsewhere":
		in.AcceptConnections("another", func(int, []byte) bool { return true })
	}
	go func() { // one answer, once it may accept
		c, err := ln.Accept()
		if err == nil {
			fmt.Fprintf(c, "new %s", in.State())
			c.Close()
		}
	}()
	if err := in.Ready(); err != nil {
		return 5
	}
	<-in.ParentGone()
	return 0
}

func start(t *testing.T, mode string, within time.Duration) (net.Listener, *Child, error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	s, err := Start(context.Background(), Options{
		Env: append(os.Environ(), "TAKEOVER_TEST="+mode), Stderr: os.Stderr, State: map[string]int{"n": 1}, ReadyTimeout: within,
		Listeners: []Listener{{Name: "client", Address: "configured", Listener: ln}},
	})
	return ln, s, err
}

func TestHandOffListeners(t *testing.T) {
	ln, s, err := start(t, "well", 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.PID <= 0 || s.PID == os.Getpid() {
		t.Errorf("process id %d", s.PID)
	}
	addr := ln.Addr().String()
	raw, _ := ln.(*net.TCPListener).SyscallConn()
	raw.Control(func(fd uintptr) {
		if flags, err := unix.FcntlInt(fd, unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK == 0 {
			t.Errorf("the listener has become a blocking one: flags %#x, %v; to close it would wait for a client", flags, err)
		}
	})
	ln.Close() // the new process accepts, and nobody else
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if text, err := io.ReadAll(c); err != nil || string(text) != `new {"n":1}` {
		t.Errorf("the new process said %q, %v", text, err)
	}
}

// hang stands for a child that never comes further; the parent kills it.
func hang() { time.Sleep(time.Minute) }

// linked gives both ends of a TCP connection; fd is the first one's.
func linked(t *testing.T) (ours, theirs net.Conn, fd int) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if theirs, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if ours, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	_ = theirs.SetDeadline(time.Now().Add(20 * time.Second))
	raw, err := ours.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(of uintptr) { fd = int(of) })
	return ours, theirs, fd
}

// A connection that was passed is the new process's alone; one that it refuses, or that it
// dies with, is still open here.
func TestSendConnection(t *testing.T) {
	_, s, err := start(t, "takes", 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.AcceptsConnections() {
		t.Fatal("the new process takes no connections")
	}
	for _, state := range []string{"not this one", "one", "two"} {
		ours, theirs, fd := linked(t)
		taken, err := s.SendConnection(fd, []byte(state))
		if want := state != "not this one"; taken != want || err != nil {
			t.Fatalf("%q: taken %t, %v", state, taken, err)
		}
		want := "taken " + state
		if !taken {
			want = "still here"
			fmt.Fprint(ours, want)
		}
		ours.Close()
		if text, err := io.ReadAll(theirs); err != nil || string(text) != want {
			t.Errorf("%q: the client read %q, %v; want %q", state, text, err, want)
		}
	}
	_, _, fd := linked(t)
	if _, err := s.SendConnection(fd, nil); err == nil {
		t.Error("a connection without a description was passed")
	}
}

func TestSendConnectionToExitingChild(t *testing.T) {
	_, s, err := start(t, "dies as it takes", 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ours, theirs, fd := linked(t)
	if taken, err := s.SendConnection(fd, []byte("one")); taken || err == nil {
		t.Errorf("taken %t, %v", taken, err)
	}
	if s.AcceptsConnections() {
		t.Error("the next one would be passed to it as well")
	}
	fmt.Fprint(ours, "still here")
	ours.Close()
	if text, err := io.ReadAll(theirs); err != nil || string(text) != "still here" {
		t.Errorf("the client read %q, %v", text, err)
	}
}

// A process of an older release takes no connections, nor does one that listens elsewhere.
func TestSendConnectionRefused(t *testing.T) {
	for _, mode := range []string{"well", "listens elsewhere"} {
		_, s, err := start(t, mode, 20*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		_, _, fd := linked(t)
		if taken, err := s.SendConnection(fd, []byte("one")); taken || err == nil || s.AcceptsConnections() {
			t.Errorf("%s: taken %t, %v", mode, taken, err)
		}
		s.Close()
	}
}

// One that does not become ready leaves the listener to us, and us with the reason.
func TestChildFails(t *testing.T) {
	for mode, says := range map[string]string{"fails": "no engine, no service", "dies": "exit status 4", "hangs": "not ready in time"} {
		within := 20 * time.Second
		if mode == "hangs" {
			within = 300 * time.Millisecond
		}
		ln, s, err := start(t, mode, within)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Fatalf("%s: %v, %v; want an error that says %q", mode, s, err, says)
		}
		go func() {
			if c, err := net.Dial("tcp", ln.Addr().String()); err == nil {
				c.Close()
			}
		}()
		ln.(*net.TCPListener).SetDeadline(time.Now().Add(5 * time.Second))
		c, err := ln.Accept()
		if err != nil {
			t.Fatalf("%s: our listener accepts no more: %v", mode, err)
		}
		c.Close()
	}
}

// A start that is given up says so, and why: the new process had time left.
func TestStartCancelled(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	why := errors.New("the end of all")
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(200*time.Millisecond, func() { cancel(why) })
	_, err = Start(ctx, Options{Env: append(os.Environ(), "TAKEOVER_TEST=hangs"), Stderr: os.Stderr, ReadyTimeout: time.Minute,
		Listeners: []Listener{{Name: "client", Address: "configured", Listener: ln}}})
	if !errors.Is(err, why) || strings.Contains(err.Error(), "in time") || !strings.Contains(err.Error(), "cancelled before the new process was ready") {
		t.Errorf("%v", err)
	}
}

func TestInheritRejects(t *testing.T) {
	t.Setenv(linkVar, "x")
	if _, err := Inherit(nil, "client"); err == nil || !strings.Contains(err.Error(), linkVar) {
		t.Errorf("a link of %q: %v", "x", err)
	}
	t.Setenv(formerLinkVar, "y")
	if _, err := Inherit(nil, "client"); err == nil || !strings.Contains(err.Error(), `"y"`) {
		t.Errorf("a link of %q under its former name: %v", "y", err)
	}
	for _, k := range []struct{ count, names, says string }{
		{"-1", "", "LISTEN_FDS"}, {"1000000", "", "LISTEN_FDS"}, {"two", "", "LISTEN_FDS"},
		{"2", "client:clinet", "client"},
		{"1", "client", "no socket"},
	} {
		// Descriptors that these tests' process has at 3 and 4 are not listeners.
		_, err := fromSystemd(k.count, k.names, nil, []string{"client", "admin"})
		if err == nil {
			t.Errorf("%q sockets named %q were taken", k.count, k.names)
		}
	}
	t.Setenv("LISTEN_PID", "1")
	t.Setenv("LISTEN_FDS", "1")
	if in, err := Inherit(nil, "client"); in != nil || err != nil {
		t.Errorf("sockets of another process were taken: %v, %v", in, err)
	}
	if os.Getenv("LISTEN_FDS") != "" {
		t.Error("the words about sockets are left to children")
	}
}
