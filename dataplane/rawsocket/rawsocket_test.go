//go:build linux

package rawsocket

import (
	"bytes"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"
)

// pair is a connected pair of sockets that never wait.
func pair(t *testing.T) (a, b int) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fds[0]); _ = syscall.Close(fds[1]) })
	return fds[0], fds[1]
}

// Bytes that a full socket did not accept are sent later, from where it stopped: nothing is lost
// and nothing comes twice, whatever the pieces are.
func TestSendVector(t *testing.T) {
	a, b := pair(t)
	r := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 1<<20)
	for _, count := range []int{0, 1, 2, 15, 16, 17, 50} {
		var pieces [][]byte
		for i := range count {
			piece := make([]byte, []int{0, 1, 100, MaxPiece - 1, MaxPiece + 1, 3 * MaxPiece, MaxVector + 1}[r.IntN(7)])
			for j := range piece {
				piece[j] = byte(r.Uint32())
			}
			if i%7 == 3 {
				piece = nil
			}
			pieces = append(pieces, piece)
		}
		want := bytes.Join(pieces, nil)
		var got []byte
		stops := 0
		for sent := 0; ; stops++ {
			n, errno := SendVector(a, pieces)
			sent += n
			for len(got) < sent {
				m, rerr := Recv(b, buf)
				if rerr != 0 {
					t.Fatalf("%d pieces: %d of %d bytes that were sent have come: %v", count, len(got), sent, rerr)
				}
				got = append(got, buf[:m]...)
			}
			if errno == 0 {
				break
			}
			if errno != syscall.EAGAIN {
				t.Fatal(errno)
			}
			for ; len(pieces) > 0 && n >= len(pieces[0]); pieces = pieces[1:] {
				n -= len(pieces[0])
			}
			pieces[0] = pieces[0][n:]
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d pieces: %d bytes came, want %d, or others", count, len(got), len(want))
		}
		if count == 50 && stops == 0 {
			t.Error("the socket was never full")
		}
	}
	_ = syscall.Shutdown(b, syscall.SHUT_RDWR)
	if n, errno := SendVector(a, [][]byte{{1}, {2}}); n != 0 || errno != syscall.EPIPE {
		t.Errorf("to a closed socket: %d bytes, %v", n, errno)
	}
}

// Over TCP, where what fills no packet waits for more, all of it comes, in its order.
func TestSendVectorOverTCP(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	descriptor := func(c net.Conn, err error) int {
		if err != nil {
			t.Fatal(err)
		}
		f, err := c.(*net.TCPConn).File() // out of the runtime's poller
		_ = c.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		fd := int(f.Fd()) // which makes it one that waits
		if err := syscall.SetNonblock(fd, true); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	a := descriptor(net.Dial("tcp", ln.Addr().String()))
	b := descriptor(ln.Accept())
	r := rand.New(rand.NewPCG(3, 4))
	whole := make([]byte, 20*MaxVector+17)
	for i := range whole {
		whole[i] = byte(r.Uint32())
	}
	for _, cut := range []int{1, 300, MaxPiece + 1, 2*MaxVector - 1, len(whole) - 3} {
		left, got, buf := [][]byte{whole[:cut], whole[cut : len(whole)-1], whole[len(whole)-1:]}, []byte(nil), make([]byte, 1<<20)
		for by := time.Now().Add(30 * time.Second); len(got) < len(whole); {
			if time.Now().After(by) {
				t.Fatalf("cut at %d: %d of %d bytes have come", cut, len(got), len(whole))
			}
			n, errno := SendVector(a, left)
			if errno != 0 && errno != syscall.EAGAIN {
				t.Fatal(errno)
			}
			for ; len(left) > 0 && n >= len(left[0]); left = left[1:] {
				n -= len(left[0])
			}
			if n > 0 {
				left[0] = left[0][n:]
			}
			m, errno := Recv(b, buf)
			if got = append(got, buf[:m]...); errno == syscall.EAGAIN {
				time.Sleep(100 * time.Microsecond)
			}
		}
		if !bytes.Equal(got, whole) {
			t.Errorf("cut at %d: other bytes came", cut)
		}
	}
}
