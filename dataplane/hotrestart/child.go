package hotrestart

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Listener is a listener that Start passes to the child.
type Listener struct {
	Name    string
	Address string // as configured; the child uses the listener only for the same address
	Unlink  bool   // of a Unix socket: the last process that closes it removes its file
	net.Listener
}

// Options of Start.
type Options struct {
	Path         string   // of the program [the file that this process was started from]
	Args         []string // without the program's name
	Env          []string // [this process's]
	Stdout       *os.File
	Stderr       *os.File
	Listeners    []Listener
	State        any           // passed as JSON; nil: nothing
	ReadyTimeout time.Duration // until the child must be ready
}

// Child is a started process that accepts connections.
type Child struct {
	PID         int
	link        net.Conn
	connections connSender
}

// Close tells the child that this process has ended. The end of this process does so too.
func (s *Child) Close() {
	s.connections.close()
	s.link.Close()
}

// Start starts a child with the listeners, waits until it reports that it is ready, and lets
// it accept. This process's listeners stay open; the caller closes them. If Start fails, the
// child has been ended and has accepted nothing.
func Start(ctx context.Context, opt Options) (*Child, error) {
	if opt.Path == "" {
		path, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("hotrestart: cannot find the file of this program: %w", err)
		}
		opt.Path = path
	}
	if opt.Env == nil {
		opt.Env = os.Environ()
	}
	ctx, cancel := context.WithTimeout(ctx, opt.ReadyTimeout)
	defer cancel()
	link, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	keep := false
	defer func() {
		if !keep {
			link.Close()
		}
	}()
	files := []*os.File{theirs}
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	connections, childConns, err := pair()
	if err != nil {
		return nil, err
	}
	defer func() {
		if !keep {
			connections.Close()
		}
	}()
	var h hello
	h.Connections = firstFD + len(files)
	files = append(files, childConns)
	for _, l := range opt.Listeners {
		f, err := fileOf(l.Listener)
		if err != nil {
			return nil, fmt.Errorf("hotrestart: cannot pass listener %q: %w", l.Name, err)
		}
		h.Sockets = append(h.Sockets, socket{Name: l.Name, Address: l.Address, FD: firstFD + len(files), Unlink: l.Unlink})
		files = append(files, f)
	}
	if opt.State != nil {
		if h.State, err = json.Marshal(opt.State); err != nil {
			return nil, fmt.Errorf("hotrestart: cannot encode the state: %w", err)
		}
	}
	cmd := exec.Command(opt.Path, opt.Args...)
	cmd.Env = append(opt.Env, linkVar+"="+strconv.Itoa(firstFD), formerLinkVar+"="+strconv.Itoa(firstFD))
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = opt.Stdout, opt.Stderr, files
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("hotrestart: cannot start %q: %w", opt.Path, err)
	}
	theirs.Close() // so that the child's end ends the link
	childConns.Close()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()

	childReport, err := waitReady(ctx, link, h)
	if err == nil {
		keep = true
		for _, l := range opt.Listeners {
			setUnlink(l.Listener, false) // the child owns the file now
		}
		child := &Child{PID: cmd.Process.Pid, link: link}
		if over, ok := connections.(*net.UnixConn); ok && childReport.Connections {
			child.connections.link = over
		} else {
			connections.Close()
		}
		return child, nil
	}
	// The exit status of a child that has ended is part of the error. A running child is
	// killed: it has no clients and nothing to save.
	select {
	case exit := <-ended:
		if errors.Is(err, io.EOF) {
			err = fmt.Errorf("the new process ended before it was ready (%v); its log says why", exit)
		}
	case <-time.After(200 * time.Millisecond):
		_ = cmd.Process.Kill()
	}
	return nil, fmt.Errorf("hotrestart: %w", err)
}

// waitReady sends hello, waits until the child is ready, sends "go" and returns the child's
// report.
func waitReady(ctx context.Context, link net.Conn, h hello) (r report, err error) {
	if err := send(link, h); err != nil {
		return r, fmt.Errorf("cannot write to the new process: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = link.SetReadDeadline(time.Now()) })
	defer stop()
	line, err := bufio.NewReader(link).ReadBytes('\n')
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return r, fmt.Errorf("cancelled before the new process was ready; it was ended: %w", context.Cause(ctx))
	case ctx.Err() != nil:
		return r, errors.New("the new process was not ready in time and was ended; its log says what it waited for")
	case err != nil:
		return r, err
	}
	if err := json.Unmarshal(line, &r); err != nil {
		return r, fmt.Errorf("cannot parse the report of the new process: %w", err)
	}
	if !r.Ready {
		return r, fmt.Errorf("the new process failed: %s", r.Failed)
	}
	if err := send(link, report{Go: true}); err != nil {
		return r, fmt.Errorf("the new process has ended: %w", err)
	}
	return r, nil
}

// pair makes a socket pair. The second end is for the child.
func pair() (net.Conn, *os.File, error) {
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, fmt.Errorf("hotrestart: cannot make a socket pair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "link")
	mine := os.NewFile(uintptr(fds[0]), "link")
	link, err := net.FileConn(mine)
	mine.Close()
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("hotrestart: cannot use a socket pair: %w", err)
	}
	return link, theirs, nil
}

// fileOf duplicates a listener's descriptor. The duplicate shares its mode with the listener,
// which must stay non-blocking: a blocking accept would keep the listener from closing. The
// File method of package net is unsuitable, because its descriptor becomes blocking when a
// process is started with it.
func fileOf(ln net.Listener) (*os.File, error) {
	if h, ok := ln.(*pausedListener); ok {
		ln = h.Listener
	}
	sc, ok := ln.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a %T has no descriptor", ln)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd int
	var dupErr error
	if err := raw.Control(func(of uintptr) { fd, dupErr = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if dupErr != nil {
		return nil, os.NewSyscallError("fcntl", dupErr)
	}
	return os.NewFile(uintptr(fd), "listener"), nil
}
