package fdlimit

import (
	"errors"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// Reserve is how many descriptors, at the most, are kept free; an eighth of a
	// small limit.
	Reserve = 64
	// refreshInterval is how often the limit is looked at: another process may change it.
	refreshInterval = time.Second
)

var (
	reservedFrom atomic.Int64 // numbers from here on are of the reserve
	refreshedAt  atomic.Int64 // when, Unix nanoseconds
)

// IsReserved says whether a descriptor of this number is of the reserve: whoever has it for
// ordinary work gives it back. It costs a look at the clock and, once a second, a
// system call.
func IsReserved(fd int) bool {
	if now := time.Now().UnixNano(); now-refreshedAt.Load() > int64(refreshInterval) {
		reservedFrom.Store(refresh())
		refreshedAt.Store(now)
	}
	return int64(fd) >= reservedFrom.Load()
}

func refresh() int64 {
	var lim syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim) != nil || lim.Cur > 1<<40 {
		return 1 << 40
	}
	reserve := int64(lim.Cur)
	return reserve - min(Reserve, reserve/8)
}

// exhaustionErrors are errors that speak of this machine's means and not of who was called: no
// descriptor left to the process or the system, no memory for a socket, no local port.
var exhaustionErrors = [...]syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL}

// IsExhausted says whether a connection could not be made for want of means of our own.
func IsExhausted(err error) bool {
	for _, e := range exhaustionErrors {
		if errors.Is(err, e) {
			return true
		}
	}
	return errors.Is(err, ErrReserved)
}

// ErrReserved is what a connection fails with whose descriptor is of the reserve.
var ErrReserved = errors.New("no file descriptor left beside those kept for the admin listener; raise the limit (ulimit -n, LimitNOFILE=)")
