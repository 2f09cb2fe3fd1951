package fdlimit

import "syscall"

// tableSize is for how many descriptors GrowTable makes room: of eight bytes each in the kernel.
const tableSize = 64 << 10

// GrowTable has the kernel's table of this process's descriptors made large at once. It
// doubles when it is full otherwise, and in a process with threads that takes until every
// processor has passed through the scheduler: accept and connect take 5 to 40 ms then, and
// whatever waits for the thread that is in them. A program calls it once, at its start.
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
