package fdlimit

import (
	"errors"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// Reserve is the number of reserved descriptors. With a limit under 512 an eighth of the
	// limit is reserved instead.
	Reserve = 64
	// refreshInterval is how often the limit is read: another process may change it.
	refreshInterval = time.Second
)

var (
	reservedFrom atomic.Int64 // the first reserved number
	refreshedAt  atomic.Int64 // when reservedFrom was computed, in Unix nanoseconds
)

// IsReserved reports whether fd is a reserved descriptor, which ordinary work must close. It
// reads the clock and makes one system call a second. It is safe for concurrent use.
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

// exhaustionErrors mean that this machine lacks a resource, whatever the peer: a descriptor
// of the process or the system, memory for a socket, a local port.
var exhaustionErrors = [...]syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL}

// IsExhausted reports whether err means that this machine lacks the resources for another
// connection. Such an error says nothing about the peer.
func IsExhausted(err error) bool {
	for _, e := range exhaustionErrors {
		if errors.Is(err, e) {
			return true
		}
	}
	return errors.Is(err, ErrReserved)
}

// ErrReserved is the error of a connection that was closed because its descriptor is
// reserved.
var ErrReserved = errors.New("fdlimit: no file descriptor left except those reserved for the admin listener; raise the limit (ulimit -n, LimitNOFILE=)")
