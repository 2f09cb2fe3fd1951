package hotrestart

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// linkVar names the descriptor of the socket pair to a new process.
	linkVar = "SLUICE_TAKEOVER_FD"
	// firstFD is the first descriptor that systemd passes, and the first after the
	// standard three that we do.
	firstFD = 3
	// messageTimeout bounds the words of a process that is there and has nothing to wait for.
	messageTimeout = 5 * time.Second
	// maxFDs bounds what is believed of the environment.
	maxFDs = 64
)

// hello is what the old process says.
type hello struct {
	Sockets []socket        `json:"sockets"`
	State   json.RawMessage `json:"state,omitempty"`
	// Connections is the descriptor over which connections are passed; 0: none are.
	Connections int `json:"connections,omitempty"`
}

type socket struct {
	Name    string `json:"name"`
	Address string `json:"address"` // as it was configured
	FD      int    `json:"fd"`
	Unlink  bool   `json:"unlink,omitempty"` // of a unix socket: the file goes with the last process
}

// report is what the new process says, and the old one's "go".
type report struct {
	Ready bool `json:"ready,omitempty"`
	// Connections says that the new process takes connections.
	Connections bool   `json:"connections,omitempty"`
	Failed      string `json:"failed,omitempty"`
	Go          bool   `json:"go,omitempty"`
}

// InheritedListeners is what a process was given at its start. A nil one is nothing.
type InheritedListeners struct {
	sockets    map[string]*inherited
	state      []byte
	parentLink net.Conn // to the process that started this one; nil: systemd did
	in         *bufio.Reader

	acceptReady chan struct{} // closed when listeners may accept
	once        sync.Once
	parentGone  chan struct{} // closed when the process that started this one has ended

	used        []string      // names of the sockets that were asked for and given
	connections *net.UnixConn // over which connections are passed; nil: none are
	acceptConn  ConnAcceptor  // nil: this process takes none
}

type inherited struct {
	file    *os.File
	address string // "" where systemd chose it
	unlink  bool
}

// Inherit takes what the environment says was passed to this process, and takes
// the saying out of the environment, so that no child of ours believes it. It gives
// nil when nothing was passed. names are the sockets there may be; a single one
// that systemd calls otherwise is the first of them.
func Inherit(names ...string) (*InheritedListeners, error) {
	defer func() {
		for _, v := range []string{linkVar, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
			_ = os.Unsetenv(v)
		}
	}()
	if v := os.Getenv(linkVar); v != "" {
		return fromParent(v)
	}
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	return fromSystemd(os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES"), names)
}

func fromSystemd(count, called string, names []string) (*InheritedListeners, error) {
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > maxFDs {
		return nil, fmt.Errorf("takeover: LISTEN_FDS is %q; want the number of sockets passed, at most %d", count, maxFDs)
	}
	given := strings.Split(called, ":")
	i := &InheritedListeners{sockets: map[string]*inherited{}, acceptReady: make(chan struct{}), parentGone: make(chan struct{})}
	close(i.acceptReady)
	close(i.parentGone)
	for k := range n {
		name := ""
		if k < len(given) {
			name = given[k]
		}
		if !slices.Contains(names, name) {
			if n > 1 {
				i.Close()
				return nil, fmt.Errorf("takeover: socket %d of %d that systemd passed is named %q; want FileDescriptorName= to be one of %s", k+1, n, name, strings.Join(names, ", "))
			}
			name = names[0]
		}
		if i.sockets[name] != nil {
			i.Close()
			return nil, fmt.Errorf("takeover: systemd passed two sockets named %q; want one: a name for each, and one address a name", name)
		}
		f, err := listening(firstFD + k)
		if err != nil {
			i.Close()
			return nil, fmt.Errorf("takeover: socket %q that systemd passed: %w", name, err)
		}
		i.sockets[name] = &inherited{file: f}
	}
	return i, nil
}

// listening takes a descriptor that must be a listening stream socket.
func listening(fd int) (*os.File, error) {
	accepts, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d is no socket: %w", fd, err)
	}
	if accepts == 0 {
		return nil, fmt.Errorf("descriptor %d is a socket that does not listen; want ListenStream= and Accept=no", fd)
	}
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "listener"), nil
}

func fromParent(v string) (*InheritedListeners, error) {
	fd, err := strconv.Atoi(v)
	if err != nil || fd < firstFD {
		return nil, fmt.Errorf("takeover: $%s is %q; want a descriptor: it is set by a router that is replaced, never by hand", linkVar, v)
	}
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "link")
	link, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("takeover: $%s names descriptor %d, which is no socket: %w", linkVar, fd, err)
	}
	i := &InheritedListeners{sockets: map[string]*inherited{}, parentLink: link, in: bufio.NewReader(link), acceptReady: make(chan struct{}), parentGone: make(chan struct{})}
	var h hello
	if err := receive(link, i.in, messageTimeout, &h); err != nil {
		link.Close()
		return nil, fmt.Errorf("takeover: cannot hear the router that is replaced: %w", err)
	}
	for _, s := range h.Sockets {
		file, err := listening(s.FD)
		if err != nil {
			i.ReportFailed(err)
			i.Close()
			return nil, fmt.Errorf("takeover: socket %q of the router that is replaced: %w", s.Name, err)
		}
		i.sockets[s.Name] = &inherited{file: file, address: s.Address, unlink: s.Unlink}
	}
	i.state = h.State
	if h.Connections != 0 {
		if i.connections, err = connectionsLink(h.Connections); err != nil {
			i.ReportFailed(err)
			i.Close()
			return nil, err
		}
	}
	return i, nil
}

// Listen gives the listener of that name where one was passed, else a new one at
// addr, a TCP address. It accepts nothing before Ready.
func (i *InheritedListeners) Listen(name, addr string) (net.Listener, error) {
	ln, _, err := i.Listener(name, addr)
	if ln != nil || err != nil {
		return ln, err
	}
	if ln, err = net.Listen("tcp", addr); err != nil {
		return nil, err
	}
	return i.pauseListener(ln), nil
}

// Listener gives the listener of that name where one was passed, else nil; it accepts
// nothing before Ready. One that a router passed is given only where it was
// configured as addr too. unlink is what Listener.Unlink was.
func (i *InheritedListeners) Listener(name, addr string) (ln net.Listener, unlink bool, err error) {
	if i == nil {
		return nil, false, nil
	}
	s := i.sockets[name]
	if s == nil || s.address != "" && s.address != addr {
		return nil, false, nil
	}
	if ln, err = net.FileListener(s.file); err != nil {
		return nil, false, fmt.Errorf("takeover: cannot use the socket %q that was passed: %w", name, err)
	}
	s.file.Close()
	delete(i.sockets, name)
	i.used = append(i.used, name)
	return i.pauseListener(ln), s.unlink, nil
}

// pauseListener keeps ln from accepting before Ready.
func (i *InheritedListeners) pauseListener(ln net.Listener) net.Listener {
	if i == nil || i.parentLink == nil {
		return ln
	}
	return &pausedListener{Listener: ln, ready: i.acceptReady, closed: make(chan struct{})}
}

// pausedListener is a listener that does not accept yet.
type pausedListener struct {
	net.Listener
	ready  <-chan struct{}
	closed chan struct{}
	once   sync.Once
}

func (h *pausedListener) Accept() (net.Conn, error) {
	ln, err := h.Opened()
	if err != nil {
		return nil, err
	}
	return ln.Accept()
}

// Opened waits until connections may be accepted, for those who do it themselves, and
// gives the listener that they come from.
func (h *pausedListener) Opened() (net.Listener, error) {
	select {
	case <-h.ready:
		return h.Listener, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// SetUnlinkOnClose is net.UnixListener's.
func (h *pausedListener) SetUnlinkOnClose(unlink bool) { setUnlink(h.Listener, unlink) }

// setUnlink says of a unix socket whether its file goes with it; nothing of others.
func setUnlink(ln net.Listener, unlink bool) {
	if u, ok := ln.(interface{ SetUnlinkOnClose(bool) }); ok {
		u.SetUnlinkOnClose(unlink)
	}
}

func (h *pausedListener) Close() error {
	h.once.Do(func() { close(h.closed) })
	return h.Listener.Close()
}

// Replaces says whether a router that runs is to be replaced by this process.
func (i *InheritedListeners) Replaces() bool { return i != nil && i.parentLink != nil }

// State is what the router that is replaced has handed over, nil for nothing.
func (i *InheritedListeners) State() []byte {
	if i == nil {
		return nil
	}
	return i.state
}

// Ready tells the router that is replaced that this one is ready, waits for its
// "go" and lets the listeners accept. Where that router has ended meanwhile they
// accept all the same: there is nobody else to. It fails when that router goes on.
func (i *InheritedListeners) Ready() error {
	if !i.Replaces() {
		return nil
	}
	var r report
	if err := send(i.parentLink, report{Ready: true, Connections: i.acceptConn != nil}); err == nil {
		if err := receive(i.parentLink, i.in, messageTimeout, &r); err == nil && !r.Go {
			return errors.New("takeover: the router that was to be replaced goes on")
		} else if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("takeover: no word from the router that was to be replaced: %w", err)
		}
	}
	i.once.Do(func() { close(i.acceptReady) })
	if i.acceptConn != nil {
		go i.receiveConnections()
	}
	go i.watch()
	return nil
}

// watch waits for the end of the link, which is that of the process behind it.
func (i *InheritedListeners) watch() {
	defer close(i.parentGone)
	_ = i.parentLink.SetReadDeadline(time.Time{})
	for {
		if _, err := i.in.ReadByte(); err != nil {
			i.parentLink.Close()
			return
		}
	}
}

// ParentGone is closed when the router that was replaced has ended; at once where there
// was none. Of use after Ready.
func (i *InheritedListeners) ParentGone() <-chan struct{} {
	if i == nil {
		c := make(chan struct{})
		close(c)
		return c
	}
	return i.parentGone
}

// ReportFailed tells the router that is replaced why this one does not become ready.
func (i *InheritedListeners) ReportFailed(err error) {
	if i.Replaces() {
		_ = send(i.parentLink, report{Failed: err.Error()})
	}
}

// Close lets go of sockets that nobody has asked for.
func (i *InheritedListeners) Close() (names []string) {
	if i == nil {
		return nil
	}
	for name, s := range i.sockets {
		s.file.Close()
		names = append(names, name)
	}
	clear(i.sockets)
	if i.connections != nil && i.acceptConn == nil {
		i.connections.Close()
	}
	slices.Sort(names)
	return names
}

func send(c net.Conn, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := c.SetWriteDeadline(time.Now().Add(messageTimeout)); err != nil {
		return err
	}
	_, err = c.Write(append(line, '\n'))
	return err
}

func receive(c net.Conn, in *bufio.Reader, within time.Duration, v any) error {
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	line, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, v)
}
