//go:build linux

package sock

import (
	"bytes"
	"math/rand/v2"
	"syscall"
	"testing"
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

// What a full socket did not take is sent later, from where it stopped: nothing is lost
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
