package nixl

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// BenchmarkCalibrate measures how long the machine itself takes to wake a sleeping thread, one
// wake-up a millisecond, beside which the tiers' figures are read: a thread by another
// (eventfd), a process by another (UNIX socket), both in C; and a goroutine in Go's
// poller by a process, as the tiers' readers are.
func BenchmarkCalibrate(b *testing.B) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		b.Skip("no C compiler")
	}
	program := filepath.Join(b.TempDir(), "calibrate")
	if out, err := exec.Command(cc, "-O2", "-std=gnu11", "-o", program, "../native/testdata/calibrate.c", "-lpthread").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	const count = 3000
	for _, how := range []string{"threads", "socket"} {
		b.Run(how, func(b *testing.B) {
			for b.Loop() {
				out, err := exec.Command(program, how, strconv.Itoa(count)).CombinedOutput()
				var p50, p99, cpu float64
				if _, e := fmt.Sscan(string(out), &p50, &p99, &cpu); err != nil || e != nil {
					b.Fatalf("%v: %s", err, out)
				}
				b.ReportMetric(p50/1e3, "p50-µs")
				b.ReportMetric(p99/1e3, "p99-µs")
				b.ReportMetric(cpu, "%cpu")
				b.ReportMetric(cpu*10, "µs-cpu/msg") // of a millisecond
				b.ReportMetric(0, "ns/op")
			}
		})
	}
	b.Run("goroutine", func(b *testing.B) {
		for b.Loop() {
			calibrateGoroutine(b, program, count).report(b)
		}
	})
}

// calibrateGoroutine has a process wake a goroutine that makes no system call through
// the runtime, as the best of our readers.
func calibrateGoroutine(b *testing.B, program string, count int) (m latencies) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	unix.SetNonblock(pair[0], true)
	in, out := os.NewFile(uintptr(pair[0]), "in"), os.NewFile(uintptr(pair[1]), "out")
	defer in.Close()
	cmd := exec.Command(program, "send", strconv.Itoa(count))
	cmd.ExtraFiles = []*os.File{out}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	out.Close()
	raw, err := in.SyscallConn()
	if err != nil {
		b.Fatal(err)
	}
	var buf [8]byte
	began, before := time.Now(), cpuTime()
	in.SetReadDeadline(began.Add(2 * time.Minute))
	err = raw.Read(func(fd uintptr) bool {
		for len(m.times) < count {
			n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&buf)), 8, syscall.MSG_DONTWAIT, 0, 0)
			if errno == syscall.EAGAIN {
				return false
			}
			if errno != 0 || n != 8 {
				return true
			}
			m.times = append(m.times, time.Duration(time.Now().UnixNano()-int64(binary.LittleEndian.Uint64(buf[:]))))
		}
		return true
	})
	took := cpuTime() - before
	m.cpu, m.cpuPerMessage = 100*float64(took)/float64(time.Since(began)), took/time.Duration(count)
	if e := cmd.Wait(); err != nil || e != nil || len(m.times) != count {
		b.Fatalf("%d of %d came: %v, %v", len(m.times), count, err, e)
	}
	return m
}
