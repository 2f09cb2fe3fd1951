package sim

import (
	"context"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// placeholder is a socket that is bound but does not listen: it keeps a port for
// an engine between its lives, while connects to it are refused by the kernel.
type placeholder struct {
	fd   int
	addr *net.TCPAddr
}

// reservePort binds addr. The listeners made by listenReserved share the port with it
// (SO_REUSEPORT; the kernel gives connections only to sockets that listen).
func reservePort(addr string) (*placeholder, error) {
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
	p := &placeholder{fd: fd}
	// SO_REUSEPORT only after bind: a port somebody else listens on must be an error.
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
		p.addr = &net.TCPAddr{IP: append(net.IP(nil), s.Addr[:]...), Port: s.Port}
	case *unix.SockaddrInet6:
		p.addr = &net.TCPAddr{IP: append(net.IP(nil), s.Addr[:]...), Port: s.Port}
	}
	return p, nil
}

func (p *placeholder) close() { unix.Close(p.fd) }

func setReuse(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
}

// listenReserved listens on a held address.
func listenReserved(addr string) (net.Listener, error) {
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
