package fdlimit

import "syscall"

// tableSize is the number of entries that GrowTable allocates, of eight bytes each.
const tableSize = 64 << 10

// GrowTable makes the kernel enlarge this process's descriptor table now. Otherwise the
// kernel doubles the table whenever it is full. In a process with threads each doubling
// waits until every processor has passed through the scheduler, so that accept and connect
// take 5 to 40 ms. A program calls GrowTable once, at start.
func GrowTable() {
	var lim syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim) != nil {
		return
	}
	last := min(lim.Cur, tableSize) - 1
	fd, _, errno := syscall.Syscall(syscall.SYS_FCNTL, 0, syscall.F_DUPFD_CLOEXEC, uintptr(last))
	if errno == 0 {
		_ = syscall.Close(int(fd))
	}
}
