package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// hasRDMA reports whether the machine has an RDMA device.
func (d *doctor) hasRDMA() bool {
	m, _ := filepath.Glob(filepath.Join(d.root, "/sys/class/infiniband/*"))
	return len(m) > 0
}

// rdmaFinding lists the RDMA devices and their ports, and reports whether this user may open
// them.
func (d *doctor) rdmaFinding() finding {
	devices, _ := filepath.Glob(filepath.Join(d.root, "/sys/class/infiniband/*"))
	if len(devices) == 0 {
		return finding{State: findingOff, Detail: "no device in /sys/class/infiniband: NIXL and UCX go over TCP",
			Advice: "nothing, where there is no such card; else load its driver (mlx5_ib, …), or give the container /sys and /dev/infiniband"}
	}
	var ports []string
	active := 0
	for _, dev := range devices {
		found, _ := filepath.Glob(filepath.Join(dev, "ports/*"))
		for _, p := range found {
			state := firstLine(filepath.Join(p, "state"))
			if strings.Contains(state, "ACTIVE") {
				active++
			}
			ports = append(ports, fmt.Sprintf("%s:%s %s, %s, %s", filepath.Base(dev), filepath.Base(p), state, firstLine(filepath.Join(p, "link_layer")), firstLine(filepath.Join(p, "rate"))))
		}
	}
	f := finding{State: findingOK, Detail: fmt.Sprintf("%d devices, %d active ports: %s", len(devices), active, strings.Join(ports, "; "))}
	verbs, _ := filepath.Glob(filepath.Join(d.root, "/dev/infiniband/uverbs*"))
	for _, v := range verbs {
		if err := unix.Access(v, unix.R_OK|unix.W_OK); err != nil {
			f.State, f.Detail = findingOff, fmt.Sprintf("%s; %s: %v", f.Detail, v, err)
			f.Advice = "let this user open /dev/infiniband: the group rdma, or the container's --device=/dev/infiniband"
			return f
		}
	}
	switch {
	case len(verbs) == 0:
		f.State, f.Detail = findingOff, f.Detail+"; no /dev/infiniband/uverbs*, so user space cannot use them"
		f.Advice = "load ib_uverbs, or give the container --device=/dev/infiniband"
	case active == 0:
		f.State, f.Advice = findingOff, "no port is active: see the cable, the switch, the subnet manager (ibstat)"
	}
	return f
}

func firstLine(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return "unknown"
	}
	s, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(s)
}

// memlockWanted is enough locked memory for the completion board and for UCX's own buffers.
const memlockWanted = 256 << 20

// memlockFinding checks the limit of locked memory. Memory that an RDMA card writes to is
// locked.
func memlockFinding(rdma bool) finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return finding{State: findingOff, Detail: err.Error()}
	}
	if l.Cur == unix.RLIM_INFINITY {
		return finding{State: findingOK, Detail: "locked memory is unlimited"}
	}
	f := finding{State: findingOK, Detail: fmt.Sprintf("%s of locked memory (ulimit -l %d)", humanize.IBytes(l.Cur), l.Cur>>10)}
	if !rdma {
		f.Detail += "; over TCP nothing is locked"
	} else if l.Cur < memlockWanted {
		f.State = findingLimited
		f.Advice = "over RDMA registered memory is locked: ulimit -l unlimited; LimitMEMLOCK=infinity in the unit; --ulimit memlock=-1 for the container"
	}
	return f
}

// filesFinding compares the limit of open files with the accepted client connections. Each
// needs a second descriptor for a connection to an engine. Go has raised the soft limit to the
// hard limit.
func filesFinding(clients int) finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return finding{State: findingOff, Detail: err.Error()}
	}
	f := finding{State: findingOK, Detail: fmt.Sprintf("%d open files", l.Max)}
	need := uint64(65536)
	if clients > 0 {
		need = 2*uint64(clients) + 1024
		f.Detail += fmt.Sprintf("; limits.max_conns of %d may need %d", clients, need)
	}
	if l.Max < need {
		f.State = findingLimited
		f.Advice = fmt.Sprintf("ulimit -n %d; LimitNOFILE=%d in the unit; --ulimit nofile=%d for the container; or a lower limits.max_conns", need, need, need)
	}
	return f
}

// uringFinding checks io_uring by creating a ring and closing it.
func uringFinding() finding {
	var params [120]byte // struct io_uring_params
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno == 0 {
		unix.Close(int(fd))
		return finding{State: findingOK, Detail: "the kernel makes rings; this version of sluice uses epoll alone"}
	}
	why := map[unix.Errno]string{
		unix.ENOSYS: "the kernel has none, or a sandbox hides it",
		unix.EPERM:  "forbidden, by the container's seccomp profile or kernel.io_uring_disabled",
	}[errno]
	if why == "" {
		why = errno.Error()
	}
	return finding{State: findingOff, Detail: why + "; this version of sluice uses epoll alone"}
}
