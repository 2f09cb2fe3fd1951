package rawsocket

import (
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
)

// connect connects to at, or says what that failed with.
func connect(t *testing.T, at netip.AddrPort) (fd int, a Address, errno syscall.Errno) {
	t.Helper()
	a, ok := NewAddress(at)
	if !ok {
		t.Fatalf("%v is not an address", at)
	}
	fd, err := a.Socket()
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	testwait.Until(t, "the connection is made or refused", func() bool {
		errno = a.Connect(fd)
		return errno != unix.EINPROGRESS
	})
	return fd, a, errno
}

func TestConnect(t *testing.T) {
	for _, network := range []string{"127.0.0.1:0", "[::1]:0"} {
		ln, err := net.Listen("tcp", network)
		if err != nil {
			t.Log(err)
			continue
		}
		at := netip.MustParseAddrPort(ln.Addr().String())
		fd, a, errno := connect(t, at)
		if errno != 0 {
			t.Fatalf("%v: %v", at, errno)
		}
		nc, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if n, errno := Send(fd, []byte("hello")); n != 5 || errno != 0 {
			t.Fatal(n, errno)
		}
		got := make([]byte, 5)
		if _, err := nc.Read(got); err != nil || string(got) != "hello" {
			t.Fatalf("%q %v", got, err)
		}
		if a.IsSelfConnected(fd) {
			t.Errorf("%v: the other side's address is taken for the connection's own", at)
		}
		own := netip.MustParseAddrPort(nc.RemoteAddr().String())
		if same, _ := NewAddress(own); !same.IsSelfConnected(fd) {
			t.Errorf("%v is not taken for the connection's own address", own)
		}
		_, _ = nc.Close(), ln.Close()
		if _, _, errno := connect(t, at); errno != unix.ECONNREFUSED {
			t.Errorf("nobody listens on %v: %v", at, errno)
		}
	}
}

// TestConnectSelf: a socket that has the port which it connects to, and nobody
// listens on, is connected with itself.
func TestConnectSelf(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(ln.Addr().String())
	_ = ln.Close()
	a, _ := NewAddress(at)
	fd, err := a.Socket()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
		t.Skip(err)
	}
	errno := a.Connect(fd)
	for errno == unix.EINPROGRESS {
		errno = a.Connect(fd)
	}
	if errno != 0 || !a.IsSelfConnected(fd) {
		t.Errorf("%v, own address: %v", errno, a.IsSelfConnected(fd))
	}
}

func TestNewAddress(t *testing.T) {
	for _, at := range []netip.AddrPort{{}, netip.AddrPortFrom(netip.MustParseAddr("fe80::1%lo"), 1)} {
		if _, ok := NewAddress(at); ok {
			t.Errorf("%v", at)
		}
	}
}
