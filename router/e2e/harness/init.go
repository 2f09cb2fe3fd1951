package harness

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// RefusedURL returns a URL that refuses connections for as long as the test runs. It binds the
// port, so that no other process gets it, but does not listen.
func RefusedURL(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("http://127.0.0.1:%d", at.(*unix.SockaddrInet4).Port)
}
