package zmtp

import (
	"syscall"
	"testing"
)

func socketPair(t *testing.T) [2]int {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = syscall.SetNonblock(fds[0], true)
	t.Cleanup(func() { syscall.Close(fds[1]) })
	return fds
}

func writeAll(fd int, b []byte) { _, _ = syscall.Write(fd, b) }
