package descriptors

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
	// lookEvery is how often the limit is looked at: another process may change it.
	lookEvery = time.Second
)

var (
	ceiling atomic.Int64 // numbers from here on are of the reserve
	looked  atomic.Int64 // when, Unix nanoseconds
)

// Short says whether a descriptor of this number is of the reserve: whoever has it for
// ordinary work gives it back. It costs a look at the clock and, once a second, a
// system call.
func Short(fd int) bool {
	if now := time.Now().UnixNano(); now-looked.Load() > int64(lookEvery) {
		ceiling.Store(look())
		looked.Store(now)
	}
	return int64(fd) >= ceiling.Load()
}

func look() int64 {
	var lim syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim) != nil || lim.Cur > 1<<40 {
		return 1 << 40
	}
	most := int64(lim.Cur)
	return most - min(Reserve, most/8)
}

// wants are errors that speak of this machine's means and not of who was called: no
// descriptor left to the process or the system, no memory for a socket, no local port.
var wants = [...]syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL}

// Wanting says whether a connection could not be made for want of means of our own.
func Wanting(err error) bool {
	for _, e := range wants {
		if errors.Is(err, e) {
			return true
		}
	}
	return errors.Is(err, ErrReserved)
}

// ErrReserved is what a connection fails with whose descriptor is of the reserve.
var ErrReserved = errors.New("no file descriptor left beside those kept for the admin listener; raise the limit (ulimit -n, LimitNOFILE=)")
