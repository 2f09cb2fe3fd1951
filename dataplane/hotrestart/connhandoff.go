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

// Connections are passed over a socket pair of their own, one at a time: the old process
// sends a descriptor with what is to be known of it, the new one answers with one byte.
// Until that byte has come the connection is open in both processes, so a new process that
// cannot take it, for want of descriptors or by its limits, costs no client anything.

const (
	// maxState bounds what is told of one connection.
	maxState = 4 << 10

	replyAccepted = 't'
	replyRefused  = 'r'
)

// ConnAcceptor takes over a connection that the process before has passed. fd is its descriptor,
// which is the Taker's where it says that it has taken it, and is closed otherwise. state is
// borrowed.
type ConnAcceptor func(fd int, state []byte) (taken bool)

// AcceptConnections has take called for each connection that the process before passes once this
// one is ready, one after the other. It is to be called before Ready. The process before
// passes none where the socket of this name was not given to this process.
func (i *InheritedListeners) AcceptConnections(name string, take ConnAcceptor) {
	if i != nil && i.connections != nil && slices.Contains(i.used, name) {
		i.acceptConn = take
	}
}

// receiveConnections runs until the process before has ended.
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

// descriptorsIn gives the descriptors that came with a message; none where the kernel had
// no room for them in this process.
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

// connSender is the old process's end.
type connSender struct {
	mu   sync.Mutex
	link *net.UnixConn // nil: the new process takes no connections, or takes them no more
}

// AcceptsConnections says whether Pass is of any use.
func (s *Child) AcceptsConnections() bool {
	s.connections.mu.Lock()
	defer s.connections.mu.Unlock()
	return s.connections.link != nil
}

// SendConnection gives the new process the connection of descriptor fd, of which state, 1 byte to
// 4 KiB, is told. taken: it has it, and this process is to close its own descriptor without
// another read, write or shutdown. A new process that has ended or refuses has not taken it.
// One that does not answer within 5 s counts as having taken it, since it may yet; it is
// passed nothing any more.
func (s *Child) SendConnection(fd int, state []byte) (accepted bool, err error) {
	p := &s.connections
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil {
		return false, errors.New("takeover: the new process takes no connections")
	}
	if len(state) == 0 || len(state) > maxState {
		return false, fmt.Errorf("takeover: %d bytes are told of a connection; want 1 to %d", len(state), maxState)
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
		return false, fmt.Errorf("takeover: cannot pass a connection: %w", err)
	}
	var answer [1]byte
	if _, err := io.ReadFull(p.link, answer[:]); err != nil {
		return errors.Is(err, os.ErrDeadlineExceeded), fmt.Errorf("takeover: no answer to a connection that was passed: %w", err)
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

// connectionsLink is the new process's end of the pair.
func connectionsLink(fd int) (*net.UnixConn, error) {
	if fd < firstFD {
		return nil, fmt.Errorf("takeover: connections are to be passed over descriptor %d; want %d or more", fd, firstFD)
	}
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "connections")
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("takeover: descriptor %d, over which connections are to be passed, is no socket: %w", fd, err)
	}
	link, ok := nc.(*net.UnixConn)
	if !ok {
		nc.Close()
		return nil, fmt.Errorf("takeover: descriptor %d, over which connections are to be passed, is a %T; want a Unix socket", fd, nc)
	}
	return link, nil
}
