package hotrestart

import (
	"bufio"
	"cmp"
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
	// linkVar is the environment variable with the child's descriptor of the socket pair.
	linkVar = "SLUICE_RESTART_FD"
	// formerLinkVar is its name in the previous release, set and read as well, so that a hot
	// restart leads from one release to the other in both directions.
	formerLinkVar = "SLUICE_TAKEOVER_FD"
	// firstFD is the first passed descriptor, after the standard three, both from systemd and
	// from Start.
	firstFD = 3
	// messageTimeout bounds a message of a running process that has nothing to wait for.
	messageTimeout = 5 * time.Second
	// maxFDs bounds the number of descriptors that the environment announces.
	maxFDs = 64
)

// hello is the parent's first message.
type hello struct {
	Sockets []socket        `json:"sockets"`
	State   json.RawMessage `json:"state,omitempty"`
	// Connections is the descriptor for passed connections; 0: the parent passes none.
	Connections int `json:"connections,omitempty"`
}

type socket struct {
	Name    string `json:"name"`
	Address string `json:"address"` // as configured
	FD      int    `json:"fd"`
	Unlink  bool   `json:"unlink,omitempty"` // as Listener.Unlink
}

// report is the child's message, and the parent's "go".
type report struct {
	Ready bool `json:"ready,omitempty"`
	// Connections says that the child accepts connections.
	Connections bool   `json:"connections,omitempty"`
	Failed      string `json:"failed,omitempty"`
	Go          bool   `json:"go,omitempty"`
}

// InheritedListeners are the listeners that a process inherited at its start. A nil
// *InheritedListeners has none.
type InheritedListeners struct {
	sockets    map[string]*inherited
	state      []byte
	parentLink net.Conn // to the old router; nil: systemd started this process
	in         *bufio.Reader

	acceptReady chan struct{} // closed when the listeners may accept
	once        sync.Once
	parentGone  chan struct{} // closed when the old router has ended

	used        []string      // names of the sockets that Listener has returned
	connections *net.UnixConn // for passed connections; nil: the parent passes none
	acceptConn  ConnAcceptor  // nil: this process accepts none
}

type inherited struct {
	file    *os.File
	address string // as configured; "": from systemd
	unlink  bool
}

// Inherit returns the listeners that the environment announces, nil if there are none. It
// removes the variables from the environment, so that no child inherits them. names are the
// accepted names of sockets; former maps old names to them, and may be nil. A single socket
// from systemd with another name gets the first of names.
func Inherit(former map[string]string, names ...string) (*InheritedListeners, error) {
	defer func() {
		for _, v := range []string{linkVar, formerLinkVar, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
			_ = os.Unsetenv(v)
		}
	}()
	if v := cmp.Or(os.Getenv(linkVar), os.Getenv(formerLinkVar)); v != "" {
		return fromParent(v, former)
	}
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	return fromSystemd(os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES"), former, names)
}

func fromSystemd(count, called string, former map[string]string, names []string) (*InheritedListeners, error) {
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > maxFDs {
		return nil, fmt.Errorf("hotrestart: LISTEN_FDS is %q; want the number of passed sockets, at most %d", count, maxFDs)
	}
	given := strings.Split(called, ":")
	i := &InheritedListeners{sockets: map[string]*inherited{}, acceptReady: make(chan struct{}), parentGone: make(chan struct{})}
	close(i.acceptReady)
	close(i.parentGone)
	for k := range n {
		name := ""
		if k < len(given) {
			name = present(given[k], former)
		}
		if !slices.Contains(names, name) {
			if n > 1 {
				i.Close()
				return nil, fmt.Errorf("hotrestart: socket %d of %d that systemd passed is named %q; want FileDescriptorName= to be one of %s", k+1, n, name, strings.Join(names, ", "))
			}
			name = names[0]
		}
		if i.sockets[name] != nil {
			i.Close()
			return nil, fmt.Errorf("hotrestart: systemd passed two sockets named %q; want a different name for each and one address for each name", name)
		}
		f, err := listening(firstFD + k)
		if err != nil {
			i.Close()
			return nil, fmt.Errorf("hotrestart: socket %q that systemd passed: %w", name, err)
		}
		i.sockets[name] = &inherited{file: f}
	}
	return i, nil
}

// present returns the present name of a socket.
func present(name string, former map[string]string) string {
	if renamed := former[name]; renamed != "" {
		return renamed
	}
	return name
}

// listening returns the file of descriptor fd, which must be a listening stream socket.
func listening(fd int) (*os.File, error) {
	accepts, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d is not a socket: %w", fd, err)
	}
	if accepts == 0 {
		return nil, fmt.Errorf("descriptor %d is a socket that does not listen; want ListenStream= and Accept=no", fd)
	}
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "listener"), nil
}

func fromParent(v string, former map[string]string) (*InheritedListeners, error) {
	fd, err := strconv.Atoi(v)
	if err != nil || fd < firstFD {
		return nil, fmt.Errorf("hotrestart: $%s is %q; want a descriptor number; only a router in a hot restart sets this variable", linkVar, v)
	}
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "link")
	link, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("hotrestart: $%s names descriptor %d, which is not a socket: %w", linkVar, fd, err)
	}
	i := &InheritedListeners{sockets: map[string]*inherited{}, parentLink: link, in: bufio.NewReader(link), acceptReady: make(chan struct{}), parentGone: make(chan struct{})}
	var h hello
	if err := receive(link, i.in, messageTimeout, &h); err != nil {
		link.Close()
		return nil, fmt.Errorf("hotrestart: cannot read from the old router: %w", err)
	}
	for _, s := range h.Sockets {
		file, err := listening(s.FD)
		if err != nil {
			i.ReportFailed(err)
			i.Close()
			return nil, fmt.Errorf("hotrestart: socket %q of the old router: %w", s.Name, err)
		}
		i.sockets[present(s.Name, former)] = &inherited{file: file, address: s.Address, unlink: s.Unlink}
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

// Listen returns the inherited listener called name, or else a new one at the TCP address
// addr. Neither accepts before Ready.
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

// Listener returns the inherited listener called name, nil if there is none. It accepts
// nothing before Ready. A listener of a parent is returned only if it was configured with the
// same addr. unlink is its Listener.Unlink.
func (i *InheritedListeners) Listener(name, addr string) (ln net.Listener, unlink bool, err error) {
	if i == nil {
		return nil, false, nil
	}
	s := i.sockets[name]
	if s == nil || s.address != "" && s.address != addr {
		return nil, false, nil
	}
	if ln, err = net.FileListener(s.file); err != nil {
		return nil, false, fmt.Errorf("hotrestart: cannot use the passed socket %q: %w", name, err)
	}
	s.file.Close()
	delete(i.sockets, name)
	i.used = append(i.used, name)
	return i.pauseListener(ln), s.unlink, nil
}

// pauseListener wraps ln so that it does not accept before Ready.
func (i *InheritedListeners) pauseListener(ln net.Listener) net.Listener {
	if i == nil || i.parentLink == nil {
		return ln
	}
	return &pausedListener{Listener: ln, ready: i.acceptReady, closed: make(chan struct{})}
}

// pausedListener is a listener that accepts nothing until ready is closed.
type pausedListener struct {
	net.Listener
	ready  <-chan struct{}
	closed chan struct{}
	once   sync.Once
}

// Accept implements net.Listener. It waits until connections may be accepted.
func (h *pausedListener) Accept() (net.Conn, error) {
	ln, err := h.Opened()
	if err != nil {
		return nil, err
	}
	return ln.Accept()
}

// Opened waits until connections may be accepted and returns the underlying listener, for
// callers that accept on the descriptor themselves.
func (h *pausedListener) Opened() (net.Listener, error) {
	select {
	case <-h.ready:
		return h.Listener, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// SetUnlinkOnClose calls the method of the underlying net.UnixListener.
func (h *pausedListener) SetUnlinkOnClose(unlink bool) { setUnlink(h.Listener, unlink) }

// setUnlink sets whether closing a Unix listener removes its file. Other listeners are
// ignored.
func setUnlink(ln net.Listener, unlink bool) {
	if u, ok := ln.(interface{ SetUnlinkOnClose(bool) }); ok {
		u.SetUnlinkOnClose(unlink)
	}
}

// Close implements net.Listener. It also ends waits of Accept and Opened.
func (h *pausedListener) Close() error {
	h.once.Do(func() { close(h.closed) })
	return h.Listener.Close()
}

// Replaces reports whether this process replaces a running router.
func (i *InheritedListeners) Replaces() bool { return i != nil && i.parentLink != nil }

// State returns the state that the old router passed, as JSON; nil if there is none.
func (i *InheritedListeners) State() []byte {
	if i == nil {
		return nil
	}
	return i.state
}

// Ready tells the old router that this process is ready, waits for its "go" and lets the
// listeners accept. If the old router has ended they accept too, because no other process
// does. Ready fails if the old router continues.
func (i *InheritedListeners) Ready() error {
	if !i.Replaces() {
		return nil
	}
	var r report
	if err := send(i.parentLink, report{Ready: true, Connections: i.acceptConn != nil}); err == nil {
		if err := receive(i.parentLink, i.in, messageTimeout, &r); err == nil && !r.Go {
			return errors.New("hotrestart: the old router continues to serve")
		} else if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("hotrestart: no answer from the old router: %w", err)
		}
	}
	i.once.Do(func() { close(i.acceptReady) })
	if i.acceptConn != nil {
		go i.receiveConnections()
	}
	go i.watch()
	return nil
}

// watch waits for the end of the link, which means that the parent has ended.
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

// ParentGone returns a channel that is closed when the old router has ended, at once if there
// was none. It must be called after Ready.
func (i *InheritedListeners) ParentGone() <-chan struct{} {
	if i == nil {
		c := make(chan struct{})
		close(c)
		return c
	}
	return i.parentGone
}

// ReportFailed tells the old router why this process does not become ready.
func (i *InheritedListeners) ReportFailed(err error) {
	if i.Replaces() {
		_ = send(i.parentLink, report{Failed: err.Error()})
	}
}

// Close closes the inherited sockets that no call has used, and returns their names.
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
