package hotrestart

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Connections are passed over their own socket pair, one at a time: the parent sends a
// descriptor with its state, and the child answers with one byte. Until the answer the
// connection is open in both processes, so that no client loses its connection if the child
// refuses it for want of descriptors or by its limits.

const (
	// maxState bounds the state of one connection, in bytes.
	maxState = 4 << 10

	replyAccepted = 't'
	replyRefused  = 'r'
)

// ConnAcceptor accepts a connection that the parent has passed. If it returns true it owns
// the descriptor fd; otherwise the caller closes it. state is borrowed until it returns.
type ConnAcceptor func(fd int, state []byte) (taken bool)

// AcceptConnections registers take, which is called for each connection that the parent
// passes after Ready, one after the other. It must be called before Ready. It has no effect
// if this process did not inherit the listener called name.
func (i *InheritedListeners) AcceptConnections(name string, take ConnAcceptor) {
	if i != nil && i.connections != nil && slices.Contains(i.used, name) {
		i.acceptConn = take
	}
}

// receiveConnections runs until the parent has ended.
func (i *InheritedListeners) receiveConnections() {
	defer i.connections.Close()
	state, rights := make([]byte, maxState), make([]byte, syscall.CmsgSpace(4*maxFDs))
	for {
		n, oobn, _, _, err := i.connections.ReadMsgUnix(state, rights)
		if err != nil || n == 0 {
			return
		}
		answer := byte(replyRefused)
		fds := descriptorsIn(rights[:oobn])
		for at, fd := range fds {
			if at == 0 && len(fds) == 1 && i.acceptConn(fd, state[:n]) {
				answer = replyAccepted
				continue
			}
			_ = syscall.Close(fd)
		}
		if i.connections.SetWriteDeadline(time.Now().Add(messageTimeout)) != nil {
			return
		}
		if _, err := i.connections.Write([]byte{answer}); err != nil {
			return
		}
	}
}

// descriptorsIn returns the descriptors of a message. There are none if this process had no
// free descriptor for them.
func descriptorsIn(rights []byte) (fds []int) {
	messages, err := syscall.ParseSocketControlMessage(rights)
	if err != nil {
		return nil
	}
	for i := range messages {
		if some, err := syscall.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	return fds
}

// connSender is the parent's end.
type connSender struct {
	mu   sync.Mutex
	link *net.UnixConn // nil: the child accepts no connections, or no more
}

// AcceptsConnections reports whether the child accepts connections.
func (s *Child) AcceptsConnections() bool {
	s.connections.mu.Lock()
	defer s.connections.mu.Unlock()
	return s.connections.link != nil
}

// SendConnection passes the connection with descriptor fd and its state of 1 byte to 4 KiB to
// the child. If accepted is true the child owns the connection, and this process must close
// its descriptor without another read, write or shutdown. A child that has ended or refuses
// has not accepted it. A child that does not answer within 5 s counts as having accepted it,
// since it still may; it is passed no further connections.
func (s *Child) SendConnection(fd int, state []byte) (accepted bool, err error) {
	p := &s.connections
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil {
		return false, errors.New("hotrestart: the new process accepts no connections")
	}
	if len(state) == 0 || len(state) > maxState {
		return false, fmt.Errorf("hotrestart: the state of a connection has %d bytes; want 1 to %d", len(state), maxState)
	}
	accepted, err = p.send(fd, state)
	if err != nil {
		p.link.Close()
		p.link = nil
	}
	return accepted, err
}

func (p *connSender) send(fd int, state []byte) (accepted bool, err error) {
	if err := p.link.SetDeadline(time.Now().Add(messageTimeout)); err != nil {
		return false, err
	}
	if _, _, err := p.link.WriteMsgUnix(state, syscall.UnixRights(fd), nil); err != nil {
		return false, fmt.Errorf("hotrestart: cannot pass a connection: %w", err)
	}
	var answer [1]byte
	if _, err := io.ReadFull(p.link, answer[:]); err != nil {
		return errors.Is(err, os.ErrDeadlineExceeded), fmt.Errorf("hotrestart: no answer to a passed connection: %w", err)
	}
	return answer[0] == replyAccepted, nil
}

func (p *connSender) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != nil {
		p.link.Close()
		p.link = nil
	}
}

// connectionsLink returns the child's end of the pair.
func connectionsLink(fd int) (*net.UnixConn, error) {
	if fd < firstFD {
		return nil, fmt.Errorf("hotrestart: the descriptor for passed connections is %d; want at least %d", fd, firstFD)
	}
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "connections")
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("hotrestart: descriptor %d for passed connections is not a socket: %w", fd, err)
	}
	link, ok := nc.(*net.UnixConn)
	if !ok {
		nc.Close()
		return nil, fmt.Errorf("hotrestart: descriptor %d for passed connections is a %T; want a Unix socket", fd, nc)
	}
	return link, nil
}
