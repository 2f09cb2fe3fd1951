//go:build linux

package rawsocket

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
)

// within is how long anything here may take on a busy machine.
const within = 30 * time.Second

// listen makes a Listener at a port of its own.
func listen(t *testing.T, at string) (*Listener, string) {
	t.Helper()
	ln, err := net.Listen("tcp", at)
	if err != nil {
		t.Skip(err)
	}
	l, ok := NewListener(ln)
	if !ok {
		t.Fatal("a TCP listener is not accepted at by hand")
	}
	t.Cleanup(func() { _, _ = l.Close(), ln.Close() })
	return l, ln.Addr().String()
}

// connected is a connection on which hello was sent, and its client's side.
func connected(t *testing.T, hello string) (c *Conn, client *net.TCPConn) {
	t.Helper()
	l, at := listen(t, "127.0.0.1:0")
	nc, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(nc, hello); err != nil {
		t.Fatal(err)
	}
	if c, _, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Close(), nc.Close() })
	return c, nc.(*net.TCPConn)
}

// TestAccept: a connection has what net would have set on it and the addresses it would
// have reported, whether it came before the Listener was made, behind it, or with no request.
func TestAccept(t *testing.T) {
	for _, network := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		ln, err := net.Listen("tcp", network)
		if err != nil {
			t.Log(err)
			continue
		}
		defer ln.Close()
		early, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer early.Close()
		l, ok := NewListener(ln)
		if !ok {
			t.Fatal("not accepted at by hand")
		}
		defer l.Close()
		fd := descriptorOf(t, l)
		n, _ := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT)
		if can := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, deferAccept) == nil; can && n == 0 {
			t.Error("connections without a request are not put off")
		}
		for i, what := range []string{"", "a request", ""} {
			client := early
			if i > 0 {
				if client, err = net.Dial("tcp", ln.Addr().String()); err != nil {
					t.Fatal(err)
				}
				defer client.Close()
				if _, err := io.WriteString(client, what); err != nil {
					t.Fatal(err)
				}
			}
			c, from, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			local, remote := client.LocalAddr().(*net.TCPAddr).AddrPort(), client.RemoteAddr().(*net.TCPAddr).AddrPort()
			if from != local.Addr().Unmap() || unmapped(c.RemoteAddr()) != unmap(local) || unmapped(c.LocalAddr()) != unmap(remote) {
				t.Errorf("%s: from %v, %v to %v; want %v to %v", network, from, c.RemoteAddr(), c.LocalAddr(), local, remote)
			}
			for _, o := range [][3]int{{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 15}, {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 9}} {
				if n, err := unix.GetsockoptInt(int(c.fd), o[0], o[1]); err != nil || n != o[2] {
					t.Errorf("%s, connection %d: option %d of level %d is %d, want %d (%v)", network, i, o[1], o[0], n, o[2], err)
				}
			}
			if flags, err := unix.FcntlInt(uintptr(c.fd), unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK == 0 {
				t.Errorf("a descriptor that waits: %x %v", flags, err)
			}
			if flags, err := unix.FcntlInt(uintptr(c.fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("a descriptor that other programs get: %x %v", flags, err)
			}
		}
	}
}

func unmapped(a net.Addr) netip.AddrPort { return unmap(a.(*net.TCPAddr).AddrPort()) }

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

func descriptorOf(t *testing.T, l *Listener) (fd int) {
	t.Helper()
	if err := l.raw.Control(func(of uintptr) { fd = int(of) }); err != nil {
		t.Fatal(err)
	}
	return fd
}

func TestListenerCloses(t *testing.T) {
	l, _ := listen(t, "127.0.0.1:0")
	failed := make(chan error, 1)
	go func() {
		_, _, err := l.Accept()
		failed <- err
	}()
	time.Sleep(10 * time.Millisecond) // so that it may wait; either way it ends
	_ = l.Close()
	select {
	case err := <-failed:
		if err == nil {
			t.Error("a connection was accepted that nobody made")
		}
	case <-time.After(within):
		t.Fatal("Accept waits on")
	}
}

// TestConnInNoPoller: what need not wait is done without Go's poller; what does, in it.
func TestConnInNoPoller(t *testing.T) {
	c, client := connected(t, "hello, and more")
	_ = c.SetDeadline(time.Now().Add(time.Hour))
	buf := make([]byte, 5)
	if n, err := c.Read(buf); n != 5 || err != nil || string(buf) != "hello" {
		t.Fatal(n, err)
	}
	raw, _ := c.SyscallConn()
	got := 0
	if err := raw.Read(func(fd uintptr) bool { got, _ = Recv(int(fd), make([]byte, 20)); return true }); err != nil || got != len(", and more") {
		t.Fatal(got, err)
	}
	if n, err := c.Write([]byte("answer")); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	if err := raw.Write(func(uintptr) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(uintptr) {}); err != nil {
		t.Fatal(err)
	}
	if c.poller.Load() != nil {
		t.Fatal("nothing had to wait, and the descriptor is in the poller")
	}
	done := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(c, buf)
		done <- err
	}()
	testwait.Until(t, "the read that waits is in the poller", func() bool { return c.poller.Load() != nil })
	_, _ = io.WriteString(client, "later")
	if err := <-done; err != nil || string(buf) != "later" {
		t.Fatalf("%q %v", buf, err)
	}
	_ = c.CloseWrite()
	if all, err := io.ReadAll(client); err != nil || string(all) != "answer" {
		t.Fatalf("%q %v", all, err)
	}
	_ = client.Close()
	if n, err := c.Read(buf); n != 0 || err != io.EOF {
		t.Fatal(n, err)
	}
}

// TestConnDeadlines: those that were set before anything waited hold for what waits, and
// a later one reaches it.
func TestConnDeadlines(t *testing.T) {
	ways := map[string]func(c *Conn) error{
		"Read": func(c *Conn) error { _, err := c.Read(make([]byte, 1)); return err },
		"RawConn.Read": func(c *Conn) error {
			raw, _ := c.SyscallConn()
			return raw.Read(func(uintptr) bool { return false })
		},
		"Write": func(c *Conn) error { _, err := c.Write(make([]byte, 64<<20)); return err },
		"RawConn.Write": func(c *Conn) error {
			raw, _ := c.SyscallConn()
			return raw.Write(func(fd uintptr) bool { _, _ = Send(int(fd), make([]byte, 1<<20)); return false })
		},
	}
	for name, wait := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, _ := connected(t, "x")
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			_ = c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
			if err := wait(c); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("set before: %v", err)
			}
			_ = c.SetDeadline(time.Now().Add(time.Hour))
			go func() { _ = c.SetDeadline(time.Now().Add(20 * time.Millisecond)) }()
			if err := wait(c); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("set while it waits: %v", err)
			}
			_ = c.SetDeadline(time.Time{})
			time.AfterFunc(time.Millisecond, func() { _ = c.Close() })
			if err := wait(c); !errors.Is(err, net.ErrClosed) {
				t.Fatalf("closed while it waits: %v", err)
			}
		})
	}
}

// A write that begins out of the poller and ends in it sends all, in order.
func TestConnWritesAll(t *testing.T) {
	c, client := connected(t, "x")
	sent := make([]byte, 16<<20)
	for i := range sent {
		sent[i] = byte(i * 7 >> 3)
	}
	failed := make(chan error, 1)
	go func() {
		n, err := c.Write(sent)
		if err == nil && n != len(sent) {
			err = io.ErrShortWrite
		}
		_ = c.CloseWrite()
		failed <- err
	}()
	testwait.Until(t, "its socket is full", func() bool { return c.poller.Load() != nil })
	got, err := io.ReadAll(client)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes came, or others: %v", len(got), len(sent), err)
	}
	if err := <-failed; err != nil {
		t.Error(err)
	}
	if c.poller.Load() == nil {
		t.Error("the socket was never full")
	}
}

func TestConnClosed(t *testing.T) {
	for _, waited := range []bool{false, true} {
		c, _ := connected(t, "x")
		if waited {
			if _, err := c.ensurePoller(); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		raw, _ := c.SyscallConn()
		_, readErr := c.Read(make([]byte, 1))
		_, writeErr := c.Write([]byte("x"))
		never := func(uintptr) bool { t.Error("a use of a closed connection"); return true }
		for what, err := range map[string]error{
			"Close": c.Close(), "Read": readErr, "Write": writeErr, "CloseWrite": c.CloseWrite(),
			"RawConn.Read": raw.Read(never), "RawConn.Write": raw.Write(never), "RawConn.Control": raw.Control(func(uintptr) { never(0) }),
		} {
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s, closed, had waited %v: %v", what, waited, err)
			}
		}
		if ip := c.RemoteAddr().(*net.TCPAddr).IP; ip != nil {
			t.Errorf("the address of a closed connection is %v", ip)
		}
	}
}

// A descriptor stays open for a use in progress, and is closed behind the last.
func TestConnCloseWaitsForRefs(t *testing.T) {
	for _, waited := range []bool{false, true} {
		c, client := connected(t, "x")
		if waited {
			_, _ = c.ensurePoller()
		}
		raw, _ := c.SyscallConn()
		err := raw.Control(func(fd uintptr) {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if _, errno := Send(int(fd), []byte("still")); errno != 0 {
				t.Errorf("closed under a use: %v", errno)
			}
			if err := raw.Control(func(uintptr) { t.Error("a use began behind Close") }); err == nil {
				t.Error("a use behind Close")
			}
		})
		if err != nil {
			t.Error(err)
		}
		_ = client.SetReadDeadline(time.Now().Add(within))
		// "x" was not read, so the end is a reset, which may overtake what was sent.
		if got, err := io.ReadAll(client); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("not closed: %q %v", got, err)
		}
	}
}

// TestConnDescriptorIsNotReused: connections come and go, each with several who use it, while another
// closes it. A goroutine that gets a descriptor finds its own client at the other end, never the
// one whose connection has the same number by now, and in the end all are closed.
func TestConnDescriptorIsNotReused(t *testing.T) {
	l, at := listen(t, "127.0.0.1:0")
	rounds := 1000
	if testing.Short() {
		rounds = 200
	}
	var uses atomic.Int64
	var all sync.WaitGroup
	slots := make(chan struct{}, 16)
	for range rounds {
		slots <- struct{}{}
		nc, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		// All that a client says is its own port.
		port := nc.LocalAddr().(*net.TCPAddr).AddrPort().Port()
		word := binary.BigEndian.AppendUint16(nil, port)
		_, _ = nc.Write(word)
		c, _, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		own := func(fd uintptr) {
			uses.Add(1)
			name, err := unix.Getpeername(int(fd))
			if err == unix.ENOTCONN { // the client has gone
				return
			}
			if at, ok := name.(*unix.SockaddrInet4); err != nil || !ok || at.Port != int(port) {
				t.Errorf("in the place of the client at port %d: %v %v", port, name, err)
			}
		}
		raw, _ := c.SyscallConn()
		var users sync.WaitGroup
		ways := []func() error{
			func() error { return raw.Control(own) },
			func() error { return raw.Read(func(fd uintptr) bool { own(fd); return true }) },
			func() error {
				buf := make([]byte, 2)
				n, err := c.Read(buf)
				if n == 2 && !bytes.Equal(buf, word) {
					t.Errorf("a client at port %d has said %x", port, buf)
				}
				if err == io.EOF {
					return raw.Control(own)
				}
				return err
			},
			func() error { _, err := c.Write(word); return ignoreClosed(err) },
			func() error { return c.SetDeadline(time.Now().Add(time.Minute)) },
		}
		for _, way := range ways {
			users.Go(func() {
				for range 200 {
					if way() != nil {
						return
					}
				}
			})
		}
		users.Go(func() {
			// The client's side goes first, now and then.
			if port%3 == 0 {
				_, _ = io.CopyN(io.Discard, nc, int64(port%64))
				_ = nc.Close()
			}
			_ = c.Close()
			_ = nc.Close()
		})
		all.Go(func() { users.Wait(); <-slots })
	}
	all.Wait()
	if uses.Load() == 0 {
		t.Error("nothing was used before it was closed")
	}
	_ = l.Close()
}

// ignoreClosed is nil where the other side has gone first.
func ignoreClosed(err error) error {
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	return err
}
