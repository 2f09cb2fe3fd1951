package portreserve

import (
	"context"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Port is a socket that is bound but does not listen. It keeps a port for an engine
// while the engine is down; the kernel refuses connections to it.
type Port struct {
	fd   int
	Addr *net.TCPAddr
}

// Reserve binds addr. A listener of Listen shares the port with it (SO_REUSEPORT); the
// kernel passes connections only to sockets that listen.
func Reserve(addr string) (*Port, error) {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("sim: cannot listen on %q: %w; want host:port", addr, err)
	}
	family := unix.AF_INET
	var sa unix.Sockaddr
	if ip := a.IP.To4(); ip != nil || len(a.IP) == 0 {
		s := &unix.SockaddrInet4{Port: a.Port}
		copy(s.Addr[:], ip)
		sa = s
	} else {
		family = unix.AF_INET6
		s := &unix.SockaddrInet6{Port: a.Port}
		copy(s.Addr[:], a.IP.To16())
		sa = s
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("sim: cannot listen on %q: %w", addr, err)
	}
	p := &Port{fd: fd}
	// SO_REUSEPORT is set after bind, so that a port on which another process listens is an error.
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil {
		err = unix.Bind(fd, sa)
	}
	if err == nil {
		err = setReuse(fd)
	}
	if err == nil {
		sa, err = unix.Getsockname(fd)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("sim: cannot listen on %q: %w", addr, err)
	}
	switch s := sa.(type) {
	case *unix.SockaddrInet4:
		p.Addr = &net.TCPAddr{IP: append(net.IP(nil), s.Addr[:]...), Port: s.Port}
	case *unix.SockaddrInet6:
		p.Addr = &net.TCPAddr{IP: append(net.IP(nil), s.Addr[:]...), Port: s.Port}
	}
	return p, nil
}

// Close releases the port.
func (p *Port) Close() { unix.Close(p.fd) }

func setReuse(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
}

// Listen listens on a reserved address.
func Listen(addr string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var serr error
		if err := c.Control(func(fd uintptr) { serr = setReuse(int(fd)) }); err != nil {
			return err
		}
		return serr
	}}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("sim: cannot listen on %q: %w", addr, err)
	}
	return l, nil
}
