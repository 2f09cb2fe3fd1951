package fdlimit

import (
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
)

func TestIsReserved(t *testing.T) {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	top := int(lim.Cur) - min(Reserve, int(lim.Cur)/8)
	for fd, want := range map[int]bool{0: false, 10: false, top - 1: false, top: true, int(lim.Cur) - 1: true} {
		if IsReserved(fd) != want {
			t.Errorf("of %d, descriptor %d: %v, want %v", lim.Cur, fd, !want, want)
		}
	}
}

func TestIsExhausted(t *testing.T) {
	dial := func(e syscall.Errno) error {
		return fmt.Errorf("engine: %w", &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", e)})
	}
	for err, want := range map[error]bool{
		dial(syscall.EMFILE): true, dial(syscall.ENFILE): true, dial(syscall.EADDRNOTAVAIL): true, fmt.Errorf("x: %w", ErrReserved): true,
		dial(syscall.ECONNREFUSED): false, dial(syscall.ECONNRESET): false, dial(syscall.EHOSTUNREACH): false,
	} {
		if IsExhausted(err) != want {
			t.Errorf("%v: %v", err, !want)
		}
	}
}
